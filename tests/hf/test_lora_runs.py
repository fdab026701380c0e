"""Runs that train an adapter of peft: what they train, save, resume and merge."""

import json
import re
import shutil

import pytest
import torch
from conftest import (
    assert_close,
    chat_rows,
    contents,
    long,
    losses,
    make_text,
    metrics,
    read_json,
    refused,
    run,
    run_recipe,
    write_lines,
)
from families import save_family
from launching import EAGER, launch
from safetensors.torch import load_file, save_file
from test_chat_template import padded_by_its_end
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.generation.sampling import Sampling, complete, load, user_turn
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.hf.hub import stage
from gpt2_accel.hf.lora import base_of
from gpt2_accel.hf.safetensors_files import weights_digest

peft = pytest.importorskip("peft")

ADAPTER = "adapter_model.safetensors"
MERGED = 5e-5  # a merged weight is the sum of a base's and of a larger product of two matrices
SHORT = (
    "--lora 8 --lora_dropout 0.1 --total_batch_size 256 --micro_batch_size 4 --max_steps 12 "
    "--save_every 6 --log_every 1 --eval_every 6 --sample_every 12 --sample_tokens 3 "
    "--keep_best false --learning_rate 1e-2"
)


def flags(folder, **changes):
    """Returns the command-line flags of a short run of the chat recipe."""
    given = {"output_dir": folder} | changes
    return SHORT.split() + [f"--{name}={value}" for name, value in given.items()]


@pytest.fixture(scope="module")
def start(chat_base, tmp_path_factory):
    """A base model and a file of conversations in a folder."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(chat_base, folder / "base")
    write_lines(folder / "rows.jsonl", chat_rows(21))
    return folder


@pytest.fixture(scope="module")
def chat_run(start):
    """The folder of a run of twelve updates with two new tokens. Tests must not change it."""
    before = contents(start / "base")
    given = [f"--model={start / 'base'}", f"--data={start / 'rows.jsonl'}"]
    run_recipe("chat_sft", *given, *flags(start / "run", sequence_length=64))
    assert contents(start / "base") == before
    return start / "run"


def logits(model, vocab_size=257):
    """Returns the logits of a model of transformers, or of this package, of fixed tokens."""
    torch.manual_seed(1)
    with torch.no_grad():
        output = model.eval()(torch.randint(vocab_size, (2, 24)))
    return getattr(output, "logits", output)


def test_only_the_adapter_and_the_new_rows_are_saved(chat_run):
    checkpoint = chat_run / "checkpoint-12"
    assert not list(checkpoint.glob("model*"))
    assert not (checkpoint / "config.json").exists()
    saved = load_file(checkpoint / ADAPTER)
    rows = [name for name in saved if "trainable_tokens" in name]
    assert all("lora_" in name for name in saved.keys() - rows)
    assert len(rows) == 1
    assert saved[rows[0]].shape == (2, 64)
    assert all(name.endswith("lora_A.weight") or saved[name].any() for name in saved)
    optimizer = load_file(checkpoint / "training_state/optimizer.safetensors")
    assert len(optimizer) == 3 * len(saved)
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token == "<|im_end|>"


def opened_by_its_card(adapter):
    """Runs the code of an adapter's card; returns the model that it opens."""
    card = (adapter / "README.md").read_text()
    names = {}
    exec(re.search("```python\n(.*?)```", card, re.DOTALL)[1], names)
    return names["model"]


def test_the_code_of_the_card_opens_the_adapter_and_it_equals_the_merged_model(chat_run, start):
    merged = AutoModelForCausalLM.from_pretrained(chat_run, dtype=torch.float32)
    assert merged.config.vocab_size == 259
    expected = logits(merged)
    for model in (
        opened_by_its_card(chat_run / "adapter"),
        from_pretrained(chat_run / "adapter"),
        from_pretrained(chat_run),
    ):
        assert_close(logits(model), expected, MERGED)
    before = logits(from_pretrained(start / "base"))
    assert (expected[..., :257] - before).abs().max() > 1e-3
    assert "lm_head.weight" not in load_file(chat_run / "model.safetensors")


