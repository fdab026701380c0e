"""Checks this machine and its Python environment: what works for training, what does not, and the fix.

`gpt2-accel doctor` runs it. The exit code is 1 if something that training needs is broken. Nothing here imports
torch before a check does, so that a broken installation is named instead of a traceback.
"""

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from gpt2_accel.files import sentence

if TYPE_CHECKING:
    import torch

COMPILE_SECONDS = 300  # time limit of a first torch.compile
# Inductor compiles in the subprocess itself, so that the time limit ends the compiler, too.
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# What a subprocess compiles. The cache is a new folder, so the compiler does run.
PROGRAM = """
import sys, torch, gpt2_accel.kernels.compile
x = torch.linspace(-1, 1, 100, device=sys.argv[1])
assert torch.allclose(torch.compile(lambda x: x.sin() * 2 + x)(x), x.sin() * 2 + x, atol=1e-5)
"""


@dataclass
class Row:
    """A line of the table. `state` is "ok", "missing" (training works without it) or "problem".

    `needed` says that training needs it; a problem with it makes the exit code 1.
    """

    state: str
    name: str
    text: str
    fix: str = ""
    needed: bool = False


def main() -> None:
    """Prints the table. Exits with code 1 if something that training needs is broken."""
    argparse.ArgumentParser(
        prog="gpt2-accel doctor", description=__doc__.partition("\n")[0]
    ).parse_args()
    broken = []
    for check in CHECKS:
        for row in run_check(check):
            print(formatted(row), flush=True)
            if row.needed and row.state == "problem":
                broken.append(row.name)
    if broken:
        print(f"\nTraining does not work here: solve the problem with {', '.join(broken)}.")
        sys.exit(1)
    print("\nTraining works here.")


def run_check(check: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yields the rows of a check. An error, such as a library that cannot be imported, becomes a row."""
    try:
        yield from check()
    except Exception as error:  # of any library
        text = f"{type(error).__name__}: {sentence(error)}"
        fix = "correct it, or install gpt2_accel again in a new environment"
        yield Row("problem", check.__name__, text, fix, needed=True)


def formatted(row: Row, width: int = 80) -> str:
    """Formats a row in lines of at most `width` characters, without breaking long words; the fix has its own lines."""
    start = f"{row.state:8}{row.name:9} "
    options = {"width": width, "break_long_words": False, "break_on_hyphens": False}
    indent = " " * len(start)
    lines = textwrap.wrap(row.text, initial_indent=start, subsequent_indent=indent, **options)
    if row.fix:
        lines += textwrap.wrap(
            row.fix, initial_indent=indent + "-> ", subsequent_indent=indent + "   ", **options
        )
    return "\n".join(lines)


def python() -> Iterator[Row]:
    """The version of Python and the operating system."""
    from packaging.specifiers import SpecifierSet

    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.prefix}"
    wanted = metadata.metadata("gpt2_accel")["Requires-Python"] or ""
    if platform.python_version() in SpecifierSet(wanted, prereleases=True):
        yield Row("ok", "python", text)
    else:
        yield Row("problem", "python", text, f"use Python {wanted}", needed=True)


def packages() -> Iterator[Row]:
    """The required packages, with their versions against the ranges of gpt2_accel's metadata."""
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, metadata.requires("gpt2_accel") or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, fix = requirement.name, f"pip install '{requirement}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Row("problem", name, "not installed", fix, needed=True)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            found.append(f"{name} {version}")
        else:
            text = f"{version}, but gpt2_accel needs {requirement.specifier}"
            yield Row("problem", name, text, fix, needed=True)
    for name in ("torch", "accelerate", "transformers", "datasets", "gpt2_accel.train"):
        importlib.import_module(name)
    yield Row("ok", "packages", ", ".join([f"gpt2_accel {metadata.version('gpt2_accel')}", *found]))


def devices() -> Iterator[Row]:
    """The CPU and each GPU with its memory, and the speed of a product in each precision of the one that trains."""
    import torch

    from gpt2_accel import device
    from gpt2_accel.cores import usable_cpus

    free, total = device.free_memory(torch.device("cpu")), device.total_memory()
    cores = f"{usable_cpus()} of {os.cpu_count()} cores, {device.cpu_instructions()}"
    yield Row("ok", "cpu", f"{cores}, {free / 1e9:.1f} of {total / 1e9:.1f} GB of memory free")
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        text = f"{torch.cuda.get_device_name(i)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        yield Row("ok", f"gpu {i}", text)
    if torch.backends.mps.is_available():
        yield Row("ok", "gpu", "Apple GPU (mps)")
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        why = f"torch {torch.__version__} cannot use the NVIDIA GPU of this machine"
        fix = "install a build of torch for the driver's CUDA version: https://pytorch.org/get-started"
        yield Row("problem", "gpu", why, fix)
    chosen = launch_device()
    for precision, dtype in {"fp32": torch.float32, **device.DTYPES}.items():
        if problem := device.precision_problem(chosen, precision):
            yield Row("missing", precision, *problem.split(": ", 1))
        else:
            speed = device.matmul_flops(chosen, dtype) / 1e12
            yield Row("ok", precision, f"{speed:.2g} TFLOP/s on {chosen.type}")


def launch_device() -> "torch.device":
    """Returns the device of a launch without flags: CUDA, MPS or CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def compiler() -> Iterator[Row]:
    """Whether `torch.compile` works: a small function is compiled in another process, with a time limit."""
    from gpt2_accel.device import inductor_problem

    chosen = launch_device()
    if problem := inductor_problem(chosen):
        text, _, fix = problem.partition(" (")
        yield Row("missing", "compiler", f"{text}; training runs uncompiled", fix.rstrip(")"))
        return
    with tempfile.TemporaryDirectory() as cache:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", PROGRAM, str(chosen)],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache} | ONE_COMPILER,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
            )
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            error = lines[-1] if done.returncode else None
        except subprocess.TimeoutExpired:
            error = f"not finished after {COMPILE_SECONDS} s"
    if error:
        fix = "install g++ and Python's header files, or launch with --dynamo_backend no"
        yield Row("problem", "compiler", f"torch.compile fails: {error}", fix)
    else:
        yield Row("ok", "compiler", "torch.compile works")


def launch() -> Iterator[Row]:
    """Which shipped launch config fits this machine."""
    import torch

    from gpt2_accel.device import has_bf16

    chosen = launch_device()
    config = fitting_config(chosen.type, torch.cuda.device_count(), has_bf16(chosen))
    yield Row("ok", "launch", f"gpt2-accel launch {config} RECIPE")


def fitting_config(kind: str, gpus: int, bf16: bool) -> str:
    """Returns the name of the shipped launch config for a device, followed by the flags that it needs."""
    if kind == "mps":
        return "mps"
    if kind == "cpu":
        return "cpu-bf16 --dynamo_backend inductor" if bf16 else "cpu"
    if gpus == 1:
        return "1xgpu" if bf16 else "1xt4-fp16"
    if bf16 and gpus == 4:
        return "4xa100"
    name, count = ("8xa100", 8) if bf16 else ("2xt4-fp16", 2)
    return name if gpus == count else f"{name} --num_processes {gpus}"


CHECKS = (python, packages, devices, compiler, launch)

if __name__ == "__main__":
    main()
