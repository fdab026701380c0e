"""`gpt2-accel doctor`: is anything broken that training needs, and which launch config fits?

Nothing imports torch before a check does: a broken installation is named.
"""

import importlib
import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

from gpt2_accel.cli.command import fitting_launch
from gpt2_accel.cores import may_have_gpu, missing_gpu, usable_cpus
from gpt2_accel.files import sentence

LIBRARIES = ("torch", "accelerate", "transformers", "datasets", "gpt2_accel.train")
COMPILED = "import sys, torch; torch.compile(torch.sin)(torch.ones(100, device=sys.argv[1]))"


def main() -> None:
    """Prints a line for each check. Exits with code 1 if something that training needs is broken."""
    for check in (packages, device, compiler):
        try:
            print(check(), flush=True)
        except Exception as error:  # of any library
            sys.exit(f"Training does not work here: {sentence(error)}")
    print(f"Training works here: gpt2-accel launch {' '.join(fitting_launch())} RECIPE")


def packages() -> str:
    """Compares the required packages with gpt2_accel's metadata, and imports what training imports."""
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
    text = f"{device_name(found)}, {total_memory(found) / 1e9:.0f} GB, {usable_cpus()} CPU cores"
    if found.type == "cpu" and may_have_gpu():
        text += f"; {missing_gpu()}"
    return text


def compiler() -> str:
    """Compiles a small function in another process."""
    from gpt2_accel.device import inductor_problem, launch_device

    kind = launch_device().type
    if problem := inductor_problem(launch_device()):
        return f"{problem}: runs are not compiled"
    command = [sys.executable, "-P", "-c", COMPILED, kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return "torch.compile works"
    error = done.stderr.strip().rpartition("\n")[2]
    return f"torch.compile fails ({error}): install g++ and Python's header files, or launch with --dynamo_backend no"


if __name__ == "__main__":
    main()