def test_a_run_of_0_5_whose_padding_has_a_row_goes_on(start, tmp_path, monkeypatch):
    base = padded_by_its_end(start / "base", tmp_path / "base")

    def before(name, _):
        tokenizer = chat_tokenizer(name)
        tokenizer.add_tokens(["<|pad|>"], special_tokens=True)
        tokenizer.pad_token = "<|pad|>"
        return tokenizer

    given = [f"--model={base}", f"--data={start / 'rows.jsonl'}"]
    given += flags(tmp_path / "run", sequence_length=64, save_every=2)
    with monkeypatch.context() as patch:
        patch.setattr("gpt2_accel.hf.chat_template.chat_tokenizer", before)
        run_recipe("chat_sft", *given, "--max_steps=2")
    run_recipe("chat_sft", *given, "--max_steps=4")
    assert [line["step"] for line in metrics(tmp_path / "run")][-1] == 4
    assert read_json(tmp_path / "run/config.json")["vocab_size"] == 261
    assert len(list((tmp_path / "run").glob("data-*"))) == 1


def test_a_resume_is_exact(chat_run, start, tmp_path):
    given = [f"--model={start / 'base'}", f"--data_dir={next(chat_run.glob('data-*'))}"]
    resumed = flags(tmp_path / "run", resume_from=chat_run / "checkpoint-6")
    run_recipe("chat_sft", *given, *resumed)
    assert losses(metrics(tmp_path / "run")) == losses(metrics(chat_run))[6:]
    for name in (ADAPTER, "training_state/optimizer.safetensors"):
        expected = load_file(chat_run / "checkpoint-12" / name)
        actual = load_file(tmp_path / "run/checkpoint-12" / name)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
    other = flags(tmp_path / "other", resume_from=chat_run / "checkpoint-6", lora=4)
    with refused("lora 8 -> 4"):
        run_recipe("chat_sft", *given, *other)


def test_an_adapter_is_sampled_and_pushed_as_a_model(chat_run, tmp_path):
    model, tokenizer = load(chat_run / "checkpoint-12")
    [answer] = complete(model, tokenizer, [user_turn("Who 0?")], Sampling(max_new_tokens=5))
    assert answer.ids
    stage(chat_run / "checkpoint-12", tmp_path / "staged", "user/name")
    assert (tmp_path / "staged" / ADAPTER).is_file()
    assert 'name = "user/name"' in (tmp_path / "staged/README.md").read_text()


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_an_adapter_on_one_end_of_a_tied_model_opens_as_in_peft(end, tmp_path):
    """Also beside a config.json, and with its base in another place."""
    base = save_family("smollm3", tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(target_modules=[end], init_lora_weights=False)  # random
    theirs = peft.get_peft_model(theirs, settings)
    theirs.save_pretrained(tmp_path / "adapter")
    base = base.rename(tmp_path / "moved")
    shutil.copy(base / "config.json", tmp_path / "adapter")
    with refused("base, which does not exist.*--base"):
        from_pretrained(tmp_path / "adapter")
    merged = from_pretrained(tmp_path / "adapter", base=base)
    save_pretrained(merged, tmp_path / "hf")
    for model in (merged, AutoModelForCausalLM.from_pretrained(tmp_path / "hf")):
        torch.testing.assert_close(logits(model), logits(theirs), atol=1e-5, rtol=1e-5)


def copied(chat_run, start, folder):
    """Copies an adapter and its base; returns the adapter, which names the new place, and the base.

    The base is copied under another path: what counts is its weights.
    """
    base = shutil.copytree(start / "base", folder / "base")
    adapter = shutil.copytree(chat_run / "adapter", folder / "adapter")
    changed(adapter, base_model_name_or_path=str(base))
    return adapter, base


def changed(adapter, **values):
    """Changes values of an adapter's config."""
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(read_json(config) | values))


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_another_base_under_an_adapter_is_refused(chat_run, start, tmp_path, capsys):
    adapter, base = copied(chat_run, start, tmp_path)
    digest = {"weights": weights_digest(start / "base")}
    (adapter / "adapter_base.json").write_text(json.dumps(digest))
    load(adapter)
    flip(base / "model.safetensors", 200_000)
    other = "base has other weights than the base of the adapter .*adapter"
    with refused(other):
        from_pretrained(adapter, merge=False)  # a resume
    with refused(other):
        load(adapter)
    (adapter / "adapter_base.json").unlink()  # as 0.5 and peft write it
    capsys.readouterr()
    load(adapter)
    assert "base may be another model" in capsys.readouterr().err


