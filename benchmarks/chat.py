"""Compares the speed of fine-tuning on conversations with TRL's trainers.

    python benchmarks/chat.py quickstart smollm2

Each model has three comparisons: `chat_sft.py` and `SFTTrainer`, the same with LoRA, and
`chat_dpo.py` and `DPOTrainer`. They take turns as in `measure.py`, in fp32 and uncompiled, on the
same conversations or pairs. Updates have the same mean number of tokens that count in the loss.
`SFTTrainer` is measured with packed windows and with padded batches of conversations.

- quickstart: the quickstart's model. A window has its 128 positions.
- smollm2: a Llama with the proportions of SmolLM2-135M: half its width, 8 of its 30 layers, and a
  vocabulary with which the head has SmolLM2's share of the parameters. A window has 128 tokens.

The weights are random and the tokenizer is a small BPE: neither changes the speed.
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
from processes import Job
from results import RESULTS, write_result

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data.conversations import prepare_conversations
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.tokenizer import train_bpe

sys.path.append(str(Path(__file__).parent.parent / "recipes"))

from python_conversations import conversations, documented

QUICKSTART = {"n_positions": 128, "n_layer": 2, "n_head": 2, "n_embd": 128}
SMOLLM2 = {
    "vocab_size": 8192,
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
BPE = 4096
REPEATS = 12  # conversations with each question
# Fewer than questions: both programs compute the reference's log-probabilities of all pairs before
# the first update.
PAIRS = 200


@dataclass(frozen=True)
class Setup:
    """The sizes for a model: tokens per window, windows or pairs per update, updates per turn."""

    title: str
    length: int
    windows: int
    pairs: int
    updates: int


SETUPS = {
    "quickstart": Setup("The quickstart's model", 128, 8, 8, 20),
    "smollm2": Setup("SmolLM2-135M's proportions, 9.4M parameters", 128, 2, 2, 10),
}


def write_model(name: str, folder: Path, texts: Sequence[str]) -> None:
    """Writes a chat model with random weights and a BPE trained on the texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = folder / "base"
    tokenizer = train_bpe(texts, BPE)
    save_pretrained(GPT(GPTConfig(len(tokenizer), **QUICKSTART)), base, tokenizer)
    tokenizer = chat_tokenizer(base)
    if name == "quickstart":
        model = GPT(GPTConfig(len(tokenizer), **QUICKSTART))
        save_pretrained(model, folder / "model", tokenizer)
    else:
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        LlamaForCausalLM(LlamaConfig(**SMOLLM2, **ids)).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")


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
    for name, lines in {"chats": chats, "pairs": pairs}.items():
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


def comparisons_of(folder: Path, setup: Setup) -> list[list[Job]]:
    """Returns the programs of fine-tuning, of LoRA and of preference training; the first of each
    is this package's."""
    targets, conversations = counted(folder, setup, pairs=False)
    full = Job(
        "chat_sft",
        "chat_recipe",
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
    return comparisons


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=SETUPS, metavar="NAME", help=", ".join(SETUPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, help="updates per turn; default by model")
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    for name in options.names:
        setup = SETUPS[name]
        result_rows = []
        updates = options.updates or setup.updates
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_model(name, folder, write_rows(folder))
            for number, jobs in enumerate(comparisons_of(folder, setup)):
                replies = run_in_turns(jobs, options.rounds, updates, folder / f"runs{number}")
                result_rows += rows(jobs, replies, updates)
        for row in result_rows:
            row["targets_per_second"] = row.pop("tokens_per_second")
        title = (
            f"{setup.title}, {setup.windows} x {setup.length} tokens or {setup.pairs} pairs per "
            f"update, {options.rounds} rounds"
        )
        write_result(f"chat_{name}", {"title": title, "rows": result_rows}, options.results)


if __name__ == "__main__":
    main()
