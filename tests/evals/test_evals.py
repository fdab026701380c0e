"""The evaluations, compared with a plain loop over transformers' GPT-2 that scores one continuation at a time."""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import hellaswag_items, make_text, reset_accelerate
from transformers import GPT2LMHeadModel

from gpt2_accel import GPT, GPTConfig, from_pretrained
from gpt2_accel.data.loader import EvalLoader, open_split
from gpt2_accel.evals import formulas
from gpt2_accel.evals.detokenize import count_words, detokenize
from gpt2_accel.evals.hellaswag import HellaSwag, hellaswag, load_hellaswag
from gpt2_accel.evals.lambada import lambada, load_lambada
from gpt2_accel.evals.likelihood import BATCH_TOKENS, Score, encode_question, score
from gpt2_accel.evals.perplexity import corpus_perplexity, load_corpus, load_pages, page_perplexity
from gpt2_accel.evals.sources import read_items
from gpt2_accel.evals.tasks import prepare_loss, prepare_task
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.tokenizer import byte_tokenizer, char_tokenizer

POSITIONS = 64


@pytest.fixture
def accelerator():
    reset_accelerate()
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def models(trained):
    """A briefly trained model, and the same model in transformers."""
    hf = GPT2LMHeadModel.from_pretrained(trained, dtype=torch.float32)
    return from_pretrained(trained), hf.eval()


@torch.no_grad()
def plain_loop(hf, context: str, continuation: str) -> list[tuple[float, bool]]:
    """Returns, for each byte of the continuation, its loss in nats and whether it is the likeliest byte."""
    prompt, target = list(context.encode()), list(continuation.encode())
    ids = (prompt + target)[-(POSITIONS + 1) :]
    logits = hf(torch.tensor([ids[:-1]])).logits[0, -len(target) :]
    nats = F.cross_entropy(logits, torch.tensor(target), reduction="none")
    return list(
        zip(nats.tolist(), (logits.argmax(-1) == torch.tensor(target)).tolist(), strict=True)
    )


def test_hellaswag_equals_a_plain_loop_over_transformers(accelerator, models):
    model, hf = models
    items = hellaswag_items(30, seed=1)
    data = load_hellaswag(items, byte_tokenizer(), POSITIONS)
    assert 5 < data.cut < 25
    right = {"acc": [], "acc_norm_per_token": [], "acc_norm_per_char": []}
    for item, row in zip(items, score(accelerator, model, data.questions), strict=True):
        loop = [plain_loop(hf, item["ctx"], f" {ending}") for ending in item["endings"]]
        nats = [sum(nats for nats, _ in tokens) for tokens in loop]
        assert [s.nats for s in row] == pytest.approx(nats, abs=1e-4)
        lengths = {
            "acc": [1] * 4,
            "acc_norm_per_token": [len(tokens) for tokens in loop],
            "acc_norm_per_char": [len(ending) for ending in item["endings"]],
        }
        for name, by in lengths.items():
            choice = min(range(4), key=lambda i: nats[i] / by[i])
            right[name].append(choice == int(item["label"]))
    found = hellaswag(accelerator, model, data=data)
    for name, hits in right.items():
        assert found[f"hellaswag/{name}"] == sum(hits) / 30
        variance = sum((hit - sum(hits) / 30) ** 2 for hit in hits) / 29
        assert found[f"hellaswag/{name}_stderr"] == pytest.approx(math.sqrt(variance / 30))
    assert len({tuple(hits) for hits in right.values()}) > 1


def test_each_accuracy_normalises_by_its_own_length(accelerator, monkeypatch):
    row = [Score(nats, tokens, False, 0.0, False) for nats, tokens in ((10, 2), (12, 6), (14, 4))]
    monkeypatch.setattr("gpt2_accel.evals.hellaswag.score", lambda *_: [row] * 4)
    data = HellaSwag([], [[10, 10, 100]] * 4, labels=[0, 1, 2, 2], cut=0, left_out=[])
    found = hellaswag(accelerator, None, data=data)
    names = ("acc", "acc_norm_per_token", "acc_norm_per_char")
    assert [found[f"hellaswag/{name}"] for name in names] == [0.25, 0.25, 0.5]
    data.labels = [0, 0, 0, 1]
    found = hellaswag(accelerator, None, data=data)
    assert [found[f"hellaswag/{name}"] for name in names] == [0.75, 0.25, 0.0]


