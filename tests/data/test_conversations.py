"""Conversations: forms, problems, packing, windows, the loss over counted targets."""

import gzip
import json
import random
import shutil
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import chat_rows, contents, losses, make_text, run, tiny_config

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.data.conversations import (
    PROBLEMS,
    Problem,
    best_fit,
    file_rows,
    prepare_conversations,
    read_messages,
)
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.shards import (
    HEADER,
    UnreadableData,
    data_fingerprint,
    load_data_tokenizer,
    open_shard,
    read_manifest,
    verify_data,
    write_mixture,
)
from gpt2_accel.data.stats import describe
from gpt2_accel.hf.chat_template import chat_tokenizer

ASKED = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
FORMS = {
    "messages": {"messages": ASKED, "prompt": "Why?", "source": "made up"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    },
    "prompt": {"prompt": "Why?", "completion": "So."},
    "prompt of messages": {"prompt": ASKED[:1], "completion": ASKED[1:]},
    "alpaca": {"instruction": "Why?", "input": "", "output": "So.", "text": "…"},
    "dolly": {"instruction": "Why?", "context": " ", "response": "So.", "category": "qa"},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_forms_of_the_hub(row):
    messages, silent = read_messages(row, "here")
    assert messages == ASKED and silent == ({0} if "completion" in row else set())


def test_other_parts_of_the_forms():
    system = [{"role": "system", "content": "Be kind."}, *ASKED]
    assert read_messages({"messages": system}, "here")[0] == system
    system[0]["content"] = " "  # nothing to say
    assert read_messages({"messages": system}, "here")[0] == ASKED
    alpaca = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert read_messages(alpaca, "here")[0][0]["content"] == "Add.\n\n1 and 2"
    several = {"prompt": [*ASKED, ASKED[0]], "completion": ASKED[1:]}
    assert read_messages(several, "here")[1] == {0, 1, 2}
    weighted = [{**message, "weight": i % 4 // 2} for i, message in enumerate(ASKED + ASKED)]
    assert read_messages({"messages": weighted}, "here") == (ASKED + ASKED, {0, 1})
    assert read_messages({"messages": ["Why?", "So."]}, "here")[0] == ASKED  # as in LIMA
    for name in ("system", "system_prompt"):
        row = {name: "Be kind.", "conversations": ASKED}
        assert read_messages(row, "here")[0] == [{"role": "system", "content": "Be kind."}, *ASKED]
    both = {"instruction": "Add.", "input": "", "context": "1 and 2", "output": "3"}
    assert read_messages(both, "here")[0][0]["content"] == "Add.\n\n1 and 2"
    with pytest.raises(
        ValueError, match="here, has the fields question, answer, but a conv.* messages; or"
    ):
        read_messages({"question": "Why?", "answer": "So."}, "here")
    with pytest.raises(ValueError, match="here, holds a value of type list, not an object"):
        read_messages(ASKED, "here")


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": ["Why?", ASKED[1]]}, "role"),
        ({"messages": ASKED, "tools": [{"name": "x"}]}, "unsupported"),
        ({"messages": [ASKED[0], {**ASKED[1], "tool_calls": [{}]}]}, "unsupported"),
        ({"messages": [ASKED[0], {**ASKED[1], "reasoning_content": "Hm."}]}, "unsupported"),
        ({"instruction": "x", "output": "y", "history": [["a", "b"]]}, "unsupported"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [ASKED[0], {"role": "assistant", "content": None}]}, "empty"),
        ({"prompt": "Why?", "completion": " \n"}, "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "not_text"),
        ({"messages": "Why?"}, "not_text"),
        ({"instruction": 3, "output": "x"}, "not_text"),
    ],
)
def test_problems_of_a_row(row, problem):
    with pytest.raises(Problem, match=f"^{problem}$"):
        read_messages(row, "here")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(chat_base, folder, rows=None, **options):
    """Prepares conversations in a folder; returns the manifest."""
    folder.mkdir(exist_ok=True)
    file = folder / "rows.jsonl"
    if rows or not file.exists():
        write_rows(file, rows or chat_rows(40))
    settings = {"sequence_length": 64, "source": "made up", "model": str(chat_base), **options}
    tokenizer = chat_tokenizer(chat_base)
    return prepare_conversations(file_rows(file), tokenizer, folder / "chat", **settings)


def test_what_is_left_out_is_counted_and_named(chat_base, tmp_path):
    bad = [
        {"messages": ASKED[:1]},
        {"messages": [{"role": "tool", "content": "x"}, ASKED[1]]},
        {"messages": []},
        {"messages": [{"role": "user", "content": [1]}, ASKED[1]]},
        {"messages": [{"role": "user", "content": "a<|im_end|>b"}, ASKED[1]]},
        {"messages": [{"role": "user", "content": "a" * 80}, ASKED[1]]},
    ]
    rows = [*chat_rows(20), *bad, *bad]
    manifest = prepared(chat_base, tmp_path, rows)
    expected = dict.fromkeys(PROBLEMS, 2) | {"refused": 0, "cut": 0, "unsupported": 0}
    assert manifest["counts"] == expected
    names = ("no_answer", "role", "empty", "not_text", "special_token", "too_long")
    file = tmp_path / "rows.jsonl"
    assert manifest["first"] == {n: f"{file}, line {21 + i}" for i, n in enumerate(names)}
    assert sum(split["documents"] for split in manifest["splits"].values()) == 20


def test_only_bad_conversations_and_a_single_one(chat_base, tmp_path):
    message = (
        "holds no conversation for the split 'train', and each split needs one; left out: 2 conversations without a message "
        "of the assistant .*, the first: .*, line 1: add"
    )
    with pytest.raises(ValueError, match=message):
        prepared(chat_base, tmp_path / "bad", [{"messages": ASKED[:1]}] * 2)
    with pytest.raises(ValueError, match="for the split 'train', and each split needs one: add"):
        prepared(chat_base, tmp_path / "one", chat_rows(1))


def test_few_large_conversations_have_a_held_out_one(chat_base, tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2_accel.data.conversations.SMALL", 100)
    splits = prepared(chat_base, tmp_path, chat_rows(3))["splits"]
    assert [splits[name]["documents"] for name in ("train", "val")] == [2, 1]


def test_what_a_weight_of_0_says_does_not_count(chat_base, tmp_path):
    weighted = [ASKED[0], {**ASKED[1], "content": "BAD", "weight": 0}, ASKED[0], ASKED[1]]
    prepared(chat_base, tmp_path, [{"messages": weighted}] * 20, sequence_length=128)
    (stream, _), *_ = open_split(tmp_path / "chat", "train")
    words = stream.read(0, stream.tokens)
    text = load_data_tokenizer(tmp_path / "chat").decode((words & 2**30 - 1)[words & 2**31 != 0])
    assert "So.<|im_end|>" in text and "BAD" not in text


def test_a_template_that_fails_on_a_row_leaves_it_out(chat_base, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(20)))
    tokenizer = chat_tokenizer(chat_base)
    tokenizer.chat_template = (
        "{{ 1 / (messages[0].content | length - 6) }}" + tokenizer.chat_template
    )
    manifest = prepare_conversations(
        *(file_rows(tmp_path / "rows.jsonl"), tokenizer, tmp_path / "chat"),
        **{"sequence_length": 64, "source": "made up", "model": "u/n"},
    )
    assert 0 < manifest["counts"]["refused"] < 20 and manifest["model"] == "u/n"


def test_another_model_for_a_finished_folder_is_refused(chat_base, tmp_path):
    assert prepared(chat_base, tmp_path)["model"].startswith("..")
    assert prepared(chat_base, tmp_path)
    with pytest.raises(FileExistsError, match="exists already with other data"):
        prepared(chat_base, tmp_path, model=str(tmp_path))


def test_a_long_conversation_is_cut_only_if_asked(chat_base, tmp_path):
    long = {"messages": [ASKED[0], {"role": "assistant", "content": "so " * 50}]}
    late = {"messages": [{"role": "user", "content": "a" * 80}, ASKED[1]]}
    manifest = prepared(chat_base, tmp_path, [*chat_rows(20), long, late], cut=True)
    assert manifest["counts"]["cut"] == 1
    assert manifest["counts"]["no_answer"] == 1  # no token of the answer is left
    (stream, _), *_ = open_split(tmp_path / "chat", "train")
    text = load_data_tokenizer(tmp_path / "chat").decode(stream.read(0, stream.tokens) & 2**30 - 1)
    assert "so so so so" in text


def naive_best_fit(lengths, capacity):
    windows = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        free = [capacity - sum(lengths[i] for i in window) for window in windows]
        fitting = [(left, number) for number, left in enumerate(free) if left >= lengths[item]]
        if fitting:
            least = min(fitting)[0]
            windows[max(n for left, n in fitting if left == least)].append(item)
        else:
            windows.append([item])
    return windows


@pytest.mark.parametrize("seed", range(8))
def test_best_fit_equals_a_search_through_all_windows(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 50) for _ in range(rng.randint(1, 120))]
    packed = best_fit(np.array(lengths), 50)
    assert sorted(item for window in packed for item in window) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[i] for i in window) for window in packed)
    assert sizes == sorted(sum(lengths[i] for i in w) for w in naive_best_fit(lengths, 50))
    assert [window[0] for window in packed] == sorted(window[0] for window in packed)