DAMAGE = {
    "missing": (lambda tensors: tensors.pop(min(tensors)), "is missing"),
    "unknown": (lambda tensors: tensors.update(x=torch.ones(1)), "x is missing, or not part"),
    "misshapen": (lambda tensors: tensors.update({min(tensors): torch.ones(1)}), "peft cannot"),
    "type": ({"peft_type": "IA3", "feedforward_modules": []}, "is missing"),
    "rank": ({"r": 4}, "peft cannot open"),
    "no base": ({"base_model_name_or_path": None}, "names no base model"),
    "no JSON": ("{", "is not valid"),
    "cut": (100, "damaged"),
    "no weights": (0, "is missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_adapter_is_refused(case, chat_run, start, tmp_path):
    damage, words = DAMAGE[case]
    adapter = shutil.copytree(chat_run / "adapter", tmp_path / "adapter")
    if isinstance(damage, dict):
        changed(adapter, **damage)
    elif isinstance(damage, str):
        (adapter / "adapter_config.json").write_text(damage)
    elif damage == 0:
        (adapter / ADAPTER).unlink()
    elif damage == 100:
        (adapter / ADAPTER).write_bytes((adapter / ADAPTER).read_bytes()[:-damage])
    else:
        tensors = load_file(adapter / ADAPTER)
        damage(tensors)
        save_file(tensors, adapter / ADAPTER)
    with refused(words):
        from_pretrained(adapter)


def test_an_adapter_names_the_commit_of_a_base_on_the_hub(start, tmp_path, tiny, monkeypatch):
    cache = tmp_path / "cache/models--user--name"
    commit = "0123456789" * 4
    shutil.copytree(start / "base", cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    run(tiny("run", init_from="user/name", lora=2, max_steps=1))
    assert base_of(tmp_path / "run/adapter") == f"user/name@{commit}"
    assert (
        f"from_pretrained('user/name', revision='{commit}')"
        in (tmp_path / "run/adapter/README.md").read_text()
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "changes"),
    [("mixtral", "float32", {}), ("smollm3", "bfloat16", {"tie_word_embeddings": False})],
)
def test_the_base_stays_and_the_merged_model_equals_the_unmerged(
    kind, dtype, changes, tiny, tmp_path
):
    start = save_family(kind, tmp_path / "start", **changes)
    settings = {"init_from": str(start), "lora": 4, "dtype": dtype, "learning_rate": 3e-2}
    lines = run(tiny("run", **settings, max_steps=20))
    assert losses(lines)[-1] < losses(lines)[0] - 0.01
    folder = tmp_path / "run"
    saved = load_file(folder / "adapter" / ADAPTER)
    assert not any("gate." in name for name in saved)  # the gate is the router
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    if dtype == "bfloat16":  # the base that was trained on
        for parameter in base.parameters():  # not the rotary frequencies
            parameter.data = parameter.data.bfloat16().float()
    before = logits(base)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter")
    final = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert final.dtype == torch.float32
    expected = logits(model)
    assert_close(logits(final), expected, MERGED)
    assert (logits(final) - before).abs().max() > 1e-3


def test_new_rows_of_an_untied_head_are_trained(start, tmp_path):
    changes = {"tie_word_embeddings": False, "max_position_embeddings": 128}
    base = save_family("smollm3", tmp_path / "base", **changes)
    given = [f"--model={base}", f"--data={start / 'rows.jsonl'}"]
    run_recipe("chat_sft", *given, *flags(tmp_path / "run", sequence_length=64, max_steps=4))
    saved = load_file(tmp_path / "run/adapter" / ADAPTER)
    rows = {name: tensor for name, tensor in saved.items() if "trainable_tokens" in name}
    assert {tensor.shape for tensor in rows.values()} == {(2, 32)}
    assert len(rows) == 2
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    opened = opened_by_its_card(tmp_path / "run/adapter")
    assert_close(logits(merged), logits(opened), MERGED)
    for module in (merged.get_input_embeddings(), merged.get_output_embeddings()):
        assert (module.weight[257] - module.weight[258]).abs().max() > 1e-3  # they began equal


def test_an_adapter_is_trained_on_text_and_is_the_base_of_another(start, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(make_text(2000, 0))
    given = [f"--input={tmp_path / 'text.txt'}", f"--data_dir={tmp_path / 'data'}"]
    changes = {"total_batch_size": 128, "micro_batch_size": 1, "max_steps": 4, "save_every": 2}
    changes |= {"eval_every": 2, "sequence_length": 128, "lora_dropout": 0}
    first = flags(tmp_path / "first", init_from=start / "base", **changes)
    run_recipe("finetune_shakespeare", *given, *first)
    second = flags(tmp_path / "second", init_from=tmp_path / "first/adapter", **changes)
    run_recipe("finetune_shakespeare", *given, *second)
    assert losses(metrics(tmp_path / "second"))[0] < losses(metrics(tmp_path / "first"))[0]
    openers = {"first": AutoModelForCausalLM.from_pretrained, "second": from_pretrained}
    for name, opened in openers.items():
        actual = logits(opened(tmp_path / name / "adapter"))
        assert_close(actual, logits(from_pretrained(tmp_path / name)), MERGED)
    card = (tmp_path / "first/adapter/README.md").read_text()
    assert "resize" not in card
    assert "n_layer: 2" in card  # the default is 12


@long
@pytest.mark.parametrize(
    ("script", "launch_config"), [("train_script", "8xa100"), ("fsdp_script", "8xa100_fsdp2")]
)
def test_an_adapter_trains_on_two_processes_as_on_one(
    script, launch_config, start, chat_run, tmp_path
):
    """With DDP and FSDP2 the adapter is that of one process, and a resume is exact."""
    given = {"init_from": start / "base", "data_dir": next(chat_run.glob("data-*"))}
    given |= {"sequence_length": 64, "lora_dropout": 0.0}
    given |= {"sample_every": 0, "micro_batch_size": 2, "warmup_steps": 2}

    def trained(name, processes, script, config, **changes):
        args = [f"tests/{script}.py", *flags(tmp_path / name, **given, **changes)]
        done = launch(*EAGER, *args, processes=processes, config=config)
        assert ("sharded by FSDP2" in done.stdout) is (script == "fsdp_script")
        return load_file(tmp_path / name / "adapter" / ADAPTER)

    alone = trained("alone", 1, "train_script", "cpu")
    both = trained("both", 2, script, launch_config)
    assert both.keys() == alone.keys()
    for name, tensor in both.items():
        torch.testing.assert_close(tensor, alone[name], atol=1e-5, rtol=0)
    checkpoint = tmp_path / "both/checkpoint-6"
    resumed = trained("resumed", 2, script, launch_config, resume_from=checkpoint)
    assert all(torch.equal(resumed[name], both[name]) for name in both)
