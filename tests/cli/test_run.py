"""Errors of recipes: a sentence for a user's mistake, a traceback for a bug, by one process."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import long, reset_accelerate
from launching import ROOT, launch, launch_flags, launched, python
from tables import table

from gpt2_accel.runtime import accelerator, cores, device
from gpt2_accel.runtime.accelerator import build_accelerator
from gpt2_accel.runtime.cores import usable_cpus

CASES = table("cli/cases")
MISTAKE = "quickstart.py: max_steps must be at least 1, got 0"


def test_the_launcher_prints_only_the_error_message():
    done = launch("recipes/quickstart.py", "--max_steps", 0, launcher=True, fails=True)
    assert done.stdout == ""
    assert done.stderr == f"{MISTAKE}\n"


@long
def test_the_launcher_of_several_processes_prints_the_message_first_and_in_its_report():
    done = launch("recipes/quickstart.py", "--max_steps", 0, processes=2, launcher=True, fails=True)
    assert done.stdout == ""
    ours, report = done.stderr.split("Traceback", 1)
    assert ours.count(MISTAKE) == 1
    assert MISTAKE.partition(": ")[2] in report


@long
def test_the_message_is_all_that_gpt2_accel_prints_of_several_processes():
    flags, env = launch_flags("recipes/quickstart.py", "--max_steps", 0, processes=2)
    command = [sys.executable, "-m", "gpt2_accel", "launch", "cpu", *flags]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True)
    assert (done.returncode, done.stderr.decode()) == (1, f"{MISTAKE}\n")


@pytest.mark.parametrize("config", ["cpu", "cpu_bf16"])
def test_cpu_configs_cause_no_warnings_and_use_all_cores(config, caplog):
    flags = ["--config_file", f"accelerate_configs/{config}.yaml", "x.py"]
    _, [env] = launched(flags, {"OMP_NUM_THREADS": "0"})
    assert not caplog.text
    assert int(env["OMP_NUM_THREADS"]) >= os.cpu_count()
    _, [env] = launched([*flags[:2], "--num_cpu_threads_per_process", "1", "x.py"], {})
    assert env["OMP_NUM_THREADS"] == "1"


def test_torch_threads_are_limited_to_the_cores(monkeypatch):
    limits = []
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1024)
    monkeypatch.setattr(torch, "set_num_threads", limits.append)
    build_accelerator()
    assert limits == [usable_cpus()]


@pytest.mark.parametrize(("code", "ending"), CASES["mistakes and bugs"])
def test_a_mistake_prints_a_sentence_and_a_bug_a_traceback(code, ending, tmp_path):
    script = tmp_path / "x.py"
    script.write_text(
        f"import json; from gpt2_accel import cli\ndef main(): {code}\ncli.run(main)\n"
    )
    done = python(script, fails=True)
    assert done.stderr.endswith(ending)
    assert ("Traceback" in done.stderr) == (not ending.startswith("x.py"))


@pytest.mark.parametrize(("config", "gpu", "words"), CASES["on the CPU"])
def test_unrequested_training_on_the_cpu_is_printed(config, gpu, words, monkeypatch, capsys):
    reset_accelerate()
    for module in (accelerator, cores):
        monkeypatch.setattr(module, "may_have_gpu", lambda: gpu)
    monkeypatch.setattr(accelerator, "configure_backends", lambda *_: None)
    monkeypatch.setenv(device.OVERRIDES, '{"has_bf16": true, "has_cpp_compiler": true}')
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    if config:
        path = f"accelerate_configs/{config}.yaml"
        _, [environment] = launched(["--config_file", path, "x.py"], dict(os.environ))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
    build_accelerator()
    out = capsys.readouterr().out
    assert words in out
    assert bool(out) == bool(words)


@pytest.mark.parametrize(("into", "said"), CASES["full disks and closed pipes"])
def test_output_that_cannot_be_written_ends_no_command(into, said, tmp_path):
    code = "from gpt2_accel import cli\ndef main():\n  print('\u20ac' * 10**5)\n  print('end')\n"
    (tmp_path / "x.py").write_text(f"{code}cli.run(main)")
    command = f"set -o pipefail; {sys.executable} x.py {into}"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True)
    assert (done.returncode, done.stderr.decode()) == (0, said)
