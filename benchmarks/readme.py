"""Records the README's figures of finished runs in `benchmarks/results/`.

    make quickstart
    make chat
    python benchmarks/readme.py quickstart chat

`quickstart.json` has the last validation of `runs/quickstart`, and the bits per byte of `xz -9` on
the same held-out files; `chat.json` has the evaluation of `runs/chat_python` by `make chat`.
"""

import argparse
import json
import lzma
from pathlib import Path

from results import RESULTS, write_result

from gpt2_accel.data.shards import TokenStream
from gpt2_accel.runtime.files import read_json_lines
from gpt2_accel.tokenizer import load_tokenizer


def quickstart(run: Path) -> dict:
    """Returns the last validation of a quickstart, and the bits per byte of its held-out files
    after compression by xz."""
    evaluated = [line for line in read_json_lines(run / "metrics.jsonl") if "val/loss" in line]
    last = {name: value for name, value in evaluated[-1].items() if name.startswith("val/")}
    stream = TokenStream("data/python_stdlib", "val")
    tokenizer = load_tokenizer(run)
    text = tokenizer.decode(stream.read(0, stream.tokens), skip_special_tokens=True).encode()
    bits = 8 * len(lzma.compress(text, preset=9)) / len(text)
    figures = {"command": "make quickstart", "step": evaluated[-1]["step"]}
    return figures | last | {"xz -9": bits}


def chat(run: Path) -> dict:
    """Returns the evaluation that `make chat` recorded."""
    record = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    return {"command": "make chat", "evaluation": record}


RUNS = {"quickstart": (quickstart, "runs/quickstart"), "chat": (chat, "runs/chat_python")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=RUNS)
    options = parser.parse_args()
    for name in options.names:
        figures, run = RUNS[name]
        write_result(name, figures(Path(run)), RESULTS)


if __name__ == "__main__":
    main()
