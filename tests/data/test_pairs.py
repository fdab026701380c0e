"""Pairs of answers: forms of rows, what is left out, windows."""

import pytest
from conftest import pair_rows, read_json, refused, run_recipe, write_lines
from tables import table

from gpt2_accel.data import messages
from gpt2_accel.data.conversations import TOO_LONG, prepare_conversations
from gpt2_accel.data.messages import EMPTY, EQUAL, Problem, read_pair
from gpt2_accel.data.mixture import write_mixture
from gpt2_accel.data.shards import COUNTS, TOKEN_ID, TokenStream
from gpt2_accel.hf.chat_template import chat_tokenizer

ROWS = table("data/pairs")


@pytest.mark.parametrize("case", ROWS["forms"], ids=lambda case: case["form"])
def test_each_form_of_a_pair_is_read(case):
    good = {"role": "assistant", "content": "So."}
    bad = {"role": "assistant", "content": "No."}
    asked = case["asked"]
    assert read_pair(case["row"], "here") == (asked + [good], asked + [bad])


@pytest.mark.parametrize("case", ROWS["left_out"])
def test_unusable_pairs_are_left_out(case):
    with pytest.raises(Problem) as problem:
        read_pair(case["row"], "here")
    words = case.get("words") or getattr(messages, case["reason"])
    assert words in str(problem.value)


def pair(prompt="Why?", chosen="So.", rejected="No.", **others):
    """Returns a row."""
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | others


def prepared(chat_base, folder, rows, **options):
    """Writes the shards of pairs; returns the manifest."""
    file = write_lines(folder / "pairs.jsonl", rows)
    options = {"sequence_length": 64, "source": "made up", "model": str(chat_base)} | options
    return prepare_conversations(
        [str(file)], chat_tokenizer(chat_base), folder / "pairs", pairs=True, **options
    )


def turns_of(tokenizer, tokens):
    """Returns the question and the answer of half a window; the answer and its end count."""
    ids = tokens & int(TOKEN_ID)
    _, asked, answer = tokenizer.decode(ids).split("<|im_start|>")
    asked = asked.removeprefix("user\n")
    answer = answer.removeprefix("assistant\n")
    assert tokenizer.decode(ids[tokens & int(COUNTS) != 0]) == answer.split("\n")[0]
    return [text.split("<|im_end|>")[0] for text in (asked, answer)]


def test_a_window_is_a_pair_of_padded_rows_and_counts_once(chat_base, tmp_path):
    rows = pair_rows(30)
    too_long = [pair(chosen="a" * 60), pair(rejected="a" * 60)]
    equal = [pair(chosen=" No.", rejected="No. ")]
    special_token = [pair(chosen="<|im_end|>"), pair(rejected="<|im_end|>")]
    manifest = prepared(chat_base, tmp_path, rows + too_long + equal + special_token + [None])
    counts = {reason: count for reason, (count, _) in manifest["left_out"].items()}
    assert counts.pop(TOO_LONG.format("sequence_length")) == 2
    assert counts.pop(EQUAL) == 1
    assert counts.pop(EMPTY) == 1
    [(reason, count)] = counts.items()
    assert "special token" in reason
    assert count == 2
    tokenizer = chat_tokenizer(chat_base)
    seen = []
    for split in ("train", "val"):
        stream = TokenStream(tmp_path / "pairs", split)
        assert stream.sequence_length == 128
        assert set(stream.targets) == {1}
        for tokens in stream.read(0, stream.tokens).reshape(-1, 2, 64):
            (asked, answer), (again, worse) = (turns_of(tokenizer, half) for half in tokens)
            assert asked == again
            seen.append((asked, answer, worse))
    assert sorted(seen) == sorted(tuple(row.values()) for row in rows)


def test_pairs_of_one_prompt_share_a_split(chat_base, tmp_path):
    rows = [pair(f"Who {i}?", "a", f"b{k}") for i in range(40) for k in range(3)]
    manifest = prepared(chat_base, tmp_path, rows)
    counts = [entry["documents"] for entry in manifest["splits"].values()]
    assert sum(counts) == 120
    assert counts[1] > 0
    assert counts[1] % 3 == 0
    (tmp_path / "one").mkdir()
    with refused("1 different prompt"):
        prepared(chat_base, tmp_path / "one", rows[:3])


def test_the_command_prepares_pairs(chat_base, tmp_path):
    file = write_lines(tmp_path / "pairs.jsonl", pair_rows(30))
    flags = ["chat", file, "--model", chat_base, "--sequence_length", 64, "--pairs"]
    run_recipe("prepare_data", *flags, "--data_dir", tmp_path / "data")
    assert read_json(tmp_path / "data/manifest.json")["pairs"] is True
    with refused("exists already"):  # conversations are another plan
        run_recipe("prepare_data", *flags[:-1], "--data_dir", tmp_path / "data")
    with refused("leave out --cut"):
        run_recipe("prepare_data", *flags, "--cut", "--data_dir", tmp_path / "other")
    with refused("pairs"):
        write_mixture(tmp_path / "mixed", {str(tmp_path / "data"): 1})
    with refused("holds pairs"):
        run_recipe("chat_sft", "--data_dir", tmp_path / "data", "--output_dir", tmp_path / "run")
