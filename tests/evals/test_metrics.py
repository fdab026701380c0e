"""The metrics of the `evaluate` library, used through that library only."""

import json
import math
import os

import pytest
from launching import forked

from gpt2_accel.evals import formulas
from gpt2_accel.evals.metrics import BitsPerByte, ChoiceAccuracy, Perplexity, TokenLoss

NATS, TOKENS, BYTES = [3.5, 0.25, 7.0, 1.0, 2.0], [2, 1, 9, 1, 3], [5, 1, 20, 2, 9]
CHOICES, LABELS = (
    [[-1.0, -2.0], [-3.0, -1.0, -2.0], [0.5, 0.25], [1.0, 2.0], [4.0, 3.0]],
    [0, 1, 1, 1, 1],
)

RANK_SCRIPT = """
import json, os, sys
from gpt2_accel.evals.metrics import BitsPerByte, ChoiceAccuracy, Perplexity, TokenLoss

rank, folder, samples = int(os.environ["RANK"]), sys.argv[1], json.loads(sys.argv[2])
results = []
for metric in (TokenLoss, Perplexity, BitsPerByte, ChoiceAccuracy):
    metric = metric(num_process=2, process_id=rank, experiment_id="test", cache_dir=folder)
    for columns in samples[metric.name][rank]:  # batch by batch
        metric.add_batch(**columns)
    results.append(metric.compute())
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(results, file)
"""


def expected() -> list[dict]:
    return [
        formulas.mean_loss(NATS, TOKENS),
        formulas.perplexity(NATS, TOKENS),
        formulas.bits_per_byte(NATS, sum(BYTES)),
        formulas.choice_accuracy(CHOICES, LABELS),
    ]


def test_batches_and_one_call_give_the_same_result(tmp_path):
    loss = TokenLoss(cache_dir=str(tmp_path))
    loss.add_batch(nats=NATS[:1], tokens=TOKENS[:1])
    loss.add_batch(nats=NATS[1:], tokens=TOKENS[1:])
    found = [
        loss.compute(),
        Perplexity(cache_dir=str(tmp_path)).compute(nats=NATS, tokens=TOKENS),
        BitsPerByte(cache_dir=str(tmp_path)).compute(nats=NATS, bytes=BYTES),
        ChoiceAccuracy(keep_in_memory=True).compute(predictions=CHOICES, references=LABELS),
    ]
    assert found == expected()
    assert (
        found[0]["loss"]
        == sum(NATS) / sum(TOKENS)
        != sum(map(lambda n, t: n / t, NATS, TOKENS)) / 5
    )
    assert found[1]["perplexity"] == pytest.approx(math.exp(13.75 / 16))
    assert found[3]["accuracy"] == 3 / 5
    assert "nats" in loss.inputs_description and "mean loss per token" in loss.description


def test_two_processes_give_the_result_of_one(tmp_path):
    columns = {
        "token_loss": {"nats": NATS, "tokens": TOKENS},
        "perplexity": {"nats": NATS, "tokens": TOKENS},
        "bits_per_byte": {"nats": NATS, "bytes": BYTES},
        "choice_accuracy": {"predictions": CHOICES, "references": LABELS},
    }

    def batch(of: dict, *rows: int) -> dict:
        return {name: [values[row] for row in rows] for name, values in of.items()}

    # Rank 0 has four samples in two batches, rank 1 has one.
    samples = {
        name: [[batch(of, 0, 2), batch(of, 3, 4)], [batch(of, 1)]] for name, of in columns.items()
    }
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    argv = [str(script), str(tmp_path), json.dumps(samples)]
    done = forked(argv, [{**os.environ, "RANK": str(rank)} for rank in range(2)])
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert second == [None] * 4
    for found, whole in zip(first, expected(), strict=True):
        assert found == pytest.approx(whole)


def test_bad_samples_are_refused():
    metric = ChoiceAccuracy(keep_in_memory=True)
    with pytest.raises(
        ValueError, match="sample 1 has the label 2: give the index of one of its 2 choices"
    ):
        metric.compute(predictions=CHOICES[2:], references=[0, 2, 1])
    with pytest.raises(ValueError, match="at least one"):
        TokenLoss(keep_in_memory=True).compute(nats=[], tokens=[])
    with pytest.raises(ValueError, match="mean loss of no tokens"):
        Perplexity(keep_in_memory=True).compute(nats=[0.0], tokens=[0])
