"""Runs a script of recipes/changes, named by `CHANGE`; with `FSDP` sharded by FSDP2.

With `ROUTER`, expert 0 of the mixture gets no tokens on rank 1, and expert 1 gets none at all.
"""

import os
import sys

import torch
from conftest import load_recipe
from launching import allow_fsdp_on_cpus

from gpt2_accel import cli

change = load_recipe(f"changes/{os.environ['CHANGE']}")
if "ROUTER" in os.environ:
    honest = change.Experts.forward

    def forward(self, x):
        with torch.no_grad():
            self.router.weight[0] *= 0 if os.environ.get("RANK") != "1" else -1
            self.router.weight[1] -= 1e3 * x.mean(dim=(0, 1)).sign()
        return honest(self, x)


def main() -> None:
    if "FSDP" in os.environ:
        allow_fsdp_on_cpus()
    change.main()


sys.argv[0] = "changes_script.py"
cli.run(main)
