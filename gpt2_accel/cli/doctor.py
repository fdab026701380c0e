"""Checks this machine: is anything broken that training needs, and which launch config fits?

`gpt2-accel doctor` runs it; `accelerate env` prints versions for a report of a bug. Nothing here imports torch before a
check does, so that a broken installation is named instead of a traceback.
"""

import argparse
import importlib
import subprocess
import sys
from importlib import metadata

from gpt2_accel.cli.shipped import fitting_launch
from gpt2_accel.cores import may_have_gpu, usable_cpus
from gpt2_accel.files import sentence

LIBRARIES = ("torch", "accelerate", "transformers", "datasets", "gpt2_accel.train")
COMPILE_SECONDS = 300  # time limit of a first torch.compile
COMPILED = "import sys, torch; torch.compile(torch.sin)(torch.ones(100, device=sys.argv[1]))"


def main() -> None:
    """Prints a line for each check. Exits with code 1 if something that training needs is broken."""
    parser = argparse.ArgumentParser(
        prog="gpt2-accel doctor", description=__doc__.partition("\n")[0]
    )
    parser.parse_args()
    broken = False
    for check in (packages, device, compiler, launch):
        try:
            print(f"ok       {check()}", flush=True)
        except UserWarning as note:  # training works without it
            print(f"note     {note}", flush=True)
        except Exception as error:  # of any library
            broken = True
            print(f"problem  {check.__name__}: {sentence(error)}", flush=True)
    print("Training does not work here." if broken else "Training works here.")
    sys.exit(broken)


def packages() -> str:
    """Compares the required packages with gpt2_accel's metadata, and imports what training imports."""
    from packaging.requirements import Requirement

    found = [f"Python {sys.version.split()[0]}"]
    for requirement in map(Requirement, metadata.requires("gpt2_accel") or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = metadata.version(requirement.name)
        if not requirement.specifier.contains(version, prereleases=True):
            raise ImportError(f"there is {requirement.name} {version}: pip install '{requirement}'")
        found.append(f"{requirement.name} {version}")
    for name in LIBRARIES:
        importlib.import_module(name)
    return ", ".join(found)


def device() -> str:
    """Names the device of a launch without flags."""
    from gpt2_accel.device import device_name, launch_device, total_memory

    found = launch_device()
    if found.type == "cpu" and may_have_gpu():
        raise UserWarning(
            "torch cannot use the GPU of this machine: install a build for the driver's version, "
            "see https://pytorch.org/get-started"
        )
    return f"{device_name(found)}, {total_memory(found) / 1e9:.0f} GB, {usable_cpus()} CPU cores"


def compiler() -> str:
    """Compiles a small function in another process."""
    from gpt2_accel.device import inductor_problem, launch_device

    found = launch_device()
    if problem := inductor_problem(found):
        raise UserWarning(f"{problem}: runs are not compiled")
    command = [sys.executable, "-P", "-c", COMPILED, found.type]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    if done.returncode:
        error = done.stderr.strip().rpartition("\n")[2]
        fix = "install g++ and Python's header files, or launch with --dynamo_backend no"
        kind = UserWarning if found.type == "cpu" else RuntimeError  # cpu.yaml does not compile
        raise kind(f"torch.compile fails ({error}): {fix}")
    return "torch.compile works"


def launch() -> str:
    """Names the launch config that fits."""
    return f"gpt2-accel launch {' '.join(fitting_launch())} RECIPE, or gpt2-accel RECIPE"


if __name__ == "__main__":
    main()
