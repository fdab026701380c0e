"""Runs part of the tests with the lowest and the newest releases of the Hugging Face libraries that setup.cfg allows.

`make test-versions` starts it. Each set of releases has its own environment, `build/versions/NAME`. The result is a
table; the exit code is 1 if a test failed. Other packages are the newest that pip finds; torch is `TORCH`.
"""

import configparser
import os
import re
import subprocess
import sys
import venv
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"
PACKAGES = ("transformers", "accelerate", "huggingface_hub", "datasets", "tokenizers")
TESTS = (
    *("models", "generation", "checkpoint", "evals/test_evals.py", "test_train.py"),
    *("data/test_loader.py", "data/test_prepare.py", "data/test_shards.py", "test_tokenizer.py"),
    *("hf/test_convert.py", "hf/test_hub.py", "hf/test_importers.py", "hf/test_model_card.py"),
    *("test_config.py", "cli/test_doctor.py", "runtime/test_launch.py::test_the_headline_command"),
)


def main() -> int:
    """Makes both environments, tests in them and prints the table. Returns the exit code."""
    pins = [f"{name}=={lower}" for name, lower in lower_bounds().items()]
    columns = {"lowest": column("lowest", pins), "newest": column("newest", ["--upgrade"])}
    rows = dict.fromkeys(row for results in columns.values() for row in results)
    print(f"| | {' | '.join(columns)} |\n|---|---|---|")
    for row in rows:
        print(f"| {row} | {' | '.join(str(c.get(row, 'not run')) for c in columns.values())} |")
    return int("failed" in str(columns) or not all(c["tests"] for c in columns.values()))


def lower_bounds() -> dict[str, str]:
    """Returns the lowest release of each of `PACKAGES`, from setup.cfg."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    requirements = settings["options"]["install_requires"]
    return {
        name: re.search(rf"^{name}>=([\d.]+)", requirements, re.MULTILINE)[1] for name in PACKAGES
    }


def column(name: str, pins: list[str]) -> dict[str, str]:
    """Installs gpt2_accel with `pins` into the environment `name`, runs the tests; returns row -> text of the table."""
    folder = ROOT / "build/versions" / name
    python, results = folder / "bin/python", folder / "results.xml"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    packages = ["--editable", ROOT, TORCH, "pytest", "hypothesis", *pins]
    if "--upgrade" in pins:
        packages += PACKAGES
    subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    versions = {package: version(python, package) for package in ("torch", *PACKAGES)}
    print(f"{name}: {versions}", flush=True)
    tests = [ROOT / "tests" / test for test in TESTS]
    results.unlink(missing_ok=True)
    command = [python, "-m", "pytest", f"--junitxml={results}", *tests]
    # The editable install is of this checkout, whatever PYTHONPATH says.
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""})
    if not results.exists():
        return {**versions, "tests": f"failed with exit code {done.returncode}"}
    return {**versions, **counts(results)}


def version(python: Path, package: str) -> str:
    """Returns the installed release of a package."""
    code = f"from importlib.metadata import version; print(version('{package}'), end='')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def counts(results: Path) -> dict[str, str]:
    """Returns the number of passed, failed and skipped tests by folder of tests, and of all."""
    found: dict[str, Counter] = {"tests": Counter()}
    for case in xml.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds else outcome
        parts = case.get("classname").split(".")  # tests.hf.test_hub
        for group in (parts[1].removeprefix("test_"), "tests"):
            found.setdefault(group, Counter())[outcome] += 1
    found["tests"] = found.pop("tests")  # last
    return {
        group: ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
        for group, count in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
