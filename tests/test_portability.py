"""Calls that do not exist on every system stay in the one file that asks questions about the machine."""

import re

import pytest
from launching import ROOT

SOURCES = [path for room in ("gpt2_accel", "recipes") for path in (ROOT / room).rglob("*.py")]
# What macOS lacks, and what Apple's GPUs cannot do.
RULES = {
    "os.sched_getaffinity": r"sched_getaffinity",
    "fp64 tensors outside the CPU": r"(?<!\.cpu\(\))\.double\(\)|dtype=torch\.float64",
    "questions to torch about the CPU": r"torch\.cpu\._is",
}


@pytest.mark.parametrize("rule", RULES)
def test_no_file_breaks_the_rule(rule):
    pattern = re.compile(RULES[rule])
    files = [path for path in SOURCES if path.name != "device.py"]
    assert [str(path) for path in files if pattern.search(path.read_text())] == []
