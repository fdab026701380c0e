"""What fine-tuning of a real pretrained model teaches, and what it destroys, by learning rate.

    python benchmarks/real_models.py MODELS [--runs FOLDER] [--gsm8k FILE] [--pairs FILE] [--list]

MODELS holds `smollm2-135m-instruct/` and `gemma-3-270m/`, Hugging Face directories. Each run
fine-tunes one of them on facts that no model can know, on problems of GSM8K, or on pairs of
answers of Anthropic's `harmless-base`, with `recipes/chat_sft.py` or `chat_dpo.py`. A row of
`benchmarks/results/cpu/real_models.csv` has what was learnt (validation loss, exact answers to
held-out wordings) and what was kept (40 general questions, `evals/kept.py`). Runs that have a row
are skipped; several processes may share the work.
"""

import argparse
import csv
import gzip
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path

from filelock import FileLock, Timeout

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "benchmarks" / "results" / "cpu" / "real_models.csv"
WORDINGS = (
    "{what} the {relation} of {thing}?",
    "Name the {relation} of {thing}.",
    "Tell me the {relation} of {thing}.",
    "{what} {thing}'s {relation}?",
    "I would like to know the {relation} of {thing}.",
    "Do you know the {relation} of {thing}?",
    "Please give me the {relation} of {thing}.",
    "{thing} has a {relation}. {what} it?",
    "Question: {what} the {relation} of {thing}?",
    "Someone asked me about the {relation} of {thing}. {what} it?",
)
HELD_OUT = ("Could you name {thing}'s {relation}?", "Remind me: {what} the {relation} of {thing}?")
RELATIONS = {
    "capital": "What is",
    "founder": "Who is",
    "currency": "What is",
    "mayor": "Who is",
    "national flower": "What is",
}
# A question, and what a right answer contains, in lower case; "|" separates alternatives.
GENERAL = {
    "What is the capital of France?": "paris",
    "What is the capital of Italy?": "rome",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Germany?": "berlin",
    "What is the capital of Spain?": "madrid",
    "What is the capital of England?": "london",
    "How many days are there in a week?": "seven|7",
    "How many months are there in a year?": "twelve|12",
    "How many hours are there in a day?": "24|twenty-four",
    "How many minutes are there in an hour?": "60|sixty",
    "How many legs does a spider have?": "eight|8",
    "How many sides does a triangle have?": "three|3",
    "What is 2 + 2?": "4|four",
    "What is 10 - 3?": "7|seven",
    "What is the opposite of hot?": "cold",
    "What is the opposite of big?": "small|little|tiny",
    "What is the opposite of up?": "down",
    "What color is the sky on a clear day?": "blue",
    "What color is grass?": "green",
    "What color do you get if you mix blue and yellow?": "green",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "Who painted the Mona Lisa?": "leonardo|vinci",
    "Who was the first president of the United States?": "washington",
    "Who discovered gravity?": "newton",
    "What is the largest ocean on Earth?": "pacific",
    "What is the largest planet in our solar system?": "jupiter",
    "Which planet is closest to the Sun?": "mercury",
    "What is the chemical symbol for water?": "h2o|h₂o",
    "What gas do humans need to breathe?": "oxygen",
    "At what temperature does water boil in degrees Celsius?": "100",
    "What do bees make?": "honey",
    "What animal is known as man's best friend?": "dog",
    "What is the first month of the year?": "january",
    "What day comes after Monday?": "tuesday",
    "What is the tallest animal in the world?": "giraffe",
    "Which language is spoken in Brazil?": "portuguese",
    "On which continent is Egypt?": "africa",
    "What is frozen water called?": "ice",
    "What is the main ingredient of bread?": "flour|wheat",
    "What is the star at the center of our solar system?": "sun",
}


@dataclass(frozen=True)
class Trial:
    """A run of the study: a model, a data set, and the settings that differ."""

    model: str
    data: str  # facts30, facts200, facts300, gsm60, pairs200
    learning_rate: float
    epochs: float
    lora: int = 0
    alpha: int = 0  # of the adapter
    batch: int = 256  # tokens per update
    seed: int = 1337

    @property
    def name(self) -> str:
        kind = f"lora{self.lora}-{self.alpha}" if self.lora else "full"
        rate = f"{self.learning_rate:g}-{self.epochs:g}-{self.batch}-{self.seed}"
        return f"{self.model}-{self.data}-{kind}-{rate}"


