import io
import json
import resource
import signal
import sys
import zipfile
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch
from conftest import LONG, randomized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import python
from transformers import AutoModelForCausalLM

from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
from gpt2_accel.hf.importers import read_checkpoint

SHAPE = {"n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
ARGS = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
INPUT_IDS = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(1))


def random_model(vocab_size, **options):
    return randomized(GPT(GPTConfig(vocab_size, **SHAPE, **options)))


def as_theirs(model, rows, prefix=""):
    """Returns a state dict as of nanoGPT and build-nanogpt: Linear weights, a head, random padding rows."""
    state = {f"{prefix}transformer.{k}": v.clone() for k, v in model.state_dict().items()}
    wte = f"{prefix}transformer.wte.weight"
    vocab_size = model.config.vocab_size
    state[wte] = torch.cat((state[wte][:vocab_size], torch.randn(rows - vocab_size, 16)))
    state[f"{prefix}lm_head.weight"] = state[wte]
    return state


def same(model, expected):
    with torch.no_grad():
        return torch.equal(model.eval()(INPUT_IDS), expected(INPUT_IDS))


@pytest.mark.parametrize(("vocab_size", "rows"), [(65, 65), (50257, 50304)])
def test_nanogpt(tmp_path, vocab_size, rows):
    theirs = random_model(vocab_size, bias=False, gelu="none")
    args = {**ARGS, "bias": False, "vocab_size": rows, "dropout": 0.2}
    state = as_theirs(theirs, rows, "_orig_mod.")
    state["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # before PyTorch 2
    file = tmp_path / "ckpt.pt"
    torch.save({"model": state, "optimizer": {}, "model_args": args, "iter_num": 5}, file)
    assert same(read_checkpoint(file), theirs)

    # The recipe converts it for transformers, with the exact GELU.
    out = tmp_path / "hf"
    flags = ["--input", str(file), "--output_dir", str(out), "--tokenizer", "none"]
    done = python("recipes/import_checkpoint.py", *flags)
    assert done.returncode == 0, done.stderr
    hf = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert hf.config.vocab_size == vocab_size and hf.config.activation_function == "gelu"
    with torch.no_grad():
        torch.testing.assert_close(hf(INPUT_IDS).logits, theirs(INPUT_IDS), atol=1e-5, rtol=0)
    assert from_pretrained(out).config == theirs.config


def test_build_nanogpt(tmp_path, monkeypatch):
    theirs = random_model(50257)
    # build-nanogpt pickles an object of its own class `__main__.GPTConfig`, which a reader lacks.
    GPTConfig = type("GPTConfig", (), {"__module__": "__main__"})
    config = GPTConfig()
    vars(config).update({**ARGS, "vocab_size": 50304})
    file = tmp_path / "model_19072.pt"
    with monkeypatch.context() as patch:
        patch.setitem(vars(sys.modules["__main__"]), "GPTConfig", GPTConfig)
        torch.save({"model": as_theirs(theirs, 50304), "config": config, "step": 19072}, file)
    assert same(read_checkpoint(file), theirs)


@pytest.mark.parametrize(("version", "dtype"), [(3, torch.float32), (5, torch.bfloat16)])
def test_llmc(tmp_path, version, dtype):
    theirs = random_model(100)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.to(dtype))
    header = np.zeros(256, "<i4")
    header[:8] = [20240326, version, 32, 100, 2, 2, 16, 128]
    state = theirs.state_dict()
    kinds = [name.removeprefix("h.0.") for name in state if name.startswith("h.0.")]
    order = ["wte.weight", "wpe.weight"]
    order += [f"h.{i}.{kind}" for kind in kinds for i in range(2)]
    order += ["ln_f.weight", "ln_f.bias"]
    assert sorted(order) == sorted(state)
    parts = [state[name].to(dtype).contiguous().view(torch.uint8).numpy() for name in order]
    file = tmp_path / "model.bin"
    file.write_bytes(header.tobytes() + b"".join(part.tobytes() for part in parts))
    assert same(read_checkpoint(file), theirs)

    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="model.bin has .* bytes, its header says"):
        read_checkpoint(file)
    header[1] = 1
    file.write_bytes(header.tobytes())
    with pytest.raises(ValueError, match="version 1; only 3"):
        read_checkpoint(file)


class Unknown:
    pass


# Crafted and damaged files


