"""LoRA by PEFT: the code of docs/chat.md, and the merged model opens here with equal logits."""

import re

import pytest
import torch
from conftest import reset_accelerate
from launching import ROOT
from transformers import AutoModelForCausalLM

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.hf.chat_template import CHATML, chat_tokenizer, with_rows
from gpt2_accel.tokenizer import load_tokenizer

peft = pytest.importorskip("peft")
pytest.importorskip("trl")

PAGE = (ROOT / "docs/chat.md").read_text()


def assert_opens_here(merged, directory, base):
    """The logits of a merged model, opened here, are those of `transformers` and not those of `base`."""
    ids = torch.randint(base.config.vocab_size, (2, 24))
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        found = from_pretrained(directory).eval()(ids)
        for expected in (theirs(ids).logits, merged.eval()(ids).logits):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert (found - base.eval()(ids)).abs().max() > 1e-3


def test_the_code_of_the_page_answers_trains_and_merges(chat_base, tmp_path, monkeypatch):
    tokenizer = chat_tokenizer(chat_base)
    base = with_rows(from_pretrained(chat_base), 257, len(tokenizer))
    save_pretrained(base, tmp_path / "runs/chat_sft", tokenizer)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [("peft_config" in block) for block in blocks].count(True) == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    reset_accelerate()
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert_opens_here(names["merged"], tmp_path / "runs/chat_lora", base)
    reloaded = load_tokenizer(tmp_path / "runs/chat_lora")
    assert reloaded.chat_template == CHATML and reloaded.eos_token == "<|im_end|>"