def test_lambada_equals_a_plain_loop_over_transformers(accelerator, models):
    model, hf = models
    passages = [make_text(n % 20 + 2, n)[:-2] for n in range(40)]
    loop = [plain_loop(hf, p.rpartition(" ")[0], " " + p.rpartition(" ")[2]) for p in passages]
    data = load_lambada(passages, byte_tokenizer(), POSITIONS)
    found = lambada(accelerator, model, data=data)
    n = len(passages)
    assert data.cut == sum(len(p.encode()) - 1 > POSITIONS for p in passages)
    word = sum(sum(nats for nats, _ in tokens) for tokens in loop) / n
    token = sum(tokens[-1][0] for tokens in loop) / n
    assert math.log(found["lambada/last_word_perplexity"]) == pytest.approx(word, abs=1e-4)
    assert math.log(found["lambada/last_token_perplexity"]) == pytest.approx(token, abs=1e-4)
    assert found["lambada/last_word_acc"] == sum(all(hit for _, hit in t) for t in loop) / n
    assert 0 < found["lambada/last_token_acc"] == sum(t[-1][1] for t in loop) / n < 1


@pytest.mark.parametrize("stride", [None, 1, 7, 64])
def test_corpus_perplexity_equals_a_plain_loop_at_each_stride(accelerator, models, stride):
    model, hf = models
    text = make_text(45, 0)
    documents = load_corpus("text", [text], byte_tokenizer())
    found = corpus_perplexity(accelerator, model, task="text", documents=documents, stride=stride)
    ids = [256, *text.removesuffix("\n").encode()]
    nats, start = [], 1
    while start < len(ids):  # each window predicts the tokens after the previous window
        end = min(len(ids), start + (POSITIONS if start == 1 else stride or POSITIONS))
        window = torch.tensor([ids[max(0, end - 1 - POSITIONS) : end]])
        with torch.no_grad():
            logits = hf(window[:, :-1]).logits[0]
        loss = F.cross_entropy(logits, window[0, 1:], reduction="none")
        nats += loss[-(end - start) :].tolist()
        start = end
    assert len(nats) == len(ids) - 1
    assert found["text/loss"] == pytest.approx(sum(nats) / len(nats), abs=1e-4)
    words = math.exp(sum(nats) / (len(text.split()) + 1))
    assert found["text/perplexity_per_word"] == pytest.approx(words, rel=1e-4)
    bits = sum(nats) / math.log(2) / len(text.strip())
    assert found["text/bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_perplexity_of_pages_is_the_mean_over_their_words(accelerator, models):
    model, _ = models
    pages = [make_text(n, n) for n in (1, 40, 3)]
    documents = load_pages(pages, byte_tokenizer())
    found = page_perplexity(accelerator, model, task="w", documents=documents)
    alone = [page_perplexity(accelerator, model, task="w", documents=[d]) for d in documents]
    nats = [
        math.log(one["w/lm_eval_word_perplexity"]) * d.words
        for one, d in zip(alone, documents, strict=True)
    ]
    expected = sum(nats) / sum(len(re.split(r"\s+", page)) for page in pages)
    assert math.log(found["w/lm_eval_word_perplexity"]) == pytest.approx(expected, abs=1e-5)


def test_without_end_of_text_the_first_token_is_context_only(accelerator):
    text = "abcabcabc"
    model = GPT(GPTConfig(3, n_positions=4, n_layer=1, n_head=1, n_embd=8))
    [document] = load_corpus("text", [text], char_tokenizer(text))
    found = corpus_perplexity(accelerator, model, task="text", documents=[document])
    assert len(document.ids) == 9 and 0.8 < found["text/loss"] < 1.4
    with pytest.raises(
        ValueError, match="item 5 has no context, and the tokenizer has no token that starts a text"
    ):
        encode_question(char_tokenizer(text), "", ["a"], "item 5")


def test_validation_loss_has_a_standard_error_over_windows(accelerator, models, data_dir):
    model, hf = models
    loader = EvalLoader(
        open_split(data_dir, "val"), sequence_length=32, batch_size=4, max_tokens=320
    )
    found = validation_loss(accelerator, model, loader=loader)
    losses = []
    for input_ids, targets, *_ in loader:
        with torch.no_grad():
            logits = hf(input_ids).logits
        loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        losses += [
            row[t != -100].mean().item()
            for row, t in zip(loss, targets, strict=True)
            if (t != -100).any()
        ]
    assert len(losses) == 10
    mean, spread = torch.tensor(losses).mean().item(), torch.tensor(losses).std().item()
    assert found["val/loss"] == pytest.approx(mean, abs=1e-4)
    assert found["val/loss_stderr"] == pytest.approx(spread / math.sqrt(10), rel=1e-3)
    assert validation_loss(accelerator, model, lambda: True, loader=loader) == {}


WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


def test_the_host_waits_for_the_device_only_after_the_last_batch(
    accelerator, models, data_dir, monkeypatch
):
    model, _ = models
    events = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: events.append("f") or forward(*a, **k))
    for name in WAITS:
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *a, f=plain, **k: events.append("w") or f(*a, **k)
        )
    loader = EvalLoader(
        open_split(data_dir, "val"), sequence_length=32, batch_size=2, max_tokens=320
    )
    validation_loss(accelerator, model, loader=loader)
    assert "".join(events).startswith("fffff") and events.count("f") == 5
    assert "f" not in events[5:] and events.count("w") == 1
    data = load_hellaswag(hellaswag_items(400), byte_tokenizer(), POSITIONS)
    documents = load_corpus("text", [make_text(2000, 1)], byte_tokenizer())
    for evaluate in (
        lambda: score(accelerator, model, data.questions),
        lambda: corpus_perplexity(accelerator, model, task="text", documents=documents),
    ):
        events.clear()
        evaluate()
        first = events.index("w")
        assert first > 1 and "f" not in events[first:]