def test_best_fit_of_many_is_quick():
    lengths = np.random.default_rng(0).integers(1, 4097, 200_000)
    windows = best_fit(lengths, 4096)
    assert lengths.sum() / (4096 * len(windows)) > 0.99


def test_workers_and_the_size_of_pieces_do_not_change_a_byte(chat_base, tmp_path, monkeypatch):
    rows = chat_rows(300)
    prepared(chat_base, tmp_path / "a", rows, shard_tokens=640)
    expected = {p.name: b for p, b in contents(tmp_path / "a/chat").items() if p.suffix == ".bin"}
    assert len(expected) > 4
    monkeypatch.setattr("gpt2_accel.data.conversations.piece_size", lambda _: 2**12)
    (tmp_path / "a/chat/manifest.json").unlink()
    shutil.rmtree(tmp_path / "a/chat")
    for workers in (1, 3):
        prepared(chat_base, tmp_path / "a", rows, workers=workers, shard_tokens=640)
        found = {p.name: b for p, b in contents(tmp_path / "a/chat").items() if p.suffix == ".bin"}
        assert found == expected
        shutil.rmtree(tmp_path / "a/chat")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json", ".parquet", "lines.json"])
def test_files_of_other_formats_hold_the_same_conversations(chat_base, suffix, tmp_path):
    rows = chat_rows(30)
    expected = prepared(chat_base, tmp_path, rows)
    (tmp_path / "other").mkdir()
    path = tmp_path / f"other/rows{suffix}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(lines if suffix == "lines.json" else json.dumps(rows))
    tokenizer, options = chat_tokenizer(chat_base), {"sequence_length": 64, "source": "made up"}
    for source, name in ((path, "chat"), (tmp_path / "other", "again")):
        found = prepare_conversations(
            file_rows(source), tokenizer, tmp_path / "other" / name, model="base", **options
        )
        total = [sum(s["documents"] for s in m["splits"].values()) for m in (expected, found)]
        assert total == [30, 30]
        shutil.rmtree(tmp_path / "other" / name)


