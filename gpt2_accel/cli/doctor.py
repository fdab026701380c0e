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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from gpt2_accel.files import sentence

COMPILE_SECONDS = 300  # time limit of a first torch.compile
HUB_SECONDS = 10  # time limit of the Hub's answer
LEAST_DISK = 5e9  # bytes; the checkpoint of a 124M model takes 1.5 GB
FOR_DEVELOPERS = {"dev", "docs", "install", "test"}  # extras that are not reported
VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("TRANSFORMERS_OFFLINE", "TIKTOKEN_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("ATEN_CPU_CAPABILITY", "ACCELERATE_USE_CPU", "GPT2_ACCEL_DEVICE", "GPT2_ACCEL_KERNELS"),
)
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
        for row in answer(check):
            print(formatted(row), flush=True)
            if row.needed and row.state == "problem":
                broken.append(row.name)
    if broken:
        print(f"\nTraining does not work here: solve the problem with {', '.join(broken)}.")
        sys.exit(1)
    print("\nTraining works here.")


def answer(check: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yields the rows of a check. An error, such as a library that cannot be imported, becomes a row."""
    try:
        yield from check()
    except Exception as error:  # of any library
        needed = check in NEEDED
        fix = "correct it, or install gpt2_accel again in a new environment" if needed else ""
        yield Row(
            "problem", check.__name__, f"{type(error).__name__}: {sentence(error)}", fix, needed
        )


def formatted(row: Row, width: int = 80) -> str:
    """Formats a row in lines of at most `width` characters, without breaking long words; the fix has its own lines."""
    start = f"{row.state:8}{row.name:13} "
    options = {"width": width, "break_long_words": False, "break_on_hyphens": False}
    indent = " " * len(start)
    lines = textwrap.wrap(row.text, initial_indent=start, subsequent_indent=indent, **options)
    if row.fix:
        lines += textwrap.wrap(
            row.fix, initial_indent=indent + "-> ", subsequent_indent=indent + "   ", **options
        )
    return "\n".join(lines)


# Software


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
    yield Row("ok", "packages", ", ".join([f"gpt2_accel {metadata.version('gpt2_accel')}", *found]))


def imports() -> Iterator[Row]:
    """Whether everything that training imports can be imported."""
    start = time.perf_counter()
    for name in ("torch", "accelerate", "transformers", "datasets", "gpt2_accel.train"):
        importlib.import_module(name)
    yield Row("ok", "imports", f"all libraries load, in {time.perf_counter() - start:.1f} s")


def extras() -> Iterator[Row]:
    """The optional packages: in one row those that are installed, in a row each the others."""
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in metadata.requires("gpt2_accel") or []]
    installed = []
    for extra in metadata.metadata("gpt2_accel").get_all("Provides-Extra") or []:
        members = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        members = [r for r in members if not r.marker.evaluate({"extra": ""})]
        if extra in FOR_DEVELOPERS or not members:
            continue
        missing = [r for r in members if not is_installed(r.name)]
        if missing:
            names = " ".join(f"'{r.name}{r.specifier}'" for r in missing)
            text = f"{', '.join(r.name for r in missing)} not installed (optional)"
            yield Row("missing", f"[{extra}]", text, f"pip install {names}")
        else:
            installed.append(f"{extra} ({', '.join(r.name for r in members)})")
    if installed:
        yield Row("ok", "extras", ", ".join(installed))


def is_installed(name: str) -> bool:
    """Whether a distribution of this name is installed."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


# Hardware


def devices() -> Iterator[Row]:
    """The CPU with its memory, and each GPU."""
    import psutil
    import torch

    from gpt2_accel import device
    from gpt2_accel.cores import usable_cpus

    free, total = psutil.virtual_memory().available, device.total_memory()
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


def precision() -> Iterator[Row]:
    """Which precisions are fast on the device that a launch would use, with the measured speed of a product."""
    from gpt2_accel import device

    chosen = best_device()
    for name, dtype in {
        "no": "float32",
        **{k: str(v)[6:] for k, v in device.DTYPES.items()},
    }.items():
        label = "fp32" if name == "no" else name
        if problem := device.precision_problem(chosen, name):
            yield Row("missing", label, *problem.split(": ", 1))
        else:
            yield Row("ok", label, f"{measured(chosen, dtype)} on {chosen.type}")


def measured(chosen, dtype: str) -> str:
    """Returns the speed of a matrix product, in words."""
    import torch

    from gpt2_accel.device import matmul_flops

    flops = matmul_flops(chosen, getattr(torch, dtype))
    return f"{flops / 1e12:.2g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.0f} GFLOP/s"


def best_device():
    """Returns the device of a launch without flags: CUDA, MPS or CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def compiler() -> Iterator[Row]:
    """Whether `torch.compile` works: a small function is compiled in another process, with a time limit."""
    from gpt2_accel.device import inductor_problem

    chosen, start = best_device(), time.perf_counter()
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
        yield Row("ok", "compiler", f"torch.compile works ({time.perf_counter() - start:.0f} s)")


def launch() -> Iterator[Row]:
    """Which shipped launch config fits this machine."""
    import torch

    from gpt2_accel.device import has_bf16

    chosen = best_device()
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


# Disk and network


def disk() -> Iterator[Row]:
    """The free space of the current folder, where runs are written, and of the Hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for name, path in {"disk": Path.cwd(), "hub cache": Path(HF_HUB_CACHE)}.items():
        place = next(folder for folder in (path, *path.parents) if folder.exists())
        free = shutil.disk_usage(place).free
        text, needed = f"{free / 1e9:.1f} GB free in {path}", name == "disk"
        if not os.access(place, os.W_OK):
            fix = "make it writable, or use another folder"
            yield Row("problem", name, f"{text}, which is read-only", fix, needed)
        elif free < LEAST_DISK:
            fix = "free disk space, or use another folder"
            yield Row("problem", name, text, fix, needed)
        else:
            yield Row("ok", name, text)


def environment() -> Iterator[Row]:
    """The environment variables that change a run, as far as they are set. A URL is shown without its password."""
    found = (f"{name}={shown(os.environ[name])}" for name in VARIABLES if name in os.environ)
    yield Row("ok", "environment", ", ".join(found) or "no variable of interest is set")


def shown(value: str) -> str:
    """Returns a value without the user and password of a URL."""
    try:
        url = urlsplit(value)
    except ValueError:
        return "(not a URL)"
    return (
        url._replace(netloc=url.netloc.rpartition("@")[2]).geturl() if "@" in url.netloc else value
    )


def hub() -> Iterator[Row]:
    """Whether the Hugging Face Hub knows the access token. Waits at most `HUB_SECONDS`; never prints the token."""
    from huggingface_hub import HfApi, constants, get_token

    token, place = get_token(), shown(constants.ENDPOINT)
    login = "run `hf auth login`, or set HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        text = f"{place} is not asked because HF_HUB_OFFLINE is set"
        yield Row("missing", "hub", text, "unset HF_HUB_OFFLINE to download or push")
        return
    if not token:
        yield Row("missing", "hub", f"no token for {place}; public models need none", login)
        return
    answers: list[str | Exception] = []

    def ask() -> None:
        try:
            answers.append(HfApi(endpoint=constants.ENDPOINT).whoami(token=token)["name"])
        except Exception as error:  # of the client, its HTTP library or the network
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)  # does not hold up the end of the process
    thread.start()
    thread.join(HUB_SECONDS)
    if not answers:
        text = f"{place} does not answer within {HUB_SECONDS} s"
        yield Row("problem", "hub", text, "check the connection and HF_ENDPOINT")
    elif isinstance(answers[0], str):
        yield Row("ok", "hub", f"logged in to {place} as {answers[0]}")
    elif getattr(getattr(answers[0], "response", None), "status_code", None) == 401:
        yield Row("problem", "hub", f"{place} refuses the token", login)
    else:
        reason = sentence(answers[0]).replace(constants.ENDPOINT, place)
        reason = reason.replace(token, "(token)")
        fix = "check the connection and HF_ENDPOINT"
        yield Row("problem", "hub", f"{place} cannot be asked: {reason}", fix)


NEEDED = (python, packages, imports, devices)
CHECKS = (
    *(python, packages, imports, extras, devices, precision, compiler, launch, disk),
    *(environment, hub),
)

if __name__ == "__main__":
    main()