def test_batches_of_the_loss_stay_small_for_a_small_vocabulary(accelerator, data_dir):
    for vocab_size in (257, 10**6):
        shape = GPTConfig(vocab_size, n_positions=POSITIONS)
        prepared = prepare_loss(accelerator, byte_tokenizer(), shape, data_dir, 10**7)
        for evaluate in prepared.evaluations:
            assert evaluate.keywords["loader"].batch_size * POSITIONS <= BATCH_TOKENS


def test_interrupted_evaluation_is_empty_and_restores_the_mode(accelerator, models):
    model, _ = models
    asked = []
    data = load_hellaswag(hellaswag_items(400), byte_tokenizer(), POSITIONS)
    model.train()
    found = hellaswag(accelerator, model, lambda: asked.append(0) or len(asked) == 3, data=data)
    assert found == {} and model.training and len(asked) == 3
    model.eval()


# Sentences in the format of each corpus.
WIKITEXT = """ = Robert Boulter =

 Robert Boulter is an English film , television and theatre actor . He had a guest @-@ starring role
 He did n't say : " I 'm 21 @.@ 5 % ( or 1 @,@ 234 ) years [ old ] ! " ; the dogs ' owner said " No ? "
 <unk> paid $ 5 and £ 6"""
PTB = """no it was n't black monday
but while the new york stock exchange did n't fall apart friday as the dow jones fell N points N %
it 's $ N billion or # N in the traders ' view <unk>"""


def tokenized(text: str, corpus: str) -> str:
    """Applies the tokenization rules of the corpus that the samples need."""
    if corpus == "wikitext":
        text = re.sub(r"(?<=\w)([-,.])(?=\w)", r" @\1@ ", text)
        text = re.sub(r"(?<!@)([,.;:!?()\[\]\"%$£])(?!@)", r" \1 ", text)
    text = re.sub(r"([$#%])", r" \1 ", text)
    text = re.sub(r"(n't|'s|'m|(?<=s)')(?=\W|$)", r" \1", text)
    return "\n".join(" ".join(line.split()) for line in text.split("\n"))


@pytest.mark.parametrize(("corpus", "text"), [("wikitext", WIKITEXT), ("ptb", PTB)])
def test_detokenize_is_inverted_by_tokenization(corpus, text):
    written = detokenize(text, corpus)
    expected = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    assert tokenized(written, corpus) == expected
    assert not re.search(r" [,.;:!?)%]| n't| '| @|[($] ", written), written
    assert count_words(text) == sum(len(line.split()) + 1 for line in text.split("\n"))


def test_detokenized_wikitext_example():
    assert detokenize(WIKITEXT, "wikitext").split("\n")[3] == (
        'He didn\'t say: "I\'m 21.5% (or 1,234) years [old]!"; the dogs\' owner said "No?"'
    )


def test_formulas_of_the_metrics():
    assert formulas.mean_loss([2.0, 1.0], [3, 1]) == {
        "loss": 0.75,
        "loss_stderr": 0.125,
    }
    assert formulas.mean_loss([2.0], [4]) == {"loss": 0.5}
    assert formulas.perplexity([2e6], [1]) == {"perplexity": math.inf}
    assert formulas.bits_per_byte([math.log(2) * 3], 2) == {"bits_per_byte": pytest.approx(1.5)}
    assert formulas.choice_accuracy([[1, 1], [0, 1], [2, 1]], [0, 0, 1])["accuracy"] == 1 / 3
    assert formulas.choice_accuracy([[1, math.nan], [math.nan, 1]], [0, 1])["accuracy"] == 0
    for call in (
        lambda: formulas.mean_loss([], []),
        lambda: formulas.choice_accuracy([], []),
        lambda: formulas.choice_accuracy([[1, 2]], [2]),
        lambda: formulas.choice_accuracy([[1, 2]], [-1]),
        lambda: formulas.bits_per_byte([1.0], 0),
    ):
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ctx": None}, "item 2 of HellaSwag has ctx = None: expected str"),
        ({"ctx": " "}, "item 2 of HellaSwag has an empty context or ending"),
        ({"endings": ["a", "", "b", "c"]}, "item 2 of HellaSwag has an empty context or ending"),
        ({"endings": ["a"]}, r"item 2 of HellaSwag has endings = \['a'\]: expected two strings"),
        ({"endings": ["a", 5]}, "expected two strings or more"),
        ({"endings": "abcd"}, "has endings = 'abcd': expected list"),
        (
            {"label": 4},
            "item 2 of HellaSwag has label = 4: expected the index of an ending, 0 to 3",
        ),
        ({"label": -1}, "has label = -1"),
        ({"label": ""}, "has label = ''"),
        ({"label": True}, "has label = True"),
        ({"label": 1.5}, r"has label = 1.5: expected int \| str"),
    ],
)
def test_bad_item_is_refused_by_number(change, message):
    items = hellaswag_items(4)
    items[2] |= change
    with pytest.raises(ValueError, match=message):
        load_hellaswag(items, byte_tokenizer(), POSITIONS)
    del items[2]["ctx"]
    with pytest.raises(ValueError, match="item 2 of HellaSwag has no field 'ctx': it has 'ind', "):
        load_hellaswag(items, byte_tokenizer(), POSITIONS)


