"""The chat template, its tokens and their rows, and what reads a directory with them."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import chat_rows, read_json, refused, reset_accelerate, write_lines
from tables import table

from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
from gpt2_accel.data.chat_tokens import conversation_tokens
from gpt2_accel.data.conversations import prepare_conversations
from gpt2_accel.data.loader import EvalLoader
from gpt2_accel.data.shards import COUNTS, TOKEN_ID
from gpt2_accel.data.source import open_data
from gpt2_accel.hf.chat_template import CHATML, chat_tokenizer, with_rows
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.tokenizer import byte_tokenizer, load_tokenizer

TABLE = table("hf/chat_template")
MESSAGES, TOOLS, TOOL_ROWS = TABLE["messages"], TABLE["tools"], TABLE["rows"]


FAMILIES = TABLE["families"]


def instruct_model(family, folder):
    """Saves an untrained model with a family's chat template; returns it and the counted text."""
    templates = pytest.importorskip("trl.chat_template_utils")
    tokens, counted = FAMILIES[family]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.bos_token = tokens[0]
    tokenizer.chat_template = getattr(templates, f"{family}_chat_template")
    shape = GPTConfig(len(tokenizer), n_positions=128, n_layer=1, n_head=1, n_embd=8)
    save_pretrained(GPT(shape), folder, tokenizer)
    return tokenizer.chat_template, counted


@pytest.mark.parametrize("family", FAMILIES)
def test_instruct_models_keep_their_templates_and_have_the_labels_of_sft_trainer(
    family, tmp_path, monkeypatch
):
    template, counted = instruct_model(family, tmp_path / "base")
    tokenizer = chat_tokenizer(tmp_path / "base")
    ids, counts = conversation_tokens(tokenizer, MESSAGES)
    assert tokenizer.decode(ids[counts]) == counted
    [row] = by_sft_trainer(tmp_path / "base", [{"messages": MESSAGES}], tmp_path, monkeypatch)
    assert row["input_ids"] == ids.tolist()
    assert row["labels"] == np.where(counts, ids, -100).tolist()
    end = FAMILIES[family][0][-1]
    assert tokenizer.eos_token == end
    assert tokenizer.chat_template == template
    save_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "tuned", tokenizer)
    assert (tmp_path / "tuned/chat_template.jinja").read_text() == template
    ends = read_json(tmp_path / "tuned/generation_config.json")["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids(end) in ends


def by_sft_trainer(base, rows, tmp_path, monkeypatch):
    """Returns the rows of TRL's SFTTrainer, with input_ids and labels."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    reset_accelerate()
    trainer = trl.SFTTrainer(
        str(base),
        trl.SFTConfig(
            str(tmp_path / "out"),
            assistant_only_loss=True,
            max_length=None,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(base),
    )
    return list(trainer.train_dataset)


def prepared(tokenizer, rows, folder, **options):
    """Prepares conversations in the folder `data`."""
    file = write_lines(folder / "rows.jsonl", rows)
    options |= {"source": "made up", "model": "u/n"}
    prepare_conversations([str(file)], tokenizer, folder / "data", **options)


def windows(folder):
    """Yields the token ids of each window of both splits, and the labels."""
    data = open_data(folder)
    for (stream, _), *_ in (data.split("train"), data.split("val")):
        for words in stream.read(0, stream.tokens).reshape(-1, stream.sequence_length):
            ids = words & TOKEN_ID
            yield ids.tolist(), np.where(words & COUNTS, ids, -100).tolist()


def test_a_pair_prefers_a_call(tmp_path):
    instruct_model("qwen3", tmp_path / "base")
    answers = {"chosen": [TOOL_ROWS[0][2]], "rejected": "I do not know."}
    rows = [{"prompt": f"Rain in {city}?", "tools": TOOLS, **answers} for city in ("Rome", "Lima")]
    tokenizer = chat_tokenizer(tmp_path / "base")
    prepared(tokenizer, rows, tmp_path, sequence_length=1024, pairs=True)
    for ids, labels in windows(tmp_path / "data"):
        counted = [
            tokenizer.decode([label for label in labels[half] if label >= 0])
            for half in (slice(1024), slice(1024, None))
        ]
        assert "weather" in tokenizer.decode(ids[1024:])
        assert counted[0].startswith("<think>\nI look.\n</think>\n\n<tool_call>\n")
        assert counted[1] == "<think>\n\n</think>\n\nI do not know.<|im_end|>"


def test_calls_and_reasoning_have_the_labels_of_sft_trainer(tmp_path, monkeypatch):
    """Thinking, calls and answers count, the tool's messages do not; nor does a last line end."""
    instruct_model("qwen3", tmp_path / "base")
    rows = [{"messages": row, "tools": json.dumps(TOOLS)} for row in TOOL_ROWS]
    rows += [{"messages": row, "tools": "[]"} for row in TOOL_ROWS[1:]]
    tokenizer = chat_tokenizer(tmp_path / "base")
    prepared(tokenizer, rows, tmp_path, sequence_length=2048, packed=False)
    actual = list(windows(tmp_path / "data"))
    expected = []
    for row in by_sft_trainer(tmp_path / "base", rows, tmp_path, monkeypatch):
        ids = np.array(row["input_ids"])
        labels = np.array(row["labels"])
        labels[1:][ids[:-1] == tokenizer.eos_token_id] = -100
        padding = 2048 - len(ids)
        expected.append(
            (
                np.pad(ids, (0, padding), constant_values=tokenizer.pad_token_id).tolist(),
                np.pad(labels, (0, padding), constant_values=-100).tolist(),
            )
        )
        if not expected[1:]:
            text = tokenizer.decode(labels[labels >= 0])
            assert text.startswith("<think>\nI look.\n</think>\n\n<tool_call>\n")
            assert "dry" not in text
    assert sorted(actual) == sorted(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_trl_the_labels_are_the_same_or_the_template_is_refused(
    family, tmp_path, monkeypatch
):
    _, counted = instruct_model(family, tmp_path / "base")
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", None)
    if family == "qwen3":  # its last turn has a thinking block, the others do not
        with refused("cannot be used for training.*pip install 'trl"):
            chat_tokenizer(tmp_path / "base")
        return
    tokenizer = chat_tokenizer(tmp_path / "base")
    ids, counts = conversation_tokens(tokenizer, MESSAGES)
    assert tokenizer.decode(ids[counts]) == counted


def with_template(base, folder, template):
    shutil.copytree(base, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<|stop|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


OWN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}A: {{ m.content }}<|stop|>{% endgeneration %}"
    "{% else %}Q: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)


def test_a_template_that_can_be_trained_with_is_kept(chat_base, tmp_path):
    tokenizer = chat_tokenizer(with_template(chat_base, tmp_path / "own", OWN))
    assert tokenizer.chat_template == OWN
    assert tokenizer.eos_token == "<|stop|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer) == 260


def padded_by_its_end(base, folder):
    """Copies a model to one whose template's end of a turn is EOS and padding, as SmolLM2's."""
    tokenizer = load_tokenizer(with_template(base, folder, OWN))
    tokenizer.eos_token = tokenizer.pad_token = "<|stop|>"
    save_pretrained(with_rows(from_pretrained(base), 257, 260), folder, tokenizer)
    return folder


def test_an_end_of_turn_that_pads_counts_where_it_ends_a_turn(chat_base, tmp_path):
    tokenizer = chat_tokenizer(padded_by_its_end(chat_base, tmp_path / "own"))
    assert len(tokenizer) == 260
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 259
    prepared(tokenizer, chat_rows(9), tmp_path, sequence_length=64)
    targets = []
    for split in ("train", "val"):
        parts = open_data(tmp_path / "data").split(split)
        loader = EvalLoader(parts, sequence_length=64, batch_size=1, max_tokens=2**20)
        targets += [batch.targets for batch in loader]
    answers = sum(len(row["messages"][1]["content"]) + len("A: ") for row in chat_rows(9))
    assert int((torch.cat(targets) == 259).sum()) == 9
    assert int((torch.cat(targets) >= 0).sum()) == answers + 9


def test_a_template_without_marks_counts_what_follows_the_prompt(chat_base, tmp_path):
    template = OWN.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    template = template.replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt %}A: "
    )
    tokenizer = chat_tokenizer(with_template(chat_base, tmp_path / "own", template))
    assert tokenizer.chat_template == template
    assert tokenizer.eos_token == "<|stop|>"
    ids, counts = conversation_tokens(tokenizer, MESSAGES)
    text = "Q: Be kind.\nQ:  Why?\n\nA: So.\n\nYes. <|stop|>Q: And?\nA: No.<|stop|>"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[counts]) == "So.\n\nYes. <|stop|>No.<|stop|>"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}<|stop|>",
        OWN.replace("Q: ", "Q of {{ messages | length }}: "),
        OWN.replace("<|stop|>{% endgeneration %}", "{% endgeneration %}<|stop|>"),
        "{{ raise_exception('no users') }}",
        "{% for %}",
    ],
    ids=["end of all turns", "another turn", "end not marked", "refuses", "no template"],
)
def test_a_template_that_cannot_be_trained_with_is_refused(chat_base, template, tmp_path):
    folder = with_template(chat_base, tmp_path / "own", template)
    with refused("own cannot be used for training.*--chatml"):
        chat_tokenizer(folder)
    assert chat_tokenizer(folder, chatml=True).chat_template == CHATML


