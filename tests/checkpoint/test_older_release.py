"""Runs of release 0.6 resume with the same metrics and weights.

`fixtures/README.md` says how they were made.
"""

import json
import os
import platform
from pathlib import Path

import pytest
import torch
from conftest import load_fixture, metrics, read_json, weights_digest
from launching import ROOT, forked

from gpt2_accel.checkpoint.find import file_entry

SAME_ON_EVERY_CPU = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}
SAME = SAME_ON_EVERY_CPU | {"PYTHONPATH": str(ROOT / "recipes/changes")}


KINDS = ["text", "sft", "lora", "dpo", "dpo_nll", "mix", "sam"]


def moved(checkpoint: Path, folder: Path) -> None:
    """Puts the folder's path into the files of an adapter, which names its base by path."""
    state = checkpoint / "training_state/manifest.json"
    manifest = read_json(state)
    for name in ("README.md", "adapter_config.json"):
        file = checkpoint / name
        file.write_text(file.read_text().replace("FOLDER", str(folder)))
        manifest["files"][name] = file_entry(file)
    state.write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_release_0_6_that_stopped_at_update_10_of_20_continues(kind, tmp_path):
    folder = load_fixture("release-0.6", tmp_path)
    made = read_json(folder / "expected.json")[kind]
    if kind == "lora":
        moved(folder / "runs/lora/checkpoint-10", folder)
    script = ROOT / made["script"] if "/" in made["script"] else folder / made["script"]
    argv = [str(script), *made["flags"].split(), "--output_dir", f"runs/{kind}"]
    argv += ["--resume_from", "latest"]
    forked(argv, [os.environ | SAME], cwd=folder, at_import=SAME)
    lines = [line for line in metrics(folder / "runs" / kind) if line["step"] > 10]
    same_machine = platform.machine() == "x86_64" and torch.__version__.startswith("2.13.0")
    for expected, line in zip(made["lines"], lines, strict=True):
        actual = {name: line[name] for name in expected}
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert actual == expected or not same_machine
    assert weights_digest(folder / "runs" / kind) == made["weights"] or not same_machine
