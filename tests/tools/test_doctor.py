"""`gpt2-accel doctor`: is anything broken that training needs, and which launch config fits?"""

from importlib import metadata

import pytest
import torch

from gpt2_accel.runtime import cores
from gpt2_accel.runtime import device as machine
from gpt2_accel.runtime.device import OVERRIDES
from gpt2_accel.tools import doctor


@pytest.fixture
def lines(monkeypatch, capsys):
    """A function that runs the command without a real compiler, and returns its lines."""
    monkeypatch.setattr(doctor, "COMPILED", "")
    monkeypatch.setattr(doctor, "may_have_gpu", lambda: False)
    monkeypatch.setattr(doctor, "fitting_launch", lambda: ["cpu"])
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


@pytest.mark.parametrize(
    "needed, message",
    [
        (["numpy>=99,<100"], f"numpy {metadata.version('numpy')}: pip install 'numpy<100,>=99'"),
        (["no-such-package>=1"], "No package metadata was found for no-such-package"),
    ],
)
def test_a_package_that_is_missing_or_of_another_version(needed, message, lines, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: [*needed, "matplotlib; extra == 'report'"])
    with pytest.raises(SystemExit, match=f"^Training does not work here: .*{message}$"):
        lines()


def test_a_gpu_that_torch_cannot_use_and_a_compiler_that_fails(lines, monkeypatch):
    for module in (doctor, cores):
        monkeypatch.setattr(module, "may_have_gpu", lambda: True)
    monkeypatch.setattr(machine, "launch_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(doctor, "COMPILED", "raise OSError('cc1plus not found')")
    _, device, compiler, _ = lines()
    assert "torch cannot use the GPU: install a build" in device
    assert "torch.compile fails (OSError: cc1plus not found): install g++" in compiler