SIZES = {"n_positions": 32, "n_layer": 1, "n_head": 2, "n_embd": 16}
UNTIED = {"n_kv_head": 1, "head_dim": 8, "n_inner": 32, "tied": False}


@pytest.mark.parametrize(
    "config, known",
    [(GPTConfig(384, **SIZES), 384), (LlamaConfig(300, **SIZES, **UNTIED), 290)],
    ids=["grows", "rows beyond the tokenizer, untied"],
)
def test_new_embeddings_are_the_mean_of_the_known_ones(config, known):
    model = config.build()
    grown = with_rows(model, known, known + 3)
    assert grown.config.vocab_size == max(config.vocab_size, known + 3)
    for name, old in model.state_dict().items():
        new = grown.state_dict()[name]
        if name in ("wte.weight", "embed_tokens.weight", "lm_head.weight"):
            mean = old[:known].mean(dim=0).expand(3, -1)
            torch.testing.assert_close(new[known : known + 3], mean)
            assert torch.equal(new[:known], old[:known])
            assert torch.equal(
                new[known + 3 : config.vocab_size], old[known + 3 : config.vocab_size]
            )
            assert not new[grown.config.vocab_size :].any()
        else:
            assert torch.equal(new, old)


def test_a_saved_chat_model_names_the_token_that_ends_a_turn(chat_model):
    generation = read_json(chat_model / "generation_config.json")
    config = read_json(chat_model / "config.json")
    assert generation["eos_token_id"] == [258, 256]
    assert config["eos_token_id"] == 258
    assert generation["pad_token_id"] == config["pad_token_id"] == 256
    assert '[{"role": "user", "content": "Hi"}]' in (chat_model / "README.md").read_text()
    reloaded = load_tokenizer(chat_model)
    assert reloaded.chat_template == CHATML
    assert len(reloaded) == 259
