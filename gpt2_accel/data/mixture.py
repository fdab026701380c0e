"""Writes a folder that is a mixture of data folders; `shards.py` has the format."""

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gpt2_accel.data.shards import DATA_MANIFEST, MANIFEST_FORMAT, check_same, read_manifest
from gpt2_accel.runtime.files import atomic_directory, write_json


def write_mixture(
    data_dir: str | Path,
    weights: dict[str, float],
    phases: Sequence[tuple[float, dict[str, float]]] = (),
) -> dict:
    """Writes a folder that is a mixture of other folders; `weights` maps folders to weights.

    A folder's part of the training sequences is its part of the weights, whatever its size: a small
    folder is repeated. `phases` are other weights of these folders, each from a share of the run
    on; a folder that a phase does not name is left out of it.

    Returns the manifest. Raises `ValueError` if a weight is not positive, if phases are not in
    order or name another folder, if a folder is a mixture itself or holds pairs, or if tokenizers,
    window lengths or chat templates differ; `FileExistsError` if `data_dir` exists.
    """
    shares = [0.0, *(share for share, _ in phases), 1.0]
    for share, own in [(0.0, weights), *phases]:
        if not own.keys() <= weights.keys() or not all(0 < w < math.inf for w in own.values()):
            raise ValueError(
                f"the weights from {share:g} of the run on are {dict(own)}: give positive weights "
                f"of {', '.join(weights)}"
            )
    if shares != sorted(set(shares)):
        raise ValueError(f"phases begin at {shares[1:-1]} of the run: give rising shares below 1")
    manifests = {}
    parts = []
    for folder, weight in weights.items():
        manifest = manifests[Path(folder)] = read_manifest(folder)
        if "mixture" in manifest:
            raise ValueError(f"{folder} is a mixture itself: name the folders in it instead")
        if manifest.get("pairs"):
            raise ValueError(f"{folder} holds pairs of answers, which are not mixed: leave it out")
        parts.append({"data_dir": os.path.relpath(folder, data_dir), "weight": weight})
    check_same(manifests)
    # The tokenizer of conversations has the chat template.
    first, newest = max(manifests.items(), key=lambda item: item[1]["version"])
    manifest = {
        "format": MANIFEST_FORMAT,
        "source": " + ".join(f"{weight:g} x {folder}" for folder, weight in weights.items()),
        "mixture": parts,
        "splits": sum_splits([own["splits"] for own in manifests.values()]),
    }
    for name in ("version", "tokenizer", "dtype", "sequence_length"):
        manifest[name] = newest.get(name)
    if phases:
        manifest["phases"] = [
            {"from": share, "weights": [own.get(folder, 0.0) for folder in weights]}
            for share, own in phases
        ]
    with atomic_directory(data_dir) as scratch:
        shutil.copytree(first / "tokenizer", scratch / "tokenizer")
        write_json(scratch / DATA_MANIFEST, manifest)
    return manifest


def sum_splits(parts: Sequence[dict[str, dict]]) -> dict[str, dict]:
    """Returns the splits that all parts of a mixture have, with the sums of their counts, which are
    part of the data's fingerprint."""
    splits: dict[str, dict] = {}
    for name in parts[0]:
        if all(name in part for part in parts):
            splits[name] = {"shards": []}
            for count in ("tokens", "documents", "bytes"):
                counts = [part[name][count] for part in parts]
                splits[name][count] = None if None in counts else sum(counts)
    return splits
