"""`gpt2-accel doctor`: is anything broken that training needs, and which launch config fits?"""

import sys
from importlib import metadata

import pytest
import torch

from gpt2_accel import device as machine
from gpt2_accel.cli import doctor
from gpt2_accel.device import OVERRIDES


@pytest.fixture
def lines(monkeypatch, capsys):
    """A function that runs the command without a real compiler, and returns its exit code and its lines."""
    monkeypatch.setattr(doctor, "COMPILED", "")
    monkeypatch.setattr(doctor, "may_have_gpu", lambda: False)
    monkeypatch.setattr(doctor, "fitting_launch", lambda: ["cpu"])
    monkeypatch.setenv(OVERRIDES, '{"has_cpp_compiler": true}')
    monkeypatch.setattr(sys, "argv", ["doctor"])

    def run():
        with pytest.raises(SystemExit) as end:
            doctor.main()
        return int(end.value.code), capsys.readouterr().out.splitlines()

    return run


def test_this_machine_trains(lines):
    code, (packages, device, compiler, last) = lines()
    assert code == 0 and last == "Training works here: gpt2-accel launch cpu RECIPE"
    assert f"torch {torch.__version__}" in packages
    assert device.startswith("ok       cpu, ") and compiler == "ok       torch.compile works"


@pytest.mark.parametrize(
    "needed, message",
    [
        (["torch>=2.11", "numpy>=99,<100"], f"numpy {metadata.version('numpy')}: pip install 'numpy<100,>=99'"),
        (["no-such-package>=1"], "No package metadata was found for no-such-package"),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_or_of_another_version(needed, message, lines, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: [*needed, "matplotlib; extra == 'report'"])
    code, found = lines()
    assert code == 1 and found[0].startswith("problem  packages: ") and found[0].endswith(message)
    assert found[-1] == "Training does not work here."


def test_a_gpu_that_torch_cannot_use(lines, monkeypatch):
    monkeypatch.setattr(doctor, "may_have_gpu", lambda: True)
    monkeypatch.setattr(machine, "launch_device", lambda: torch.device("cpu"))
    code, found = lines()
    assert code == 0 and found[1].startswith("note     torch cannot use the GPU of this machine")


@pytest.mark.parametrize("kind, code, state", [("cpu", 0, "note"), ("cuda", 1, "problem")])
def test_a_compiler_that_fails(kind, code, state, lines, monkeypatch):
    monkeypatch.setattr(doctor, "COMPILED", "raise OSError('cc1plus not found')")
    monkeypatch.setattr(machine, "launch_device", lambda: torch.device(kind))
    monkeypatch.setattr(machine, "inductor_problem", lambda device: None)
    monkeypatch.setattr(machine, "device_name", lambda device: kind)
    monkeypatch.setattr(machine, "total_memory", lambda device: 1)
    exit_code, found = lines()
    assert exit_code == code and found[2].startswith(state)
    assert "torch.compile fails (OSError: cc1plus not found): install g++" in found[2]