def test_files_without_conversations(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    for source in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(
            FileNotFoundError, match="holds no conversations: give a file that ends in .json"
        ):
            file_rows(source)
    for name in (".hidden.jsonl", "dataset_infos.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileNotFoundError, match="holds no conversations"):
        file_rows(tmp_path)
    assert "2 files of another kind left out, the first: a.txt" in capsys.readouterr().err
    (tmp_path / "b.json").write_text('[{"messages": ')
    (piece,) = file_rows(tmp_path / "b.json")
    with pytest.raises(ValueError, match="b.json is not valid JSON"):
        next(piece.rows())


# Windows


def test_windows_hold_whole_conversations_and_count_the_answers(chat_base, tmp_path):
    rows = chat_rows(40)
    manifest = prepared(chat_base, tmp_path, rows)
    tokenizer = load_data_tokenizer(tmp_path / "chat")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    found, counted = [], 0
    for split in ("train", "val"):
        loader = EvalLoader(
            open_split(tmp_path / "chat", split), sequence_length=64, batch_size=1, max_tokens=2**20
        )
        for input_ids, targets, documents, _ in loader:
            assert documents[0, 0] == 1 and (documents.diff() >= 0).all()
            for number in range(1, int(documents.max()) + 1):
                mine = documents[0] == number
                ids = input_ids[0, mine].tolist()
                while ids[-1] == tokenizer.pad_token_id:
                    ids.pop()
                found.append(tokenizer.decode(ids))
                answer = targets[0, mine][: len(ids)]
                answer = answer[answer != -100].tolist()
                assert answer[-1] == end and answer.count(end) == 1
                assert f"assistant\n{tokenizer.decode(answer)}\n" in found[-1]
                counted += len(answer)
        assert loader.bytes_per_token is None
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    expected = [template.format(*(m["content"] for m in row["messages"])) for row in rows]
    assert sorted(found) == sorted(expected)
    assert counted == sum(split["counted"] for split in manifest["splits"].values())


def test_a_completion_counts_and_not_what_was_answered_before(chat_base, tmp_path):
    rows = [{"prompt": [*ASKED, ASKED[0]], "completion": f"number {i}"} for i in range(20)]
    prepared(chat_base, tmp_path, rows)
    (stream, _), *_ = open_split(tmp_path / "chat", "train")
    tokenizer = load_data_tokenizer(tmp_path / "chat")
    words = stream.read(0, stream.tokens)
    text = tokenizer.decode((words & 2**30 - 1)[words & 2**31 != 0])
    assert "number 3<|im_end|>" in text and "So." not in text


def test_version_2_is_in_header_and_manifest_and_its_bits_are_covered(chat_base, tmp_path):
    manifest = prepared(chat_base, tmp_path)
    folder = tmp_path / "chat"
    assert manifest["version"] == 2 and manifest["dtype"] == "uint32"
    shard = folder / "train_000000.bin"
    version, width = struct.unpack_from("<II", shard.read_bytes(), 8)
    assert (version, width) == (2, 4)
    assert verify_data(folder) == 4
    before = data_fingerprint(folder)
    for file in (shard, folder / "train_targets.bin"):
        good = file.read_bytes()
        damaged = bytearray(good)
        damaged[HEADER.size + 4 * 3 + 3] ^= 0x80  # whether the fourth token counts
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{file.name} does not match its checksum"):
            verify_data(folder)
        if file == shard:
            with pytest.raises(UnreadableData, match="window 0 .* counted tokens, not"):
                list(loader(folder).update(0, loader(folder).windows))
        file.write_bytes(good)
    assert data_fingerprint(folder) == before
    template = folder / "tokenizer/chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    with pytest.raises(ValueError, match="is not the tokenizer that made the tokens"):
        verify_data(folder)


def loader(folder, **options):
    settings = {"sequence_length": 64, "micro_batch_size": 2, "seed": 7, **options}
    return TrainLoader(open_split(folder, "train"), **settings)


def test_another_sequence_length_is_refused(chat_base, tmp_path):
    prepared(chat_base, tmp_path)
    with pytest.raises(ValueError, match="windows of 64 tokens, not 32: give --sequence_length 64"):
        loader(tmp_path / "chat", sequence_length=32)


def test_statistics(chat_base, tmp_path):
    entry = prepared(chat_base, tmp_path)["splits"]["train"]
    text = describe(tmp_path / "chat")
    assert f"{entry['documents']} conversations in {entry['targets']['tokens']} windows" in text
    assert "<|im_start|>user\\nW" in text


# The loss over counted targets


def plain_text(chat_base, tmp_path, name="text"):
    texts = {s: [make_text(100, seed) for seed in range(n)] for s, n in (("train", 9), ("val", 1))}
    prepare(texts, chat_tokenizer(chat_base), tmp_path / name, source="made up")
    return tmp_path / name


def update_of(model, folder, world_size, micro_batch_size):
    """Returns the loss and the gradients of an update of 12 windows, as ranks reduce them."""
    model.zero_grad()
    total = 0.0
    for rank in range(world_size):
        part = loader(folder, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for batch in part.update(5, 12):
            loss = model(batch.input_ids, batch.targets, documents=batch.documents) / batch.divisor
            (loss / world_size).backward()
            total += loss.item() / world_size
    return total, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mixed", [False, True])
def test_loss_and_gradients_are_the_mean_over_all_counted_targets(chat_base, mixed, tmp_path):
    prepared(chat_base, tmp_path, chat_rows(60))
    folder = tmp_path / "chat"
    if mixed:
        folder = tmp_path / "mixed"
        text = plain_text(chat_base, tmp_path)
        assert write_mixture(folder, {str(text): 1, str(tmp_path / "chat"): 1})["version"] == 2
        load_data_tokenizer(folder)
        assert (folder / "tokenizer/chat_template.jinja").exists()
    model = GPT(GPTConfig(259, n_positions=64, n_layer=2, n_head=2, n_embd=32))
    input_ids, targets, documents, _ = next(loader(folder, micro_batch_size=12).update(5, 12))
    counted = (targets != -100).sum(dim=1)
    assert len(counted.unique()) > 3 and (counted == 64).any() == mixed
    nats = F.cross_entropy(
        model(input_ids, documents=documents).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected = nats / counted.sum()
    for world_size, size in ((1, 12), (1, 3), (1, 1), (2, 6), (2, 2), (3, 4), (3, 1)):
        loss, gradients = update_of(model, folder, world_size, size)
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        for p, found in zip(model.parameters(), gradients, strict=True):
            (whole,) = torch.autograd.grad(expected, p, retain_graph=True)
            torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-5)


def test_text_is_divided_by_the_number_of_micro_batches(data_dir):
    for batch in loader(data_dir, sequence_length=32).update(0, 8):
        assert batch.divisor == 4 and type(batch.divisor) is int and batch.documents is None


def test_mixtures_of_unequal_conversations_are_refused(chat_base, tmp_path):
    prepared(chat_base, tmp_path / "a")
    prepared(chat_base, tmp_path / "b", sequence_length=128)
    weights = {str(tmp_path / "a/chat"): 1, str(tmp_path / "b/chat"): 1}
    with pytest.raises(ValueError, match="b/chat has another sequence_length than .*a/chat"):
        write_mixture(tmp_path / "mixed", weights)
    other = plain_text(chat_base.parent / "base", tmp_path)
    write_mixture(tmp_path / "mixed", {str(other): 1, str(tmp_path / "a/chat"): 1})
    shard = tmp_path / "a/chat/train_000000.bin"
    assert (
        open_shard(shard).dtype.itemsize == 4 and open_shard(other / shard.name).dtype.itemsize == 2
    )


def test_document_mask_is_for_text(chat_base, tmp_path):
    prepared(chat_base, tmp_path)
    with pytest.raises(ValueError, match="holds conversations, .* leave out --document_mask"):
        run(tiny_config(tmp_path / "chat", tmp_path / "run", n_positions=64, document_mask=True))


def test_a_new_model_trains_on_a_mixture(chat_base, tmp_path):
    prepared(chat_base, tmp_path)
    text = plain_text(chat_base, tmp_path)
    write_mixture(tmp_path / "mixed", {str(text): 1, str(tmp_path / "chat"): 1})
    shape = {"n_positions": 64, "total_batch_size": 256, "eval_every": 8}
    lines = run(tiny_config(tmp_path / "mixed", tmp_path / "run", **shape))
    assert losses(lines)[-1] < losses(lines)[0] and "val/bits_per_byte" not in lines[-1]
    assert read_manifest(tmp_path / "mixed")["splits"]["train"]["bytes"] is None
