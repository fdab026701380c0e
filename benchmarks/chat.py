"""Compares the speed of fine-tuning on conversations with TRL's trainers.

    python benchmarks/chat.py quickstart smollm2 gemma --models MODELS

Each model has four comparisons: `chat_sft.py` and `SFTTrainer`, the same with LoRA, `chat_dpo.py`
and `DPOTrainer`, `chat_rl.py` and `GRPOTrainer` (for an update, sampling included: 8 answers of 32
tokens to each prompt, all with the reward 0). They take turns as in `measure.py`, uncompiled, on
the same conversations, pairs or prompts. Updates have the same mean number of tokens that count in
the loss.
`SFTTrainer` is measured with packed windows and with padded batches of conversations. Real models
have a plain loop with the model of `transformers` too, and generation after a prompt of 16 tokens;
all of it in fp32 and, where the device computes in bf16, in bf16.

- quickstart: the quickstart's model, with random weights and a small BPE. A window has its 128
  positions.
- smollm2, gemma: `smollm2-135m-instruct/` and `gemma-3-270m/`, Hugging Face directories in MODELS.
  A window has 256 tokens.

`benchmarks/table.py` prints the results.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from measure import rows, run_in_turns
from processes import ANSWER_TOKENS, ANSWERS, Job
from results import RESULTS, write_result

from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
from gpt2_accel.data.conversations import prepare_conversations
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.hf.chat_template import chat_tokenizer, with_rows
from gpt2_accel.runtime.device import has_bf16, launch_device
from gpt2_accel.tokenizer import load_tokenizer, train_bpe

sys.path.append(str(Path(__file__).parent.parent / "recipes"))

from python_conversations import conversations, documented

QUICKSTART = {"n_positions": 128, "n_layer": 2, "n_head": 2, "n_embd": 128}
REAL = {"smollm2": "smollm2-135m-instruct", "gemma": "gemma-3-270m"}
BPE = 4096
REPEATS = 12  # conversations with each question
# Fewer than questions: both programs compute the reference's log-probabilities of all pairs before
# the first update.
PAIRS = 100


@dataclass(frozen=True)
class Setup:
    """The sizes for a model: tokens per window, windows or pairs per update, updates per turn.

    Without `pairs` only full fine-tuning and generation are measured.
    """

    title: str
    length: int
    windows: int
    pairs: int
    updates: int


SETUPS = {
    "quickstart": Setup("The quickstart's model", 128, 8, 8, 20),
    "smollm2": Setup("SmolLM2-135M-Instruct", 256, 2, 2, 5),
    "gemma": Setup("Gemma 3 270M", 256, 2, 0, 10),
}


def write_model(name: str, folder: Path, texts: Sequence[str], models: Path) -> None:
    """Writes a chat model: random weights and a BPE trained on the texts, or a real model."""
    base = models / REAL.get(name, "")
    if name == "quickstart":
        torch.manual_seed(0)
        base = folder / "base"
        tokenizer = train_bpe(texts, BPE)
        save_pretrained(GPT(GPTConfig(len(tokenizer), **QUICKSTART)), base, tokenizer)
    known = len(load_tokenizer(base))
    # TRL refuses templates without marks of the answers, as SmolLM2's.
    tokenizer = chat_tokenizer(base, chatml=True)
    model = with_rows(from_pretrained(base), known, len(tokenizer))
    save_pretrained(model, folder / "model", tokenizer)


def write_rows(folder: Path) -> list[str]:
    """Writes conversations and pairs about Python's library; returns the texts of all messages."""
    draw = random.Random(0)
    asked = [(f"What does {name} do?", answer) for name, (answer, _) in documented().items()]
    chats = []
    for _ in range(REPEATS):
        chats += conversations(asked, draw)
    pairs = []
    for question, answer in asked[:PAIRS]:
        other = draw.choice(asked)[1]
        if answer != other:
            pair = {
                "prompt": [{"role": "user", "content": question}],
                "chosen": [{"role": "assistant", "content": answer}],
                "rejected": [{"role": "assistant", "content": other}],
            }
            pairs.append(pair)
    tasks = [{"prompt": pair["prompt"], "answer": ""} for pair in pairs]
    for name, lines in {"chats": chats, "pairs": pairs, "tasks": tasks}.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    texts = []
    for row in chats:
        texts += [message["content"] for message in row["messages"]]
    return texts


