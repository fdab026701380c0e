"""Runs part of the tests with the lowest and the newest libraries that setup.cfg allows.

`make test-versions` starts it. Each set of releases has its own environment, `build/versions/NAME`.
The exit code is 1 if a test failed. Other packages are the newest that pip finds.
"""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"
PACKAGES = (
    "transformers",
    "accelerate",
    "huggingface_hub",
    "datasets",
    "tokenizers",
    "trl",
    "peft",
    "gguf",
)
TESTS = """
    models generation checkpoint evals/test_evals.py test_train.py
    data/test_loader.py data/test_prepare.py data/test_shards.py test_tokenizer.py
    hf/test_convert.py hf/test_hub.py tools/test_importers.py
    test_config.py runtime/test_launch.py::test_the_headline_command_trains
    runtime/test_accelerate_config.py
    data/test_conversations.py data/test_pairs.py
    hf/test_chat_template.py test_preferences.py hf/test_lora_runs.py
"""


def main() -> int:
    """Tests in both environments. Returns the exit code."""
    text = (ROOT / "setup.cfg").read_text()
    lowest = [re.search(rf"^ *{name}>=[\d.]+", text, re.MULTILINE)[0].strip() for name in PACKAGES]
    pins = [requirement.replace(">=", "==") for requirement in lowest]
    codes = {"lowest": tested("lowest", pins), "newest": tested("newest", ["--upgrade", *PACKAGES])}
    print(f"exit codes of pytest: {codes}")
    return int(any(codes.values()))


def tested(name: str, pins: list[str]) -> int:
    """Installs gpt2_accel with `pins` into the environment `name`; returns the tests' exit code."""
    python = ROOT / "build/versions" / name / "bin/python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    # The lowest gguf imports sentencepiece and does not require it.
    packages = ["--editable", ROOT, TORCH, "pytest", "hypothesis", "sentencepiece", *pins]
    subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    print(f"--- {name}", flush=True)
    subprocess.run([*pip, "freeze", "--exclude-editable"], check=True)
    tests = [ROOT / "tests" / test for test in TESTS.split()]
    # The editable install is of this checkout, whatever PYTHONPATH says.
    environment = os.environ | {"PYTHONPATH": ""}
    return subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
