"""The servers of docs/hub.md answer its request with the model's own greedy tokens.

`make test-serve` compiles llama.cpp beside its source, and names its Python in LLAMA_PYTHON.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from conftest import WORDS, randomized, run, tiny_config
from launching import ROOT, Started, free_port, wait_for
from test_llama_directories import smollm2_tokenizer

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data.prepare import prepare
from gpt2_accel.generation.sampling import Sampling, complete, load
from gpt2_accel.tokenizer import encode, train_bpe

LLAMA = os.environ.get("LLAMA_PYTHON")
COMMAND = Path(sys.executable).with_name("transformers")
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


def request():
    """Returns the body of the request in docs/hub.md."""
    text = (ROOT / "docs/hub.md").read_text()
    [command] = re.findall(r"^curl .*/v1/completions .*$", text, re.MULTILINE)
    words = shlex.split(command)
    return json.loads(words[words.index("-d") + 1])


def greedy(directory, new_tokens):
    model, tokenizer = load(directory)
    [sample] = complete(
        model, tokenizer, [PROMPT], Sampling(max_new_tokens=new_tokens, temperature=0)
    )
    return sample.text


def streamed(url, **settings):
    """Sends the request and returns the pieces of text, as they came."""
    body = request() | {"prompt": PROMPT, "max_tokens": 24, "temperature": 0} | settings
    assert body["stream"] is True
    headers = {"Content-Type": "application/json"}
    asked = Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    pieces = []
    with urlopen(asked, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    return [piece for piece in pieces if piece]


def answers(url, server):
    """Returns whether a server answers at `url`; it must not have ended."""
    assert server.poll() is None
    with suppress(OSError):
        urlopen(url, timeout=5).close()
        return True


@needs_llama_cpp  # starts slowly
def test_transformers_serve_streams_a_completion(trained, tmp_path):
    pytest.importorskip("openai", reason="needs the extra: pip install 'transformers[serving]'")
    port = free_port()
    log = tmp_path / "log"
    server = Started(COMMAND, "serve", trained, "--port", port, "--device", "cpu", log=log)
    try:
        url = f"http://localhost:{port}"
        wait_for(lambda: answers(f"{url}/health", server), 120)
        pieces = streamed(url)
        assert len(pieces) > 3
        assert "".join(pieces) == greedy(trained, 24)
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


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


@needs_llama_cpp
def test_the_server_of_llama_cpp_streams_a_completion(trained, tmp_path):
    convert(trained, tmp_path / "quickstart.gguf")
    port = free_port()
    log = tmp_path / "log"
    flags = ("--model", tmp_path / "quickstart.gguf", "--n_ctx", "64", "--port", port)
    with log.open("w") as output:
        server = subprocess.Popen(
            [LLAMA, "-m", "llama_cpp.server", *flags], stdout=output, stderr=output
        )
    try:
        url = f"http://localhost:{port}"
        wait_for(lambda: answers(f"{url}/v1/models", server), 120)
        pieces = streamed(url, repeat_penalty=1.0)
        assert len(pieces) > 3
        assert "".join(pieces) == greedy(trained, 24)
    finally:
        server.kill()
        server.wait()