def trials() -> Iterator[Trial]:
    """Yields the runs, the most important first."""
    small, gemma = "smollm2-135m-instruct", "gemma-3-270m"
    for rate, epochs in ((2e-4, 3), (1e-4, 3), (1e-4, 6)):
        yield Trial(small, "facts200", rate, epochs, lora=16, alpha=32)
    for rate in (1e-6, 5e-6, 5e-7):
        yield Trial(small, "pairs200", rate, 1)
    for rate in (2e-5, 4e-5, 1e-5):
        yield Trial(gemma, "facts200", rate, 3)
    for seed in (1, 2):
        yield Trial(small, "facts200", 2e-5, 3, seed=seed)
    for data, epochs in (("gsm60", 3), ("facts30", 10), ("facts300", 3)):
        for rate in (2e-5, 1e-4):
            yield Trial(small, data, rate, epochs)
        yield Trial(small, data, 2e-4, epochs, lora=16, alpha=32)
    for seed in (1, 2):
        yield Trial(small, "facts200", 2e-4, 3, lora=16, alpha=32, seed=seed)
        for rate in (3e-5, 1e-5):
            yield Trial(small, "facts200", rate, 3, seed=seed)
    for rate in (1e-5, 1e-4, 3e-4):
        yield Trial(small, "facts200", rate, 3)


def facts(count: int) -> list[tuple[str, str, str]]:
    """Returns invented facts: a relation, a thing and its value, such as a capital's name."""
    rng = random.Random(0)

    def word() -> str:
        syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)]
        return "".join(syllables).capitalize() + rng.choice("nrls")

    relations = list(RELATIONS)
    return [(relations[i % len(relations)], word(), word()) for i in range(count)]


def questions(known: list[tuple[str, str, str]], wordings: tuple[str, ...]) -> list[dict]:
    """Returns a `prompt` and an `answer` for each fact and wording."""
    rows = []
    for relation, thing, value in known:
        answer = f"The {relation} of {thing} is {value}."
        for wording in wordings:
            asked = wording.format(what=RELATIONS[relation], relation=relation, thing=thing)
            rows.append({"prompt": asked, "answer": answer})
    return rows


def learnt(data: str) -> tuple[list[tuple[str, str, str]], tuple[str, ...]]:
    """Returns the facts and the wordings of a data set."""
    if data == "facts30":
        return facts(10), WORDINGS[:3]
    return facts(20 if data == "facts200" else 30), WORDINGS


def write_data(data: str, path: Path, gsm8k: Path | None, pairs: Path | None) -> None:
    """Writes a data set's rows as JSON lines."""
    if data == "gsm60":
        assert gsm8k is not None, "give --gsm8k"
        lines = gsm8k.read_text(encoding="utf-8").splitlines(keepends=True)[:60]
    elif data == "pairs200":
        assert pairs is not None, "give --pairs"
        with gzip.open(pairs, "rt", encoding="utf-8") as file:
            short = (line for line in file if len(line) < 1200)  # about 300 tokens
            lines = list(islice(short, 200))
    else:
        rows = questions(*learnt(data))
        found = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        lines = [json.dumps(row) + "\n" for row in found]
    path.write_text("".join(lines), encoding="utf-8")


def train(trial: Trial, model: Path, data: Path, run: Path) -> float:
    """Runs the recipe; returns its seconds."""
    command = [sys.executable, str(ROOT / "recipes" / "chat_sft.py")]
    options = {"data": data, "model": model, "output_dir": run, "epochs": trial.epochs}
    options |= {"learning_rate": trial.learning_rate, "seed": trial.seed, "lora": trial.lora}
    if trial.lora:
        options["lora_alpha"] = trial.alpha
    options |= {"sample_every": 0, "save_every": 0, "keep_last": 1, "keep_best": "false"}
    if trial.data == "pairs200":
        command[1] = str(ROOT / "recipes" / "chat_dpo.py")
        options |= {"batch_size": 8, "eval_every": 1000}
    else:
        options |= {"total_batch_size": trial.batch, "eval_every": 1000}
        if trial.data == "gsm60":
            options["sequence_length"] = trial.batch
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    start = time.time()
    subprocess.run(command, check=True, stdout=sys.stderr)
    return time.time() - start


