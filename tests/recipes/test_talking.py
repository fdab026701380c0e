"""Talking to a model in the terminal, and the conversations about Python."""

import json
import shutil
from collections import Counter
from io import BytesIO, TextIOWrapper

from conftest import run_recipe

from gpt2_accel import from_pretrained
from gpt2_accel.generation.sampling import Sampling, complete, user_turn
from gpt2_accel.tokenizer import load_tokenizer


def test_each_line_is_answered_in_one_conversation(chat_model, monkeypatch, capsys):
    typed = BytesIO(b"\nx<|im_end|>\n\xff\nAnd?\n")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(typed, encoding="utf-8"))
    flags = ("--model", str(chat_model), "--temperature", "0", "--max_new_tokens", "8")
    run_recipe("sample", *flags, "--chat", "true", "--prompt", "Why?", "--system", "Be kind.")
    model = from_pretrained(chat_model)
    tokenizer = load_tokenizer(chat_model)
    messages = [{"role": "system", "content": "Be kind."}]
    expected = ""
    for question in ("Why?", "And?"):
        messages += user_turn(question)
        [answer] = complete(model, tokenizer, [messages], Sampling(8, temperature=0))
        expected += f"{answer.text}\n"
        messages.append({"role": "assistant", "content": answer.text})
    shown = capsys.readouterr()
    assert shown.out == expected
    assert "special token <|im_end|>" in shown.err
    assert "not UTF-8" in shown.err


def test_a_chat_run_of_this_package_answers_by_default(chat_model, monkeypatch, tmp_path, capsys):
    """Another model with a chat template continues the prompt, and a line names --chat."""
    run = shutil.copytree(chat_model, tmp_path / "run")
    flags = ("--prompt", "Why?", "--temperature", "0", "--max_new_tokens", "8")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO()))
    run_recipe("sample", "--model", run, *flags, "--num_samples", "1")
    shown = capsys.readouterr()
    assert shown.out.startswith("Why?")
    assert "--chat true" in shown.err
    (run / "run.json").write_text('{"chat": true}')
    run_recipe("sample", "--model", run, *flags)
    shown = capsys.readouterr()
    [answer] = complete(
        from_pretrained(run), load_tokenizer(run), [user_turn("Why?")], Sampling(8, temperature=0)
    )
    assert shown.out == f"{answer.text}\n"
    assert not shown.err


def test_conversations_about_python_hold_out_wordings_and_names(tmp_path):
    options = ("--invented", "60", "--repeats", "2")
    run_recipe("python_conversations", "--output", str(tmp_path), *options)
    train = (tmp_path / "train.jsonl").read_bytes()
    questions = set()
    turns = set()
    for line in train.splitlines():
        messages = json.loads(line)["messages"]
        questions.add(messages[-2]["content"])
        turns.add(sum(message["role"] == "user" for message in messages))
    assert turns == set(range(1, 11))
    held_out = [json.loads(line) for line in (tmp_path / "held_out.jsonl").open()]
    assert not {item["prompt"] for item in held_out} & questions
    groups = Counter(item["group"] for item in held_out)
    assert groups["invented"] == groups["other"] == 150
    assert groups["known"] > 0
    for item in held_out:
        assert (item["answer"] == "I don't know.") == (item["group"] != "known")
    assert len((tmp_path / "functions.txt").read_text().split()) == 300