def counted(folder: Path, setup: Setup, pairs: bool) -> tuple[float, float]:
    """Returns the mean numbers of targets and of conversations per window or pair."""
    data = folder / ("pairs" if pairs else "chats")
    prepare_conversations(
        [f"{data}.jsonl"],
        chat_tokenizer(folder / "model"),
        data,
        sequence_length=setup.length,
        pairs=pairs,
        source="chat.py",
        model=str(folder / "model"),
    )
    manifest = read_manifest(data)
    train = manifest["splits"]["train"]
    windows = train["tokens"] / manifest["sequence_length"]
    return train["counted"] / windows, train["documents"] / windows


def comparisons_of(name: str, folder: Path, precision: str) -> list[list[Job]]:
    """Returns the programs of fine-tuning, of LoRA, of preference training and of generation; the
    first of each is this package's."""
    setup = SETUPS[name]
    targets, conversations = counted(folder, setup, pairs=False)
    full = Job(
        "chat_sft",
        "chat_recipe",
        precision=precision,
        recipe="chat_sft",
        model=str(folder / "model"),
        data=str(folder / "chats.jsonl"),
        length=setup.length,
        batch_size=setup.windows,
        targets=round(setup.windows * targets),
    )
    comparisons = []
    for ours in (full, replace(full, name="chat_sft --lora 16", lora=16)):
        packed = replace(ours, name="SFTTrainer, packed", kind="trl_trainer", packed=True)
        batch_size = round(setup.windows * conversations)
        padded = replace(packed, name="SFTTrainer, padded", packed=False, batch_size=batch_size)
        comparisons.append([ours, packed, padded])
    if name in REAL:
        comparisons[0].append(replace(full, name="a plain loop", kind="hf_loop"))
    if not setup.pairs:
        return [comparisons[0], *generation(full)]
    targets, _ = counted(folder, setup, pairs=True)
    ours = replace(
        full,
        name="chat_dpo",
        recipe="chat_dpo",
        data=str(folder / "pairs.jsonl"),
        batch_size=setup.pairs,
        targets=round(setup.pairs * targets),
    )
    comparisons.append([ours, replace(ours, name="DPOTrainer", kind="trl_trainer")])
    ours = replace(ours, name="chat_rl", recipe="chat_rl", data=str(folder / "tasks.jsonl"))
    ours = replace(ours, targets=setup.pairs * ANSWERS * ANSWER_TOKENS)
    comparisons.append([ours, replace(ours, name="GRPOTrainer", kind="trl_trainer")])
    return comparisons + (generation(full) if name in REAL else [])


def generation(full: Job) -> list[list[Job]]:
    """Returns the programs that generate one text and eight at once."""
    comparisons = []
    for texts in (1, 8):
        ours = Job("gpt2_accel", "generate", precision=full.precision, model=full.model)
        ours = replace(ours, batch_size=texts, new_tokens=64)
        comparisons.append(
            [ours, replace(ours, name="generate of transformers", kind="hf_generate")]
        )
    return comparisons


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=SETUPS, metavar="NAME", help=", ".join(SETUPS))
    parser.add_argument("--models", type=Path, default=Path("models"), help="of smollm2 and gemma")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, help="updates per turn; default by model")
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    for name in options.names:
        setup = SETUPS[name]
        result_rows = []
        precisions = ["no"]
        if name in REAL and has_bf16(launch_device()):
            precisions.append("bf16")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_model(name, folder, write_rows(folder), options.models)
            for precision in precisions:
                for number, jobs in enumerate(comparisons_of(name, folder, precision)):
                    updates = 1 if jobs[0].new_tokens else options.updates or setup.updates
                    runs = folder / f"runs-{precision}-{number}"
                    replies = run_in_turns(jobs, options.rounds, updates, runs)
                    result_rows += rows(jobs, replies, updates)
        for row in result_rows:
            row["targets_per_second"] = row.pop("tokens_per_second")
        size = f"{setup.windows} x {setup.length} tokens"
        if setup.pairs:
            size += f" or {setup.pairs} pairs"
        title = f"{setup.title}, {size} per update, {options.rounds} rounds"
        write_result(f"chat_{name}", {"title": title, "rows": result_rows}, options.results)


if __name__ == "__main__":
    main()
