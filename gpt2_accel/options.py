"""What to say about an option that does not exist: the one that is meant, or that the launch config sets it."""

import argparse
import difflib
import os
from collections.abc import Collection, Iterable

from gpt2_accel.recipe_command import folder

# Option -> its names in nanoGPT, Hugging Face's libraries, litgpt and elsewhere. The first option that a command has is
# meant.
OTHER_NAMES = {
    "learning_rate": "lr max_lr peak_lr learningrate",
    "min_lr_ratio": "min_lr lr_min final_lr",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler schedule decay_lr",
    "warmup_steps": "warmup warmup_iters warmup_ratio lr_warmup_steps num_warmup_steps",
    "max_steps": "steps iters iterations max_iters num_steps train_steps lr_decay_iters epochs num_epochs max_epochs "
    "num_train_epochs max_tokens train_tokens",
    "micro_batch_size": "batch batch_size bs device_batch_size train_batch_size per_device_train_batch_size",
    "total_batch_size": "global_batch_size gradient_accumulation_steps grad_accum grad_accum_steps accumulation_steps",
    "optimizer": "optim",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "weight_decay": "wd",
    "max_grad_norm": "grad_clip clip clip_grad_norm max_norm gradient_clip_val",
    "n_layer": "layers num_layers num_hidden_layers",
    "n_head": "heads num_heads num_attention_heads",
    "n_embd": "dim d_model width embed_dim embedding_dim emb_dim hidden_dim hidden_size n_embed",
    "n_positions": "block_size context context_length ctx n_ctx max_position_embeddings",
    "sequence_length": "seq_len seq_length max_seq_len max_seq_length context_length block_size",
    "checkpoint_activations": "gradient_checkpointing grad_checkpointing activation_checkpointing",
    "eval_every": "eval_interval eval_steps eval_strategy evaluation_strategy val_every",
    "eval_tokens": "eval_iters eval_batches max_eval_samples",
    "log_every": "log_interval logging_steps logging_strategy",
    "save_every": "save_interval save_steps save_strategy checkpoint_every ckpt_interval always_save_checkpoint",
    "keep_last": "save_total_limit keep_checkpoints",
    "keep_best": "load_best_model_at_end save_best",
    "patience": "early_stopping early_stopping_patience",
    "report_to": "wandb wandb_log wandb_project use_wandb tensorboard logger logger_name trackers",
    "push_to_hub": "hub_model_id hub_repo repo_id",
    "repo_id": "hub_model_id push_to_hub repo repo_name name",
    "max_new_tokens": "n_tokens num_tokens tokens length max_length max_tokens n_predict",
    "temperature": "temp t",
    "num_samples": "n samples num_return_sequences",
    "prompt": "text start input prompts",
    "output": "o out outfile output_file output_path output_dir out_dir save_to",
    "output_dir": "o out output out_dir save_dir save_path run_name checkpoint_path logging_dir",
    "model": "ckpt checkpoint checkpoint_dir model_path model_dir model_name model_name_or_path pretrained init_from "
    "path run run_dir out_dir output_dir",
    "init_from": "model model_name model_name_or_path pretrained initial_checkpoint_dir load from_pretrained",
    "resume_from": "resume ckpt checkpoint checkpoint_dir resume_from_checkpoint",
    "data_dir": "data dataset dataset_name dataset_path data_path train_data train_file train_data_dir output output_dir "
    "out out_dir o",
    "data": "file files items",
    "tasks": "task benchmark benchmarks lm_eval",
    "limit": "max_items num_examples n max_samples",
    "dtype": "precision fp16 bf16 half torch_dtype quantization quantize quant type outtype q",
    "format": "to",
    "workers": "num_proc num_workers processes nproc jobs j threads",
    "column": "text_column text_field field text_key key",
    "pattern": "glob include extension ext",
    "shard_tokens": "shard_size tokens_per_shard",
    "vocab_size": "vocab n_vocab num_merges",
    "split": "subset",
    "seed": "random_seed manual_seed",
    "input": "text text_file file ckpt checkpoint model path",
}

# The same for the commands of `gpt2-accel`.
OTHER_COMMANDS = {
    "launch": "train run pretrain finetune",
    "sample": "generate chat complete infer inference",
    "demo": "serve web ui app",
    "prepare-data": "tokenize data download preprocess",
    "push": "upload",
    "export": "convert",
    "report": "plot show",
    "average-checkpoints": "merge soup",
}

