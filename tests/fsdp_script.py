"""Trains with FSDP2 over gloo: the recipe that `RECIPE` names, or train_script."""

import importlib
import os
import sys

from launching import ROOT, allow_fsdp_on_cpus

from gpt2_accel import cli


def sharded() -> None:
    allow_fsdp_on_cpus()
    sys.path.append(str(ROOT / "recipes"))
    importlib.import_module(os.environ.get("RECIPE", "train_script")).main()


cli.run(sharded)