class Call:
    """Is pickled as the call `function(*arguments)`, which runs when the file is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def tensor_of(storage, offset, size, stride):
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, {})


STORAGE = torch.zeros(16)._typed_storage()
WTE, BIAS = "transformer.wte.weight", "transformer.h.0.ln_1.bias"
FITS = "does not fit"
NOT_PLAIN = "is not a plain tensor"
DAMAGED = "is damaged"

# A value of "model" by a key of the valid one; None replaces the whole state dict.
TENSORS = {
    "a list": (None, [torch.zeros(2)], "holds a list where"),
    "a tensor": (None, torch.zeros(2), "holds a Tensor where"),
    "nothing": (None, {}, "more than it holds"),
    "an integer key": (5, torch.zeros(2), "names a tensor 5"),
    "a key of bytes": (b"x", torch.zeros(2), "names a tensor b'x'"),
    "a text": (WTE, "text", NOT_PLAIN),
    "no value": (WTE, None, NOT_PLAIN),
    "a nested dict": (WTE, {"x": torch.zeros(2)}, NOT_PLAIN),
    "no dimension": (WTE, torch.tensor(1.0), FITS),
    "no dimension in the head": ("lm_head.weight", torch.tensor(1.0), "not tied"),
    "fewer rows": (WTE, torch.zeros(60, 16), FITS),
    "more rows": (WTE, torch.zeros(70, 16), FITS),
    "another rank": (WTE, torch.zeros(65, 4, 4), FITS),
    "integers": (WTE, torch.zeros(65, 16, dtype=torch.int64), "is torch.int64; only"),
    "bools": (WTE, torch.zeros(65, 16, dtype=torch.bool), "is torch.bool; only"),
    "complex numbers": (WTE, torch.zeros(65, 16, dtype=torch.cfloat), "is torch.complex64; only"),
    "quantized": (
        WTE,
        lambda: torch._empty_affine_quantized((65, 16), scale=1.0, zero_point=0, dtype=torch.qint8),
        NOT_PLAIN,
    ),
    "sparse": (WTE, torch.zeros(65, 16).to_sparse(), NOT_PLAIN),
    "meta": (WTE, torch.zeros(65, 16, device="meta"), NOT_PLAIN),
    "a huge sparse": (
        WTE,
        torch.sparse_coo_tensor(
            torch.zeros(2, 0), torch.zeros(0), (2**31, 2**31), check_invariants=True
        ),
        NOT_PLAIN,
    ),
    "a huge expanded bias": (BIAS, tensor_of(STORAGE, 0, (2**45,), (0,)), NOT_PLAIN),
    "an expanded embedding": (WTE, tensor_of(STORAGE, 0, (65, 16), (0, 0)), NOT_PLAIN),
    "sizes of 2^60": (WTE, tensor_of(STORAGE, 0, (2**60, 2**60), (1, 1)), DAMAGED),
    "a size of 2^62": (WTE, tensor_of(STORAGE, 0, (2**62,), (1,)), DAMAGED),
    "a size of 2^70": (WTE, tensor_of(STORAGE, 0, (2**70,), (1,)), DAMAGED),
    "a negative size": (WTE, tensor_of(STORAGE, 0, (-65, 16), (16, 1)), DAMAGED),
    "a negative stride": (WTE, tensor_of(STORAGE, 0, (4, 4), (-4, 1)), DAMAGED),
    "a negative offset": (WTE, tensor_of(STORAGE, -8, (4, 4), (4, 1)), DAMAGED),
    "beyond its storage": (WTE, tensor_of(STORAGE, 0, (65, 16), (16, 1)), DAMAGED),
    "a size of text": (WTE, tensor_of(STORAGE, 0, ("65", 16), (16, 1)), DAMAGED),
    "no arguments": (WTE, Call(torch._utils._rebuild_tensor_v2), DAMAGED),
}
# Changes of "model_args", or all of them.
SHAPES = {
    **{
        f"{name} of 2^31": ({name: 2**31}, "more than it holds")
        for name in ARGS
        if name != "n_head"
    },
    **{
        f"{name} of 2^60": ({name: 2**60}, "more than it holds")
        for name in ARGS
        if name != "n_head"
    },
    **{f"{name} of 2^70": ({name: 2**70}, "must be below 2.63") for name in ("n_layer", "n_embd")},
    **{f"{name} below 1": ({name: -5}, "must be") for name in ("n_layer", "n_head")},
    "vocab_size of 2^60": ({"vocab_size": 2**60}, "more than it holds"),
    "n_layer of 0": ({"n_layer": 0}, "must be"),
    "n_head of 3": ({"n_head": 3}, "not divisible"),
    "n_layer of 30": ({"n_layer": 30}, "more than it holds"),
    "a bool": ({"n_layer": True}, "does not say its n_layer"),
    "a float": ({"n_layer": 2.0}, "does not say its n_layer"),
    "a bias of text": ({"bias": "no"}, "bias"),
    "a bias of a tensor": ({"bias": torch.ones(2)}, "bias"),
    "no bias": ({"bias": False}, '"bias": false|bias'),
    "a list of arguments": ([1, 2], "does not say its"),
    "a tensor of arguments": (torch.ones(2), "does not say its"),
    "no arguments": (None, "does not say its"),
}


@contextmanager
def bounded(seconds=5, size=2**30):
    """Fails after `seconds`; allocations fail if the process grows by `size` bytes."""

    def stop(*_):
        pytest.fail(f"not done after {seconds} seconds")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + size, limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def check_refused(file, message):
    """Whether an importer refuses the file soon, in one sentence that names it."""
    with bounded(), pytest.raises(ValueError, match=message) as caught:
        read_checkpoint(file)
    assert file.name in str(caught.value) and "\n" not in str(caught.value)
    assert "gpt2_accel" in str(caught.traceback[-1].path)  # so the recipe prints no traceback


@pytest.mark.filterwarnings("ignore:.*(quantize|TypedStorage)")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_crafted_tensors_are_refused(tmp_path, name, legacy):
    key, value, message = TENSORS[name]
    value = value() if callable(value) else value
    state = as_theirs(random_model(65), 65)
    state = value if key is None else {**state, key: value}
    args = {**ARGS, "vocab_size": 65}
    torch.save(
        {"model": state, "model_args": args},
        tmp_path / "ckpt.pt",
        _use_new_zipfile_serialization=not legacy,
    )
    check_refused(tmp_path / "ckpt.pt", message)


def test_a_compressed_file_is_refused(tmp_path):
    """It could hold a pickle that is a thousand times larger."""
    torch.save({"model": {}, "model_args": {}}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as source,
        zipfile.ZipFile(tmp_path / "ckpt.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    check_refused(tmp_path / "ckpt.pt", DAMAGED)


@pytest.mark.parametrize("name", SHAPES)
def test_crafted_shapes_are_refused(tmp_path, name):
    changes, message = SHAPES[name]
    args = {**ARGS, "vocab_size": 65}
    args = {**args, **changes} if isinstance(changes, dict) else changes
    state = as_theirs(random_model(65), 65)
    torch.save({"model": state, "model_args": args}, tmp_path / "ckpt.pt")
    check_refused(tmp_path / "ckpt.pt", message)
    torch.save({"model": state, "config": args}, tmp_path / "ckpt.pt")
    check_refused(tmp_path / "ckpt.pt", "does not say its")
    torch.save({"model": {}, "model_args": args}, tmp_path / "small.pt")
    check_refused(tmp_path / "small.pt", ".")


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        *[(i, 2**31 - 2, "has 1,024 bytes, .* says") for i in (2, 4, 6, 7)],
        (3, 2**31 - 1, "vocabulary of 2,147,483,647 has 128 rows"),
        *[(i, value, "must be") for i in (2, 3, 4, 5, 6) for value in (0, -1, -(2**31))],
        (5, 2**31 - 1, "not divisible"),
        (7, 0, "vocab"),
        (7, -1, "vocab"),
        (7, 99, "vocab"),
        (1, 4, "version 4; only 3"),
    ],
)
def test_crafted_headers_are_refused(tmp_path, position, value, message):
    header = np.zeros(256, "<i4")
    header[:8] = [20240326, 3, 32, 100, 2, 2, 16, 128]
    header[position] = value
    (tmp_path / "model.bin").write_bytes(header.tobytes())
    check_refused(tmp_path / "model.bin", message)


@pytest.fixture(scope="module", params=["zip", "legacy"])
def valid(request):
    """The bytes of a valid checkpoint of nanoGPT."""
    file = io.BytesIO()
    content = {"model": as_theirs(random_model(65), 65), "model_args": {**ARGS, "vocab_size": 65}}
    torch.save(content, file, _use_new_zipfile_serialization=request.param == "zip")
    return file.getvalue()


@given(st.data())
@settings(
    deadline=None,
    max_examples=500 if LONG else 50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_file_is_refused_or_loaded(tmp_path, valid, data):
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 5000) | st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    file = tmp_path / "ckpt.pt"
    file.write_bytes(content[:end])
    with bounded():
        try:
            assert isinstance(read_checkpoint(file), GPT)
        except ValueError as error:
            assert "ckpt.pt" in str(error)


@pytest.mark.parametrize("size", [2**31, 2**60])
@pytest.mark.parametrize("name", ["n_layer", "n_embd", "vocab_size", "n_positions"])
def test_a_huge_config_is_refused(tmp_path, name, size):
    save_pretrained(random_model(65), tmp_path / "m")
    path = tmp_path / "m/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: size}))
    with bounded(), pytest.raises(ValueError, match="asks for .* parameters, more than"):
        from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("value", [[1], {"a": [1]}, {1: torch.zeros(1)}])
def test_a_crafted_pytorch_model_bin_is_refused(tmp_path, value):
    save_pretrained(random_model(65), tmp_path / "m")
    (tmp_path / "m/model.safetensors").unlink()
    content = {"model": value, "x": torch.zeros(10**5)}
    torch.save(
        [content] if value == [1] else {**value, "x": torch.zeros(10**5)},
        tmp_path / "m/pytorch_model.bin",
    )
    with (
        bounded(),
        pytest.raises(ValueError, match="pytorch_model.bin (holds|names|is not a plain)"),
    ):
        from_pretrained(tmp_path / "m")


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    file = tmp_path / "a.pt"
    for content, message in (
        ({"model": {}, "config": Unknown()}, "holds more than tensors"),
        ({"weights": {}}, "is not a checkpoint of nanoGPT"),
        ({"model": {}, "model_args": {"block_size": 4}}, "does not say its vocab_size"),
        ({"model": {}, "model_args": {**ARGS, "vocab_size": 65}}, "more than it holds"),
    ):
        torch.save(content, file)
        with pytest.raises(ValueError, match=message):
            read_checkpoint(file)