# What the launch config sets, its names in other programs, a shipped config, and an option of `accelerate launch`.
LAUNCH = (
    ("the precision", "fp16 half amp", "1xt4_fp16", "--mixed_precision fp16"),
    ("the precision", "bf16 precision mixed_precision dtype", "1xgpu", "--mixed_precision bf16"),
    ("the device", "cpu use_cpu no_cuda", "cpu", "--cpu"),
    ("the device", "device cuda gpu use_cuda accelerator backend", "1xgpu", ""),
    ("the device", "mps", "mps", ""),
    (
        "the number of processes",
        "gpus n_gpu n_gpus num_gpus devices num_devices num_processes nproc nproc_per_node world_size ddp multi_gpu",
        "8xa100",
        "--num_processes N",
    ),
    ("the number of machines", "nodes nnodes num_nodes num_machines", "2x8xa100", "--num_machines N"),
    ("compilation", "compile torch_compile dynamo_backend", "1xgpu", "--dynamo_backend inductor"),
    ("sharding", "fsdp use_fsdp deepspeed zero strategy", "8xa100_fsdp2", "--use_fsdp"),
    ("the hardware", "config_file", "cpu", ""),
)  # fmt: skip

# Options of earlier releases, and what to do instead.
DATATROVE = "datatrove's own pipelines tokenize on a cluster, and their output is a --data_dir (docs/data.md)"
REMOVED = {name: DATATROVE for name in ("executor", "slurm_partition", "slurm_time")}


def suggestion(word: str, names: Collection[str], dashes: str = "--") -> str:
    """Returns the hint that ends a message about an unknown option.

    `names` are the options that there are, written without dashes; `dashes` begin an option in the hint.
    """
    if not word.startswith("-") and "=" not in word and dashes:
        option = value_of(word, names)
        return f": did you mean --{option} {word}?" if option else ": an option begins with --"
    name = word.lstrip("-").split("=")[0].split(".")[-1].replace("-", "_").lower()
    if name in REMOVED and name not in names:
        return f", which was taken back: {REMOVED[name]}"
    others = [option for option, known in OTHER_NAMES.items() if name in known.split()]
    found = next((option for option in (name, *others) if option in names), None)
    if found is None and (launch := from_launch(name)):
        if "eval_tokens" in names:  # training and evaluation are launched
            return f": {launch}"
        if "dtype" in names:
            return ": it runs on the GPU if there is one, which CUDA_VISIBLE_DEVICES= hides"
    if found is None:
        found, *others = [option for option in names if option.startswith(name)] or [None]
        found = next(iter(difflib.get_close_matches(name, names, n=1)), None if others else found)
    return f": did you mean {dashes}{found}?" if found else ": --help lists the settings"


def value_of(word: str, names: Collection[str]) -> str | None:
    """Returns the option whose value a word without an option may be, None if none is likely."""
    if word.endswith((".yaml", ".yml")):
        return "config" if "config" in names else None
    likely = ("model", "input") if os.path.exists(word) else ("prompt",) if " " in word else ()
    return next((option for option in likely if option in names), None)


def from_launch(name: str) -> str | None:
    """Returns how the launch config sets what other programs call `name`; None if it does not."""
    for what, names, config, flag in LAUNCH:
        if name in names.split():
            path = os.path.relpath(folder("accelerate_configs") / f"{config}.yaml")
            or_flag = f", or {flag} before RECIPE" if flag else ""
            return f"the launch config sets {what}: accelerate launch --config_file {path} RECIPE{or_flag}"
    return None


def whole_number(text: str) -> int:
    """Parses a whole number. Raises `ArgumentTypeError`, with the number as digits if it is written as `1e3`."""
    try:
        return int(text)
    except ValueError as error:
        try:
            number = float(text.replace(",", ""))
            meant = f": write {int(number)}" if number.is_integer() else ""
        except ValueError:
            meant = ""
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number{meant}") from error


def check_separate(option: str, given: Iterable[str], choices: Collection[str]) -> None:
    """Raises `ValueError` if a value of an option that takes several joins some of `choices` by commas."""
    for value in given:
        parts = value.split(",")
        if len(parts) > 1 and {*parts} & {*choices}:
            raise ValueError(
                f"--{option} takes several with spaces between them: --{option} {' '.join(parts)}"
            )
