"""llama.cpp reads a model as docs/hub.md converts it, and gives its tokens.

`make test-serve` compiles llama.cpp beside its source, and names its Python in LLAMA_PYTHON.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import WORDS, randomized, run, tiny_config
from launching import ROOT
from test_llama_directories import smollm2_tokenizer

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data.prepare import prepare
from gpt2_accel.generation.sampling import Sampling, complete, load
from gpt2_accel.tokenizer import encode, train_bpe

LLAMA = os.environ.get("LLAMA_PYTHON")
PROMPT = "the cat sat"
NASTY = (
    "I'll he'LL don't\n\n\t x=1234567;  日本語 ☃️🦙👩‍👧 café naïve \u00a0\u3000\u200b ½²٣ …—"
    "  the cat   \r\n  #include <a.h> \x00\x7f <|endoftext|>  <|end "
)
SERVED = {"max_steps": 60, "n_positions": 64, "log_every": 20}
needs_llama_cpp = pytest.mark.skipif(not LLAMA, reason="needs llama.cpp: make test-serve")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a BPE of its own. The text repeats one sentence, so that no two tokens are
    about equally likely."""
    path = tmp_path_factory.mktemp("served")
    texts = {"train": [" ".join(WORDS * 9)] * 4, "val": [" ".join(WORDS * 4)]}
    prepare(texts, train_bpe(texts["train"], 300), path / "data", source="made up")
    run(tiny_config(path / "data", path / "run", **SERVED))
    return path / "run"


def trained_as(architecture, trained, path):
    """A run of another architecture; a Llama has SmolLM2's splitting of digits."""
    data = trained.parent / "data"
    if architecture == "llama":
        texts = {"train": [" ".join(WORDS * 9)] * 4 + [NASTY] * 9, "val": [" ".join(WORDS * 4)]}
        data = path.parent / "digits"
        bpe = train_bpe([*texts["train"], "a  1,\n\n  22\t\t3   x"] * 9, 400).backend_tokenizer
        prepare(texts, smollm2_tokenizer(bpe), data, source="made up")
    run(tiny_config(data, path, **SERVED, architecture=architecture, n_head=4))
    return path


def convert(directory, path, splitting="gpt-2"):
    """Runs the program of docs/hub.md that writes a GGUF file."""
    page = (ROOT / "docs/hub.md").read_text()
    [program] = re.findall(r"^```python\n(import sys\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    for placeholder, value in {
        '"runs/quickstart"': repr(str(directory)),
        '"quickstart.gguf"': repr(str(path)),
        '"gpt-2"': repr(splitting),
    }.items():
        assert program.count(placeholder) == 1
        program = program.replace(placeholder, value)
    folder = Path(LLAMA).parents[1]  # which holds `llama.cpp`
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Reads {file, text, prompt, new_tokens}; prints the ids of the text and the greedy continuation.
TOKENS = """
import json, sys
from llama_cpp import Llama
given = json.load(sys.stdin)
llama = Llama(given["file"], n_ctx=0, verbose=False)
nasty = llama.tokenize(given["text"].encode(), add_bos=True, special=False)
special = llama.tokenize(given["text"].encode(), add_bos=True, special=True)
prompt = llama.tokenize(given["prompt"].encode())
new = [token for token, _ in zip(llama.generate(prompt, temp=0), range(given["new_tokens"]))]
print(json.dumps({"nasty": nasty, "special": special, "new": new}))
"""


def tokens_of_llama_cpp(path, text):
    given = {"file": str(path), "text": text, "prompt": PROMPT, "new_tokens": 30}
    done = subprocess.run(
        [LLAMA, "-c", TOKENS], input=json.dumps(given), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["own", "qwen3", "llama", "gpt2"])
def test_llama_cpp_gives_the_same_tokens(kind, trained, tmp_path, request):
    if kind in ("qwen3", "llama"):
        trained = trained_as(kind, trained, tmp_path / "run")
    if kind == "gpt2":
        tokenizer = request.getfixturevalue("gpt2")
        trained = tmp_path / "gpt2"
        model = randomized(GPT(GPTConfig(len(tokenizer), 48, 2, 2, 64)))
        save_pretrained(model, trained, tokenizer)
    path = tmp_path / "model.gguf"
    convert(trained, path, "smollm" if kind == "llama" else "gpt-2")
    model, tokenizer = load(trained)
    text = NASTY + " a  1 b   22\n\n 3\t\t4 \u00bd\u00b2  \u0663x9y 10,000.5 "
    actual = tokens_of_llama_cpp(path, text)
    assert actual["nasty"] == encode(tokenizer, [text])[0]
    assert actual["special"] == tokenizer(text)["input_ids"]
    if kind in ("own", "qwen3", "llama"):
        [sample] = complete(model, tokenizer, [PROMPT], Sampling(max_new_tokens=30, temperature=0))
        assert actual["new"] == sample.ids
