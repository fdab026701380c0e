"""`gpt2-accel doctor`: does training work here, and which launch config fits?"""

import pytest
import torch

from gpt2_accel.runtime import cores
from gpt2_accel.runtime import device as machine
from gpt2_accel.runtime.device import OVERRIDES
from gpt2_accel.tools import doctor


@pytest.fixture
def lines(monkeypatch, capsys):
    """A function that runs the command without a real compiler, and returns its lines."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(doctor, "may_have_gpu", lambda: False)
    monkeypatch.setattr(doctor, "fitting_launch", lambda: ["cpu"])
    monkeypatch.setattr(machine, "launch_device", lambda: torch.device("cpu"))
    monkeypatch.setenv(OVERRIDES, '{"has_cpp_compiler": true}')

    def run():
        doctor.main()
        return capsys.readouterr().out.splitlines()

    return run


def test_this_machine_trains(lines):
    packages, device, compiler, last = lines()
    assert last == "Training works here: gpt2-accel launch cpu RECIPE"
    assert f"torch {torch.__version__}" in packages
    assert device.startswith("cpu, ") and compiler == "torch.compile works"


def test_a_gpu_that_torch_cannot_use_and_a_compiler_that_fails(lines, monkeypatch):
    def fail(function):
        raise OSError("cc1plus not found")

    for module in (doctor, cores):
        monkeypatch.setattr(module, "may_have_gpu", lambda: True)
    monkeypatch.setattr(torch, "compile", fail)
    _, _, device, compiler, _ = lines()
    assert "torch cannot use the GPU: install a build" in device
    assert "torch.compile fails (cc1plus not found): install g++" in compiler
    monkeypatch.setenv(OVERRIDES, '{"has_cpp_compiler": false}')
    assert "no C++ compiler found" in lines()[3]