def test_continuations_that_do_not_fit_are_skipped_or_refused(accelerator, models):
    items = hellaswag_items(5)
    items[3]["endings"] = ["a" * 70, "b", "c", "d"]
    prepared = prepare_task(byte_tokenizer(), models[0].config, "hellaswag", items)
    note = "1 of 5 items are skipped, because they have an ending of more than 64 tokens: 3"
    assert prepared.notes[-1] == f"hellaswag: {note}"
    data = load_hellaswag(items, byte_tokenizer(), POSITIONS)
    del items[3]
    assert data == replace(load_hellaswag(items, byte_tokenizer(), POSITIONS), left_out=[3])
    assert len(score(accelerator, models[0], data.questions)) == 4
    for item in items:
        item["endings"] = ["a" * 70, "b", "c", "d"]
    with pytest.raises(ValueError, match="no HellaSwag item has endings that fit"):
        load_hellaswag(items, byte_tokenizer(), POSITIONS)
    question = encode_question(byte_tokenizer(), "a", ["b" * 65], "it")
    with pytest.raises(ValueError, match="it has a continuation without tokens"):
        encode_question(byte_tokenizer(), "a", ["b", ""], "it")
    with pytest.raises(ValueError, match="question 0 has a continuation of 65 tokens, more than"):
        score(accelerator, models[0], [question])


def test_other_bad_input_is_refused(tmp_path):
    tokenizer = byte_tokenizer()
    config = GPTConfig(257, n_positions=POSITIONS, n_layer=1, n_head=1, n_embd=8)
    with pytest.raises(ValueError, match="no HellaSwag items"):
        load_hellaswag([], tokenizer, POSITIONS)
    with pytest.raises(ValueError, match="item 1 of LAMBADA needs at least two words"):
        load_lambada(["the cat", "cat"], tokenizer, POSITIONS)
    with pytest.raises(ValueError, match="item 0 of lambada has no field 'text'"):
        prepare_task(tokenizer, config, "lambada", [{"passage": "the cat"}])
    with pytest.raises(ValueError, match="stride must be between 1 and n_positions"):
        prepare_task(tokenizer, config, "ptb", [{"text": "the cat"}], stride=65)
    with pytest.raises(ValueError, match="does not know the characters"):
        prepare_task(char_tokenizer("abc"), config, "text", [{"text": "abcd"}])
    path = tmp_path / "items.jsonl"
    for text, message in {
        "": "is empty",
        "\n": "holds no items for hellaswag",
        '{"a": 1}\n\n{"a": ': "items.jsonl, line 3, is not valid JSON",
        "[1]\n": "items.jsonl, line 1, is not a JSON object",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_items("hellaswag", path)
    path.write_text('{"text": "a\u2028b"}\r\n', encoding="utf-8")
    assert read_items("lambada", path) == [{"text": "a\u2028b"}]
    text = tmp_path / "items.txt"
    text.write_bytes(b"the cat\n\nsat on\r\n")
    assert read_items("lambada", text) == [{"text": "the cat"}, {"text": "sat on"}]
    assert read_items("ptb", text) == [{"text": "the cat\n\nsat on\r\n"}]
    text.write_bytes("the cat".encode("utf-8-sig"))  # with a byte-order mark, as on Windows
    assert read_items("ptb", text) == [{"text": "the cat"}]
    text.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="items.txt is not UTF-8 text"):
        read_items("ptb", text)
    with pytest.raises(FileNotFoundError, match="no.jsonl does not exist"):
        read_items("hellaswag", tmp_path / "no.jsonl")
    with pytest.raises(FileNotFoundError, match="Rowan/hellaswag cannot be read from the Hub"):
        read_items("hellaswag")
