"""Teach a chat model which of two answers is better: direct preference optimization (DPO), by TRL's `DPOTrainer`.

    accelerate launch recipes/chat_dpo.py --model runs/chat_sft --data pairs.jsonl --output_dir runs/chat_dpo

Data: a JSONL file, or a data set on the Hub, with `prompt`, `chosen` and `rejected`, or the last two as lists of messages.
The reference is the model that the run starts from. Settings: SmolLM2-135M-Instruct's (Allal et al., 2025, arXiv:2502.02737).
The loop and its checkpoints, in `trl/`, are TRL's: the same command continues. Expected: `rewards/margins` grows above 0.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from gpt2_accel import cli, from_pretrained, save_pretrained
from gpt2_accel.checkpoint.find import verified_directory
from gpt2_accel.config import check_ranges, parse_config, setting
from gpt2_accel.data.rows import reading
from gpt2_accel.evals.items import Item, read_items
from gpt2_accel.generation.sampling import user_turn
from gpt2_accel.hf.convert import local_directory, read_config
from gpt2_accel.hf.model_card import Training
from gpt2_accel.runtime.device import best_device
from gpt2_accel.runtime.files import JsonLines
from gpt2_accel.tokenizer import load_tokenizer, prompt_tokens, special_tokens


@dataclass
class ChatDPO:
    model: str = setting("runs/chat_sft", "chat model: run's folder, HF model directory or Hub id")
    data: str = setting("pairs.jsonl", "JSONL file, or id of a data set on the Hub")
    output_dir: str = setting("runs/chat_dpo", "folder of the run")
    epochs: float = setting(2.0, "passes over the data")
    learning_rate: float = setting(1e-6, "peak learning rate; cosine after a tenth of warmup")
    beta: float = setting(0.5, "how much a deviation from the reference costs")
    batch_size: int = setting(32, "pairs per update and device")
    micro_batch_size: int = setting(4, "pairs per backward pass")
    seed: int = setting(1337, "of the order of the data")

    def __post_init__(self) -> None:
        check_ranges(self, positive="batch_size micro_batch_size", above_zero="epochs beta")


def as_messages(row: dict, place: str, special: list[str]) -> dict[str, list]:
    """Returns a pair as two conversations. Raises `ValueError` for another row, or one with a special token."""
    pair = {"chosen": row.get("chosen"), "rejected": row.get("rejected")}
    if found := [token for token in special if token in str(row)]:
        raise ValueError(f"{place} holds the special token {found[0]}: remove it")
    if all(isinstance(text, str) for text in (*pair.values(), row.get("prompt"))):
        asked = user_turn(row["prompt"])
        return {n: [*asked, {"role": "assistant", "content": text}] for n, text in pair.items()}
    if all(isinstance(messages, list) and messages for messages in pair.values()):
        return pair
    raise ValueError(f"{place} has {', '.join(row)}, no pair: write prompt, chosen, rejected")


def main() -> None:
    config = parse_config(ChatDPO)
    try:
        from datasets import Dataset, load_dataset
        from transformers import AutoModelForCausalLM
        from trl import DPOConfig, DPOTrainer
    except ImportError as error:
        raise ValueError(f"DPO needs TRL ({error}): pip install 'trl>=1.16'") from error
    directory, folder = local_directory(verified_directory(config.model)), Path(config.output_dir)
    tokenizer, shape = load_tokenizer(directory), read_config(directory)
    prompt_tokens(tokenizer, user_turn("Hi"))  # raises without a chat template
    if config.data.endswith(".jsonl"):
        items = read_items(config.data)
    else:
        with reading(config.data):
            rows = load_dataset(config.data, split="train")
        items = [Item(f"row {number} of {config.data}", row) for number, row in enumerate(rows)]
    special, device = special_tokens(tokenizer), best_device().type
    pairs = [as_messages(item.fields, item.place, special) for item in items]
    settings = DPOConfig(
        str(folder / "trl"),
        num_train_epochs=config.epochs,
        beta=config.beta,
        seed=config.seed,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # a share
        max_length=shape.n_positions,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=max(1, config.batch_size // config.micro_batch_size),
        gradient_checkpointing=False,
        bf16=device == "cuda",
        logging_steps=1,
        report_to=[],
    )
    trainer = DPOTrainer(
        # The reference is given: TRL would load it again by the name in the config.
        *(AutoModelForCausalLM.from_pretrained(directory, dtype="float32") for _ in range(2)),
        settings,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    found = trainer.train(any((folder / "trl").glob("checkpoint-*"))).metrics
    trainer.save_model()
    if trainer.is_world_process_zero():
        state, log = trainer.state, JsonLines(folder / "metrics.jsonl", 0)
        for line in state.log_history:
            log.write({n if n == "step" else f"train/{n}": value for n, value in line.items()})
        figures = int(state.num_input_tokens_seen), found["train_runtime"] / 3600, state.total_flos
        figures += device, {"train/loss": found["train_loss"]}
        training = Training(asdict(config), config.data, *figures)
        save_pretrained(from_pretrained(folder / "trl"), folder, tokenizer, training=training)
        print(f"The model is in {folder}.")


if __name__ == "__main__":
    cli.run(main)
