"""Only `runtime/device.py` and `runtime/cores.py` make calls that some systems lack."""

import re

import pytest
from launching import ROOT

SOURCES = [path for folder in ("gpt2_accel", "recipes") for path in (ROOT / folder).rglob("*.py")]
# Calls that macOS lacks, and types that Apple's GPUs lack.
RULES = {
    "os.sched_getaffinity": r"sched_getaffinity",
    "fp64 tensors outside the CPU": (
        r"(?<!\.cpu\(\))\.double\(\)|(?<!device=\"cpu\", )dtype=torch\.float64"
    ),
    "questions to torch about the CPU": r"torch\.cpu\._is",
    "torch.cuda": r"\btorch\.(cuda|backends\.cuda)\b",
}


@pytest.mark.parametrize("rule", RULES)
def test_only_device_py_makes_unportable_calls(rule):
    allowed = {"device.py"} if rule == "torch.cuda" else {"device.py", "cores.py"}
    pattern = re.compile(RULES[rule])
    files = [path for path in SOURCES if path.name not in allowed]
    assert [str(path) for path in files if pattern.search(path.read_text())] == []
