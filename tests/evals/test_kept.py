"""What fine-tuning keeps of the base model, beside a plain loop over `transformers`."""

import pytest
import torch
from conftest import LONG, chat_rows, metrics, run_recipe, write_lines
from launching import launch, sharded
from transformers import AutoModelForCausalLM

from gpt2_accel import from_pretrained
from gpt2_accel.evals import kept
from gpt2_accel.tokenizer import load_tokenizer


def reference(directory, texts):
    """The log-probabilities of the sampled tokens of each text, by the class of transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    found = []
    for prompt, sampled in texts:
        with torch.no_grad():
            logs = model(torch.tensor([prompt + sampled])).logits[0].log_softmax(-1)
        found.append([logs[len(prompt) - 1 + i, token].item() for i, token in enumerate(sampled)])
    return found


def test_kept_is_the_mean_difference_of_the_sampled_tokens(chat_base, chat_model, tuned):
    tokenizer = load_tokenizer(chat_model)
    base = kept.sample_base(from_pretrained(chat_model), tokenizer, str(chat_model))
    ends = {256, tokenizer.eos_token_id}  # bytes' <|endoftext|>, and the end of a turn
    texts = []
    for text, (asked, sampled) in zip(kept.PROMPTS, base["texts"], strict=True):
        prompt = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        assert asked == chat["input_ids"]
        assert not ends & set(sampled[:-1])
        assert len(sampled) == kept.NEW_TOKENS or sampled[-1] in ends
        texts.append((asked, sampled))
    assert any(len(sampled) < kept.NEW_TOKENS for _, sampled in texts)
    result, _ = kept.compare(from_pretrained(tuned), tokenizer, base)
    differences = [
        p - q
        for own, other in zip(reference(chat_model, texts), reference(tuned, texts), strict=True)
        for p, q in zip(own, other, strict=True)
    ]
    assert result["val/kept"] == pytest.approx(sum(differences) / len(differences), abs=1e-5)
    same, answers = kept.compare(from_pretrained(chat_model), tokenizer, base)
    assert same["val/kept"] == 0
    assert answers == base["answers"]
    # A base without a chat template did not answer.
    base = kept.sample_base(from_pretrained(chat_model), tokenizer, str(chat_base))
    assert "lower" not in kept.verdict({"val/kept": 9.0}, base, answers, tokenizer)


def kept_by(folder):
    [value] = [line["val/kept"] for line in metrics(folder) if "val/kept" in line]
    return value


def test_a_run_measures_it_and_resumes_to_the_same(chat_base, tmp_path):
    rows = write_lines(tmp_path / "rows.jsonl", chat_rows(21))
    flags = (
        f"--model {chat_base} --data {rows} --total_batch_size 512 --save_every 2 --max_steps 3 "
        "--learning_rate 1e-2 --sample_every 0 --eval_every 0 --keep_best false"
    ).split()
    one, two = tmp_path / "one", tmp_path / "two"
    run_recipe("chat_sft", *flags, "--output_dir", one)
    value = kept_by(one)
    assert value > 0.1
    card = (one / "README.md").read_text()
    assert f"| val/kept | {value:.4f} ± " in card
    assert kept.PROMPTS[0] in card
    command = ["recipes/chat_sft.py", *flags, "--output_dir", two]
    launch(*command, "--max_hours", 1e-9, processes=2)  # stops before an update
    launch(*command, processes=2)
    assert kept_by(two) == pytest.approx(value, abs=1e-4)
    if LONG:
        flags += ["--output_dir", tmp_path / "fsdp"]
        sharded("tests/fsdp_script.py", *flags, RECIPE="chat_sft")
        assert kept_by(tmp_path / "fsdp") == pytest.approx(value, abs=1e-4)
