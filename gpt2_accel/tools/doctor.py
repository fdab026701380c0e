"""`gpt2-accel doctor`: is anything broken that training needs, and which launch config fits?

Nothing imports torch before a check does: a broken installation is named.
"""

import importlib
import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

from gpt2_accel.runtime.cores import may_have_gpu, missing_gpu, usable_cpus
from gpt2_accel.runtime.files import sentence

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
    from gpt2_accel.runtime.device import device_name, launch_device, total_memory

    found = launch_device()
    text = f"{device_name(found)}, {total_memory(found) / 1e9:.0f} GB, {usable_cpus()} CPU cores"
    if found.type == "cpu" and may_have_gpu():
        text += f"; {missing_gpu()}"
    return text


def compiler() -> str:
    """Compiles a small function in another process."""
    from gpt2_accel.runtime.device import inductor_problem, launch_device

    kind = launch_device().type
    if problem := inductor_problem(launch_device()):
        return f"{problem}: runs are not compiled"
    command = [sys.executable, "-P", "-c", COMPILED, kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return "torch.compile works"
    error = done.stderr.strip().rpartition("\n")[2]
    return f"torch.compile fails ({error}): install g++ and Python's header files, or launch with --dynamo_backend no"


def fitting_launch() -> list[str]:
    """Returns the name of the shipped launch config that fits this machine, and the launcher's flags that it needs."""
    if not may_have_gpu():
        return ["cpu"]
    from gpt2_accel.runtime.device import accelerator_count, has_bf16, launch_device

    device = launch_device()
    return fitting(device.type, accelerator_count(), has_bf16(device))


def fitting(kind: str, gpus: int, bf16: bool) -> list[str]:
    """Returns what `fitting_launch` returns, for `gpus` devices of a type such as `cuda`.

    A CPU gets `cpu` also if it has bf16 units: compiled bf16, which is faster, takes a minute to start.
    """
    if kind in ("cpu", "mps"):
        return [kind]
    if gpus == 1:
        return ["1xgpu" if bf16 else "1xt4-fp16"]
    if bf16 and gpus == 4:
        return ["4xa100"]
    name, count = ("8xa100", 8) if bf16 else ("2xt4-fp16", 2)
    return [name] if gpus == count else [name, "--num_processes", str(gpus)]


if __name__ == "__main__":
    main()
