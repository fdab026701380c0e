"""The table of `gpt2-accel doctor`: what works on this machine, what does not, and the exit code."""

import json
import re
import sys
from importlib import metadata

import pytest
import torch

from gpt2_accel.cli import doctor
from gpt2_accel.cli.shipped import launch_configs
from gpt2_accel.device import OVERRIDES


def rows(check) -> dict[str, doctor.Row]:
    return {row.name: row for row in doctor.run_check(check)}


@pytest.fixture
def quick(monkeypatch):
    """Leaves the real compiler and the speed of products out."""
    monkeypatch.setattr(doctor, "PROGRAM", "")
    monkeypatch.setenv(OVERRIDES, '{"matmul_flops": 1.5e11, "has_cpp_compiler": true}')
    monkeypatch.setattr(sys, "argv", ["doctor"])


def test_the_table_of_this_machine_has_every_check_in_80_columns(quick, capsys):
    doctor.main()
    out = capsys.readouterr().out
    assert out.endswith("\nTraining works here.\n")
    named = re.findall(r"^(?:ok|missing|problem) +(.+?)  ", out, re.MULTILINE)
    assert {"python", "packages", "cpu", "fp32", "bf16", "fp16", "compiler", "launch"} <= {*named}
    assert f"torch {torch.__version__}" in out and "0.15 TFLOP/s on cpu" in out
    assert max(len(line) for line in out.splitlines() if len(line.split()) > 1) <= 80


def test_a_package_that_is_missing_or_of_another_version_is_a_problem(quick, monkeypatch, capsys):
    needed = [
        "torch>=2.11",
        "numpy>=99,<100",
        "no-such-package>=1",
        "matplotlib; extra == 'report'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: needed)
    found = rows(doctor.packages)
    assert found["numpy"].text == f"{metadata.version('numpy')}, but gpt2_accel needs <100,>=99"
    assert found["numpy"].fix == "pip install 'numpy<100,>=99'"
    assert found["no-such-package"].text == "not installed"
    assert "torch" in found["packages"].text and "matplotlib" not in found["packages"].text
    with pytest.raises(SystemExit) as end:
        doctor.main()
    assert end.value.code == 1
    assert "solve the problem with numpy, no-such-package." in capsys.readouterr().out


def test_the_real_metadata_has_ranges():
    assert {row.state for row in rows(doctor.packages).values()} == {"ok"}
    names = {re.split("[<>=]", r)[0] for r in metadata.requires("gpt2_accel")}
    assert {"torch", "transformers"} <= names


def test_a_library_that_cannot_be_imported_is_a_problem(quick, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit) as end:
        doctor.main()
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "problem packages" in out and "datasets" in out and "problem with packages." in out


def test_an_old_python_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.1")
    [row] = rows(doctor.python).values()
    assert (row.state, row.needed) == ("problem", True) and "use Python >=3.11" in row.fix


@pytest.mark.parametrize("bf16", [True, False])
def test_precision_of_a_cpu_with_and_without_bf16_units(bf16, monkeypatch):
    monkeypatch.setenv(OVERRIDES, json.dumps({"has_bf16": bf16, "matmul_flops": 2e12}))
    found = rows(doctor.devices)
    assert found["fp32"].text == "2 TFLOP/s on cpu"
    assert found["bf16"].state == ("ok" if bf16 else "missing")
    assert bf16 or found["bf16"].fix.endswith("cpu.yaml")
    assert found["fp16"].text == "CPUs have no fast fp16"


def test_gpus_are_listed_with_their_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (5e9 + i, 16e9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = rows(doctor.devices)
    assert found["gpu 1"].text == "Tesla T4, 5.0 of 16.0 GB free"
    assert re.search(r"\d+ of \d+ cores, .* of memory free", found["cpu"].text)


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    row = rows(doctor.devices)["gpu"]
    assert (row.state, row.needed) == ("problem", False) and "cannot use the NVIDIA GPU" in row.text


@pytest.mark.parametrize(
    "kind, gpus, bf16, expected",
    [
        ("cpu", 0, False, "cpu"),
        ("cpu", 0, True, "cpu-bf16 --dynamo_backend inductor"),
        ("mps", 0, True, "mps"),
        ("cuda", 1, True, "1xgpu"),
        ("cuda", 1, False, "1xt4-fp16"),
        ("cuda", 2, False, "2xt4-fp16"),
        ("cuda", 4, False, "2xt4-fp16 --num_processes 4"),
        ("cuda", 4, True, "4xa100"),
        ("cuda", 8, True, "8xa100"),
        ("cuda", 3, True, "8xa100 --num_processes 3"),
    ],
)
def test_the_launch_config_fits_the_machine(kind, gpus, bf16, expected):
    assert doctor.fitting_config(kind, gpus, bf16) == expected
    assert expected.split()[0] in launch_configs()


@pytest.mark.parametrize(
    "program, text",
    [
        ("", "torch.compile works"),
        ("raise OSError('cc1plus not found')", "fails: OSError: cc1plus not found"),
        ("import time; time.sleep(60)", "fails: not finished after 1 s"),
    ],
)
def test_the_compiler_is_tried_with_a_time_limit(program, text, quick, monkeypatch):
    monkeypatch.setattr(doctor, "PROGRAM", program)
    monkeypatch.setattr(doctor, "COMPILE_SECONDS", 1 if "sleep" in program else 30)
    [row] = rows(doctor.compiler).values()
    assert text in row.text
    assert row.state == ("ok" if not program else "problem") and not row.needed


def test_a_machine_without_a_compiler(monkeypatch):
    monkeypatch.setenv(OVERRIDES, '{"has_cpp_compiler": false}')
    [row] = rows(doctor.compiler).values()
    assert row.state == "missing" and row.fix == "install g++ or set CXX"


def test_the_real_program_compiles(times, monkeypatch):
    if times(1, 2) == 1:
        pytest.skip("make test-reliability compiles it")
    monkeypatch.setenv(OVERRIDES, '{"has_cpp_compiler": true}')
    [row] = rows(doctor.compiler).values()
    assert row.state == "ok", row.text
