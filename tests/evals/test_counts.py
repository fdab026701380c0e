"""What the evaluations divide by: the counted tokens of conversations, the characters of an ending."""

import json

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import chat_rows, reset_accelerate, run_recipe

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.data.loader import EvalLoader, open_split
from gpt2_accel.evals.hellaswag import HellaSwag
from gpt2_accel.evals.items import Item
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.tokenizer import byte_tokenizer


@torch.no_grad()
def test_the_loss_of_conversations_is_the_mean_over_what_the_assistant_says(chat_base, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, chat_rows(60))))
    run_recipe(
        *("prepare_data", "chat", tmp_path / "rows.jsonl", "--model", chat_base, "--workers", 1),
        *("--sequence_length", 64, "--data_dir", tmp_path / "data"),
    )
    reset_accelerate()
    model = GPT(GPTConfig(259, n_positions=64, n_layer=1, n_head=2, n_embd=32))
    val = open_split(tmp_path / "data", "val")
    loader = EvalLoader(val, sequence_length=64, batch_size=2, max_tokens=10**6)
    found = validation_loss(Accelerator(cpu=True), model, loader=loader)
    nats = tokens = 0
    for input_ids, targets, documents, _ in loader:
        logits = model(input_ids, documents=documents).flatten(0, 1)
        nats += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
        tokens += (targets != -100).sum().item()
    assert found["val/loss"] == pytest.approx(nats / tokens)


@torch.no_grad()
def test_accuracy_per_character_does_not_count_the_space_before_an_ending():
    reset_accelerate()
    model = GPT(GPTConfig(257, n_positions=64, n_layer=1, n_head=1, n_embd=8))
    for parameter in model.parameters():
        parameter.zero_()  # all bytes are equally likely
    item = Item("item 0", {"ctx": "The cat", "endings": ["a", "bcd"], "label": 1})
    found = HellaSwag([item], byte_tokenizer(), model.config)(Accelerator(cpu=True), model)
    # A space and a letter are two bytes for one character, a space and three letters are four for three.
    assert found["hellaswag/acc_norm_per_char"] == 1
    assert found["hellaswag/acc_norm_per_token"] == 0  # equal: the first is chosen