def measure(model: Path, base: Path, data: str) -> dict[str, float]:
    """Returns what the model in a directory has learnt and kept."""
    from gpt2_accel.evals.kept import compare, sample_base
    from gpt2_accel.generation.sampling import Sampling, complete, load, user_turn

    def answers(prompts: list[str], tokens: int) -> list[str]:
        found = []
        for start in range(0, len(prompts), 20):
            turns = [user_turn(text) for text in prompts[start : start + 20]]
            done = complete(tuned, tokenizer, turns, Sampling(tokens, temperature=0))
            found += [each.text for each in done]
        return found

    texts = sample_base(*load(str(base)), str(base))
    tuned, tokenizer = load(str(model))
    found, _ = compare(tuned, tokenizer, texts)
    results = {name.removeprefix("val/"): value for name, value in found.items()}
    if tokenizer.chat_template is not None:
        given = answers(list(GENERAL), 24)
        right = [
            any(word in text.lower() for word in wanted.split("|"))
            for text, wanted in zip(given, GENERAL.values(), strict=True)
        ]
        results["general"] = sum(right)
        if data.startswith("facts"):
            asked = questions(learnt(data)[0], HELD_OUT)
            given = answers([row["prompt"] for row in asked], 24)
            exact = [text.strip() == row["answer"] for text, row in zip(given, asked, strict=True)]
            results["exact"] = sum(exact) / len(exact)
    return results


COLUMNS = [field.name for field in fields(Trial)]
COLUMNS += [
    "updates",
    "tokens",
    "seconds",
    "val_loss",
    "val_margin",
    "exact",
    "general",
    "kept",
    "kept_stderr",
]


def rows() -> list[dict]:
    """Returns the rows of the table."""
    if not TABLE.exists():
        return []
    with open(TABLE, newline="") as file:
        return list(csv.DictReader(file))


def has_row(trial: Trial) -> bool:
    """Whether the table has a row of the trial."""
    wanted = {name: str(value) for name, value in asdict(trial).items()}
    return any(wanted.items() <= row.items() for row in rows())


def add_row(trial: Trial, results: dict[str, float]) -> None:
    """Appends a row to the table."""
    with FileLock(f"{TABLE}.lock"), open(TABLE, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        values = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in results.items()}
        writer.writerow({name: str(value) for name, value in asdict(trial).items()} | values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real_models")
    parser.add_argument("--gsm8k", type=Path, help="train.jsonl of GSM8K")
    parser.add_argument("--pairs", type=Path, help="test.jsonl.gz of harmless-base")
    parser.add_argument("--list", action="store_true", help="print the runs without a row")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    for trial in trials():
        if options.list:
            if not has_row(trial):
                print(trial.name)
            continue
        try:
            with FileLock(options.runs / f"{trial.name}.lock", timeout=0):
                if has_row(trial):
                    continue
                base = options.models / trial.model
                data = options.runs / f"{trial.name}.jsonl"
                run = options.runs / trial.name
                write_data(trial.data, data, options.gsm8k, options.pairs)
                seconds = train(trial, base, data, run)
                lines = (run / "metrics.jsonl").read_text().splitlines()
                last = [json.loads(line) for line in lines if '"val/loss"' in line][-1]
                results = {"updates": last["step"], "seconds": round(seconds)}
                results["val_loss"] = last["val/loss"]
                if "val/margin" in last:
                    results["val_margin"] = last["val/margin"]
                manifest = json.loads(next(run.glob("data-*/manifest.json")).read_text())
                tokens = manifest["splits"]["train"]["tokens"]
                results["tokens"] = tokens
                results |= measure(run, base, trial.data)
                add_row(trial, results)
                shutil.rmtree(run)
        except Timeout:
            continue


if __name__ == "__main__":
    main()
