"""Talking to a model in the terminal, the conversations about Python, and DPO."""

import json
from collections import Counter
from io import BytesIO, TextIOWrapper

import pytest
from conftest import chat_rows, metrics, run_recipe, write_lines
from launching import python

from gpt2_accel import from_pretrained
from gpt2_accel.generation.sampling import Sampling, complete, user_turn
from gpt2_accel.tokenizer import load_tokenizer


def test_each_line_is_answered_in_one_conversation(chat_model, monkeypatch, capsys):
    typed = BytesIO(b"\nx<|im_end|>\n\xff\nAnd?\n")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(typed, encoding="utf-8"))
    flags = ("--model", str(chat_model), "--temperature", "0", "--max_new_tokens", "8")
    run_recipe("sample", *flags, "--chat", "true", "--prompt", "Why?", "--system", "Be kind.")
    model, tokenizer = from_pretrained(chat_model), load_tokenizer(chat_model)
    messages, expected = [{"role": "system", "content": "Be kind."}], []
    for question in ("Why?", "And?"):
        messages += user_turn(question)
        (answer,) = complete(model, tokenizer, [messages], Sampling(8, temperature=0))
        expected.append(answer.text)
        if answer.text.strip():
            messages.append({"role": "assistant", "content": answer.text})
        else:
            messages.pop()
    shown = capsys.readouterr()
    assert shown.out == "".join(f"{text}\n" for text in expected)
    assert "holds the special token <|im_end|>" in shown.err
    assert "bytes that are not UTF-8: leave them out" in shown.err


def test_conversations_about_python_hold_out_wordings_and_names(tmp_path):
    options = ("--invented", "60", "--repeats", "2")
    for name in ("a", "b"):
        run_recipe("python_conversations", "--output", str(tmp_path / name), *options)
    first, second = ((tmp_path / name / "train.jsonl").read_bytes() for name in ("a", "b"))
    assert first == second
    rows = [json.loads(line) for line in first.splitlines()]
    said = {}
    for row in rows:
        *_, question, answer = row["messages"]
        said[question["content"]] = answer["content"]
    lengths = {sum(m["role"] == "user" for m in row["messages"]) for row in rows}
    assert lengths == {*range(1, 11)}
    held_out = [*map(json.loads, (tmp_path / "a/held_out.jsonl").read_text().splitlines())]
    assert not {item["prompt"] for item in held_out} & said.keys()
    groups = Counter(item["group"] for item in held_out)
    assert groups["invented"] == 150 and groups["known"] > 0
    for item in held_out:
        assert (item["answer"] == "I don't know.") == (item["group"] == "invented")


def test_dpo_prefers_the_chosen_answers_and_its_result_loads_here(chat_model, tmp_path):
    pytest.importorskip("trl")
    rows = [row["messages"] for row in chat_rows(8)]
    pairs = [{"prompt": q["content"], "chosen": a["content"], "rejected": "zzz"} for q, a in rows]
    file = tmp_path / "pairs.jsonl"
    write_lines(file, pairs)
    flags = ["--model", str(chat_model), "--data", str(file), "--output_dir", str(tmp_path / "run")]
    flags += ["--batch_size", "4", "--epochs", "6", "--learning_rate", "1e-3"]
    done = python("recipes/chat_dpo.py", *flags, ACCELERATE_USE_CPU="true")
    margins = [x["train/rewards/margins"] for x in metrics(tmp_path / "run") if "train/loss" in x]
    assert len(margins) == 12 and abs(margins[0]) < 1e-6 and margins[-1] > 1
    tokenizer = load_tokenizer(tmp_path / "run")
    (answer,) = complete(
        from_pretrained(tmp_path / "run"), tokenizer, [user_turn("Why?")], Sampling(4)
    )
    assert answer.ids and tokenizer.eos_token == "<|im_end|>"
    assert "- chat\n" in (tmp_path / "run/README.md").read_text()
    file.write_text('{"text": "x"}\n')
    done = python("recipes/chat_dpo.py", *flags, ACCELERATE_USE_CPU="true", fails=True)
    assert "pairs.jsonl, line 1 has text, no pair: write prompt, chosen, rejected" in done.stderr
