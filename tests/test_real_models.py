"""Two pretrained models, beside `transformers`, peft and plain loops: `make test-real`.

`MODELS` names a folder with `smollm2-135m-instruct/` and `gemma-3-270m/`, Hugging Face directories.
"""

import os
from pathlib import Path

import pytest
import torch
from conftest import losses, metrics, run_recipe, write_lines
from tables import table
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.generation.sampling import Sampling, complete, load
from gpt2_accel.runtime.files import digest
from gpt2_accel.tokenizer import load_tokenizer

MODELS = Path(os.environ.get("MODELS", "nowhere"))
pytestmark = pytest.mark.skipif(not MODELS.is_dir(), reason="in make test-real MODELS=FOLDER")
SMOLLM2, GEMMA = MODELS / "smollm2-135m-instruct", MODELS / "gemma-3-270m"
TEXT = "The three largest cities of Italy are Rome, Milan and Naples. In 1861"
CONVERSATIONS = table("real_models")


@pytest.mark.parametrize("folder", [SMOLLM2, GEMMA], ids=lambda path: path.name)
@torch.no_grad()
def test_logits_and_files_are_those_of_transformers(folder, tmp_path):
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]])
    ours = from_pretrained(folder).eval()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-3)
    save_pretrained(ours, tmp_path, load_tokenizer(folder))
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(again(ids).logits, theirs(ids).logits)


def test_gemma_begins_with_bos_and_keeps_its_tied_rows(tmp_path):
    tokenizer = load_tokenizer(GEMMA)
    model = from_pretrained(GEMMA)
    assert model.head_weight.shape == (262_144, 640)
    assert model.head_weight is model.inner.get_input_embeddings().weight
    [done] = complete(*load(str(GEMMA)), [TEXT], Sampling(8, temperature=0))
    text = pipeline("text-generation", model=str(GEMMA), dtype=torch.float32)
    expected = text(TEXT, max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert TEXT + done.text == expected
    assert tokenizer(TEXT)["input_ids"][0] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_greedy_answers_are_those_of_a_pipeline(name):
    chat = pipeline("text-generation", model=str(SMOLLM2), dtype=torch.float32)
    expected = chat(CONVERSATIONS[name], max_new_tokens=24, do_sample=False)[0]["generated_text"]
    [done] = complete(*load(str(SMOLLM2)), [CONVERSATIONS[name]], Sampling(24, temperature=0))
    assert done.text == expected[-1]["content"]


def rows(count):
    """Conversations about invented places."""
    return [
        {"prompt": f"What is the capital of Land{i}?", "completion": f"Its capital is City{i}."}
        for i in range(count)
    ]


@pytest.mark.parametrize("lora", [0, 8])
def test_chat_fine_tuning(lora, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", rows(20))
    run = tmp_path / "run"
    flags = ["--data", file, "--model", SMOLLM2, "--output_dir", run, "--lora", lora]
    run_recipe("chat_sft", *flags, "--max_steps", 6, "--sample_every", 0, "--log_every", 1)
    assert losses(metrics(run))[-1] < losses(metrics(run))[0]
    [value] = [line["val/kept"] for line in metrics(run) if "val/kept" in line]
    assert -0.1 < value < 0.6
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert len(tokenizer) == 49_152
    if lora:
        import peft

        base = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()
        merged = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
        ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
        with torch.no_grad():
            torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=2e-3)


def test_preference_training_raises_the_margin(tmp_path):
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": "I do not know."}
        for row in rows(20)
    ]
    file = write_lines(tmp_path / "pairs.jsonl", pairs)
    flags = ["--data", file, "--model", SMOLLM2, "--output_dir", tmp_path / "run", "--log_every", 1]
    before = digest(SMOLLM2 / "model.safetensors")
    run_recipe("chat_dpo", *flags, "--max_steps", 6, "--batch_size", 4, "--learning_rate", 1e-5)
    lines = [line for line in metrics(tmp_path / "run") if "train/margin" in line]
    assert lines[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[-1]["train/margin"] > 0.05
    assert digest(SMOLLM2 / "model.safetensors") == before
