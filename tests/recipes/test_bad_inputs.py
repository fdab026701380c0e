"""Bad inputs to all recipes: each ends in one sentence that names the mistake, and nothing is written.

A row holds a recipe, its command line, words of the message, files of the working directory, and environment variables.
`{run}`, `{data}` and other names in braces are valid folders and files of the fixture `whole`.
"""

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import long, make_text, run, tiny_config
from launching import ROOT, launch, python

from gpt2_accel.data.prepare import prepare
from gpt2_accel.tokenizer import char_tokenizer

TEXT = make_text(400, 0)
DEEP = "[" * 100_000
BINARY = bytes(range(256)) * 40
CHARS = ("shakespeare_char", "shakespeare_fast", "finetune_shakespeare")
SMALL = (
    "--n_layer 2 --n_head 2 --n_embd 32 --n_positions 32 --micro_batch_size 4 --total_batch_size 128 "
    "--max_steps 8 --eval_every 0 --sample_every 0 --save_every 0 --resume_from latest "
)


class Copy(NamedTuple):
    """A copy of a valid folder of the fixture `whole`, which the row damages."""

    name: str


class Row(NamedTuple):
    """`files` are written in order: text, bytes, a `Copy`, or None to remove a file of a copy."""

    recipe: str
    arguments: str
    words: str
    files: Mapping[str, str | bytes | Copy | None] = MappingProxyType({})
    env: Mapping[str, str] = MappingProxyType({})


# Settings of a training run


def settings() -> Iterator[Row]:
    """One for each recipe, and what `tests/test_config.py` leaves out."""
    for recipe, arguments, words in (
        ("quickstart", "--learning_rate nan", "learning_rate must be a finite number"),
        ("pretrain_124m", "--learning_rate", "expected one argument"),
        ("pretrain_124m", "--n_layer 0", "n_layer must be at least 1"),
        ("pretrain_355m", "--dropout 1", "dropout must be at least 0 and below 1"),
        ("pretrain_355m", "--n_embd 0", "n_embd must be at least 1"),
        ("pretrain_774m", "--max_steps 2.5", "--max_steps: '2.5' is no whole number"),
        ("pretrain_774m", "--sequence_length 0", "sequence_length must be at least 1"),
        ("pretrain_1558m", "--micro_batch_size many", "micro_batch_size"),
        ("pretrain_1558m", "--total_batch_size 0", "total_batch_size must be at least 1"),
        ("shakespeare_char", "--beta2 nan", "beta2 must be a finite number"),
        ("shakespeare_char", "--max_step 5", "--max_step: did you mean --max_steps?"),
        ("shakespeare_fast", "--hub_strategy never", "hub_strategy must be one of"),
        ("finetune_shakespeare", "--bias perhaps", "bias"),
        ("quickstart", "word", "word"),
        ("quickstart", "--data_dir ''", "data_dir is empty: give the path of a folder"),
        ("quickstart", "--data_dir mien", "mien holds no prepared data: make it by"),
    ):
        yield Row(recipe, arguments, words)


def config_files() -> Iterator[Row]:
    for recipe, content, words in (
        ("quickstart", BINARY, "c.yaml is not valid YAML: "),
        (
            "quickstart",
            "dry_run: true",
            "c.yaml has dry_run, which is no setting: give it as --dry_run",
        ),
        ("quickstart", "compute_environment: x", "c.yaml is a launch config, not settings"),
        ("quickstart", "&a [*a]", "`name: value` lines"),
        ("quickstart", "sample_prompts: once", "c.yaml: sample_prompts is 'once'"),
        ("pretrain_124m", "beta2: 2", "beta2 must be"),
        ("shakespeare_char", "input: [a]", "c.yaml: input is ['a']"),
        ("sample", "top_k: many", "c.yaml: top_k is 'many', expected int"),
        ("sample", "temperature: .inf", "temperature must be"),
        ("evaluate", "tasks: 5", "c.yaml: tasks is 5"),
        ("import_checkpoint", "input: a.pt", "required: --output_dir"),
        ("push_to_hub", "repo_id: a/b", "required: --model"),
    ):
        yield Row(recipe, "--config c.yaml", words, {"c.yaml": content})
    yield Row("quickstart", "--config .", "there is no such file")
    yield Row("quickstart", "--config", "--config: expected one argument")


def environment() -> Iterator[Row]:
    tiny = "--data_dir {data} --output_dir run " + SMALL
    for env, words in (
        ({"GPT2_ACCEL_DEVICE": "{"}, "GPT2_ACCEL_DEVICE is not JSON"),
        ({"ACCELERATE_MIXED_PRECISION": "fp7"}, "Unknown mixed_precision mode: fp7"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "Accelerate has no fp16 for the device 'cpu'"),
        ({"ACCELERATE_DYNAMO_BACKEND": "faster"}, "the Accelerate config cannot be used here"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, "gradient_accumulation_steps is set"),
        ({"ACCELERATE_USE_CPU": "perhaps"}, "invalid truth value perhaps"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but Accelerate has num_processes 1"),
    ):
        yield Row("pretrain_124m", tiny, words, {}, env)
    yield Row("speed_ladder", "", "start it with python", {}, {"WORLD_SIZE": "2"})
    yield Row("demo", "--model {run} --port 99999", "port must be between 1 and 65535")


# Folders that a training run reads and writes


def folders() -> Iterator[Row]:
    tiny = "--data_dir {data} " + SMALL
    for recipe, arguments, words in (
        ("pretrain_124m", tiny + "--n_embd 2000000000", "lower --n_layer, --n_embd"),
        ("pretrain_355m", tiny + "--n_layer 100000000000", "lower --n_layer, --n_embd"),
        ("pretrain_774m", tiny + "--n_positions 100000000000", "lower --n_layer, --n_embd"),
        ("pretrain_124m", tiny + "--n_head 3", "n_embd (32) is not divisible by n_head (3)"),
        ("pretrain_124m", tiny + "--sequence_length 64", "exceeds n_positions"),
        ("pretrain_124m", tiny + "--total_batch_size 100", "a multiple of"),
        (
            "pretrain_124m",
            tiny + "--ramp_tokens 512",
            "--ramp_tokens, which was taken back: every update",
        ),
        ("pretrain_124m", tiny + "--report_to mlflow", "unknown tracker 'mlflow'"),
        (
            "pretrain_124m",
            tiny + "--report_to wandb,trackio",
            "choose from wandb, tensorboard, trackio, with spaces",
        ),
        ("pretrain_124m", tiny + "--push_to_hub name", "'name' is not a name for a Hub"),
        ("pretrain_124m", tiny + "--push_to_hub user/name", "needs a login: run `hf auth login`"),
        ("pretrain_124m", tiny + "--push_to_hub 'not a name'", "'not a name' is not a name"),
        ("pretrain_124m", tiny + "--resume_from nowhere", "nowhere"),
        ("pretrain_124m", tiny + "--resume_from nobody/none", "nobody/none"),
        ("pretrain_124m", tiny + "--init_from nowhere", "nowhere"),
        ("pretrain_124m", tiny + "--init_from nobody/none", "nobody/none"),
        ("pretrain_124m", tiny + "--init_from {data}", "config.json is missing"),
        ("pretrain_124m", tiny + "--hellaswag_every 4 --hellaswag_data x.jsonl", "x.jsonl"),
        ("pretrain_124m", tiny + "--hellaswag_every 4", "give --hellaswag_data FILE"),
        ("pretrain_124m", tiny + "--output_dir {text}", "{text}"),
        ("pretrain_124m", tiny + "--output_dir {text}/run", "{text}"),
        ("pretrain_124m", tiny + "--output_dir /proc/run", "/proc/run"),
        ("pretrain_124m", SMALL + "--data_dir nowhere", "prepare_data.py text"),
        ("pretrain_355m", SMALL + "--data_dir nowhere/fineweb_edu", "prepare_data.py fineweb-edu"),
        ("pretrain_124m", SMALL + "--data_dir {text}", "{text}"),
        ("pretrain_124m", SMALL + "--data_dir {model}", "manifest.json is missing"),
        ("pretrain_124m", SMALL + "--data_dir {chars} --document_mask", "document_mask"),
        ("pretrain_124m", SMALL + "--data_dir {chars} --init_from {model}", "vocabulary"),
        ("quickstart", "--data_dir {text}", "prepare_data.py text"),
        ("quickstart", "--data_dir {data} --vocab_size -1", "with a vocabulary of 257, not -1"),
        ("shakespeare_char", "--input none.txt", "none.txt"),
        ("shakespeare_char", "--input {data}", "{data}"),
        ("shakespeare_fast", "--input none.txt", "none.txt"),
        ("finetune_shakespeare", "--input none.txt", "none.txt"),
        ("finetune_shakespeare", "--input {text} --init_from nowhere", "nowhere"),
        ("finetune_shakespeare", "--input {text} --init_from {text}", "{text}"),
        ("finetune_shakespeare", "--input {text} --init_from nobody/none", "nobody/none"),
        *((name, "--input {play} --data_dir {chars}", "made from another text") for name in CHARS),
    ):
        yield Row(recipe, arguments, words)
    for content, words in ((b"", "x.txt is empty"), (TEXT.encode("utf-16"), "x.txt")):
        yield Row("shakespeare_char", "--input x.txt", words, {"x.txt": content})


def data() -> Iterator[Row]:
    train = SMALL + "--data_dir d --output_dir run "
    for changes, words in (
        ({"manifest.json": DEEP}, "not a readable manifest"),
        ({"manifest.json": '{"format": "other", "version": 1}'}, "is 'other' version 1"),
        ({"manifest.json": '{"format": "gpt2_accel token shards", "version": 9}'}, "version 9"),
        ({"manifest.json": '{"format": "gpt2_accel token shards", "version": 1}'}, "is damaged"),
        ({"train_000000.bin": BINARY}, "train_000000.bin"),
        ({"tokenizer/tokenizer.json": None}, "tokenizer"),
        ({"tokenizer/tokenizer.json": DEEP}, "tokenizer"),
    ):
        files = {"d": Copy("data"), **{f"d/{name}": content for name, content in changes.items()}}
        yield Row("pretrain_124m", train, words, files)
    yield Row("pretrain_124m", train + "--n_positions 100000", "tokens", {"d": Copy("data")})
    long = train + "--eval_every 2 --n_positions 1000 --total_batch_size 4000"
    yield Row("pretrain_124m", long, "val", {"d": Copy("data")})
    for recipe in ("evaluate --model {run}", "prepare_data --verify", "prepare_data "):
        name, _, arguments = recipe.partition(" ")
        files = {"d": Copy("data"), "d/train_000000.bin": BINARY}
        yield Row(name, arguments + " --data_dir d", "train_000000.bin", files)


def checkpoints() -> Iterator[Row]:
    train = SMALL + "--data_dir {data} --output_dir run --resume_from c "
    for changes, words in (
        ({"model.safetensors": BINARY}, "model.safetensors"),
        ({"training_state/manifest.json": DEEP}, "manifest"),
        ({"tokenizer.json": "{}"}, "tokenizer.json"),
    ):
        files = {"c": Copy("checkpoint"), **{f"c/{name}": text for name, text in changes.items()}}
        yield Row("pretrain_124m", train, words, files)
    yield Row(
        "pretrain_124m",
        train + "--n_layer 3",
        "holds n_layer 2, but the settings say n_layer 3: ",
        {"c": Copy("checkpoint")},
    )
    resume = SMALL + "--data_dir {data} --output_dir run --resume_from {model}"
    folder = resume.replace("{model}", "{run}")
    yield Row("pretrain_124m", folder, "{run} is not a checkpoint of this toolkit")
    yield Row("pretrain_124m", resume, "{model} is not a checkpoint of this toolkit")


# Models


def models() -> Iterator[Row]:
    uses = {  # the demo has few rows, since importing Gradio is slow
        "sample": "--model m",
        "evaluate": "--model m --tasks text --data {text}",
        "finetune_shakespeare": "--init_from m --input {text}",
        "push_to_hub": "--model m --repo_id a/b",
    }
    faults: list[tuple[dict[str, Any], str]] = [
        ({"config.json": None}, "m"),
        ({"config.json": "{"}, "JSON"),
        ({"config.json": DEEP}, "JSON"),
        ({"config.json": BINARY}, "m"),
        ({"config.json": '{"model_type": "mistral"}'}, "is of the type 'mistral'"),
        ({"config.json": '{"model_type": "gpt2", "n_layer": "two"}'}, "n_layer"),
        ({"config.json": '{"model_type": "gpt2", "n_layer": -1}'}, "n_layer must be"),
        ({"config.json": '{"model_type": "gpt2", "n_inner": 5}'}, "n_inner"),
        ({"config.json": '{"model_type": "gpt2", "n_embd": 76800000}'}, "m"),
        ({"model.safetensors": None}, "m"),
        ({"model.safetensors": b""}, "m"),
        ({"model.safetensors": BINARY}, "m"),
    ]
    for number, (changes, words) in enumerate(faults):
        files = {"m": Copy("model"), **{f"m/{name}": content for name, content in changes.items()}}
        recipes = list(uses)[:-1] if "model.safetensors" in changes else list(uses)
        recipe = recipes[number % len(recipes)]
        yield Row(recipe, uses[recipe], words, files)
    for recipe, content in (("sample", None), ("evaluate", "{"), ("finetune_shakespeare", DEEP)):
        files = {"m": Copy("model"), "m/tokenizer.json": content}
        yield Row(recipe, uses[recipe], "tokenizer", files)
    yield Row("sample", uses["sample"], "m", {"m": TEXT})
    for recipe, arguments in uses.items():
        yield Row(recipe, arguments, "m")


def sampling() -> Iterator[Row]:
    for arguments, words in {
        "--temp 1": "--temp: did you mean --temperature?",
        "--fp16": "--fp16: did you mean --dtype?",
        "--device cpu": "--device: it runs on the GPU if there is one",
        "{run}": "{run}: did you mean --model {run}?",
        "--top_p 2": "top_p must be above 0",
        "--dtype float8": "dtype must be one of float32, bfloat16",
        "--model {chars_model} --prompt \N{SNOWMAN}": "\N{SNOWMAN}",
        "--model {chars_model}": "prompt",
        "--model openai-community/gpt2": "openai-community/gpt2",
    }.items():
        yield Row("sample", "--model {run} " + arguments, words)


# The other recipes


def evaluation() -> Iterator[Row]:
    for arguments, words in {
        "--tasks reading": "reading",  # no task, or lm-evaluation-harness is not installed
        "--lm_eval arc_easy": "--lm_eval: did you mean --tasks?",
        "--tasks text": "the task text has no data on the Hub",
        "--tasks text --data none.txt": "none.txt",
        "--tasks text --data {data}": "{data}",
        "--tasks hellaswag --data lambada=x": "is for none of the --tasks",
        "--tasks hellaswag text --data x": "write TASK=FILE",
        "--tasks hellaswag": "give --data hellaswag=FILE",
        "--tasks hellaswag,text --data text={text}": "give --data hellaswag=FILE",
        "--batch_size 8": "--batch_size: --help lists",
        "--fp16": "the launch config sets the precision",
        "--limit 0": "limit must be at least 1",
        "--eval_tokens 0": "eval_tokens",
        "--tasks text --data {text} --stride 0": "stride must be between",
        "--tasks text --data {text} --stride 1000": "stride must be between",
        "--data_dir nowhere": "nowhere",
        "--data_dir {chars}": "tokenizer",
        "--update_card --model nowhere": "update_card needs a local --model",
        "--update_card --model {checkpoint}": "counts as damaged",
        "--baselines --tasks text --data {text}": "openai-community/gpt2",
        "--tasks text --data {text} --output {text}/x.json": "{text}",
        "--tasks text --data {text} --output {data}": "{data}",
    }.items():
        yield Row("evaluate", "--model {run} " + arguments, words)
    good = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}
    for task, content, words in (
        ("hellaswag", "{", "x.jsonl, line 1"),
        ("hellaswag", "{}", "x.jsonl, line 1 has no field 'ctx'"),
        ("hellaswag", json.dumps(good | {"label": 9}), "label"),
        ("text", '{"text": ""}', "text"),
    ):
        arguments = "--model {run} --data x.jsonl --tasks " + task
        yield Row("evaluate", arguments, words, {"x.jsonl": content})


def preparation() -> Iterator[Row]:
    for arguments, words in {
        "": "required: --data_dir",
        "--data_dir d": "manifest.json is missing",
        "cook x --data_dir d": "cook",
        "text --data_dir d": "required: PATH",
        "text {text}": "required: --data_dir",
        "text none.txt --data_dir d": "none.txt",
        "text {text} --data_dir d --colour red": "--colour",
        "text {text} --out d": "--out: did you mean --data_dir?",
        "text {text} --data-dir d": "--data-dir: did you mean --data_dir?",
        "text {text} --data_dir d --vocab 300": "--vocab: did you mean --vocab_size?",
        "text . --data_dir d": "d",
        "text {model} --pattern *.none --data_dir d": "{model}",
        "text {model} --pattern /a* --data_dir d": "the pattern '/a*' must match names below",
        "text {text} --data_dir d --tokenizer nowhere": "nowhere",
        "text {text} --data_dir d --tokenizer nobody/none": "nobody/none",
        "text {text} --data_dir d --tokenizer {data}": "{data}",
        "text {text} --data_dir d --tokenizer bpe --vocab_size 99999999999": "vocab_size",
        "text {text} --data_dir d --vocab_size 9": "--vocab_size is for --tokenizer bpe",
        "text {text} --data_dir d --tokenizer bpe --vocab_size 100": "vocab_size",
        "text {text} --data_dir d --tokenizer bytes --shard_tokens 0": "shard_tokens",
        "text {text} --data_dir d --tokenizer bytes --workers 0": "workers",
        "text {text} --data_dir d --tokenizer bytes --workers x": "workers",
        "text {text} --data_dir d --executor slurm": "taken back: datatrove's own pipelines",
        "text {text} --data_dir {data} --tokenizer bytes": "{data}",
        "text {text} --data_dir {model} --tokenizer bytes": "{model}",
        "text {text} --data_dir {text} --tokenizer bytes": "{text}",
        "text {text} --data_dir {text}/d --tokenizer bytes": "{text}",
        "text {text} --data_dir /proc/d --tokenizer bytes": "/proc",
        "shakespeare --data_dir d --input none.txt": "none.txt",
        "shakespeare-char --data_dir d --input none.txt": "none.txt",
        "hf nobody/none --data_dir d --tokenizer bytes": "nobody/none",
        "hf --data_dir d": "required: NAME",
        "fineweb-edu --data_dir d --tokenizer bytes": "fineweb-edu",
        "mix --data_dir d": "required: DATA_DIR=WEIGHT",
        "mix {data} --data_dir d": "{data}",
        "mix {data}=abc --data_dir d": "abc",
        "mix {data}=0 --data_dir d": "weights must be positive",
        "mix {data}=inf --data_dir d": "weight",
        "mix nowhere=1 --data_dir d": "nowhere",
        "mix {data}=1 {chars}=1 --data_dir d": "tokenizer",
        "mix {data}=1 --data_dir {data}": "{data}",
        "mix {data}=1 {data}=2 --data_dir d": "is named twice",
        "--verify --data_dir nowhere": "nowhere",
        "--data_dir {text}": "{text}",
    }.items():
        yield Row("prepare_data", arguments, words)
    table = pyarrow.table({"text": [make_text(50, seed) for seed in range(50)]})
    pyarrow.parquet.write_table(table, sink := pyarrow.BufferOutputStream())
    parquet = sink.getvalue().to_pybytes()
    flipped = parquet[:200] + bytes(byte ^ 255 for byte in parquet[200:400]) + parquet[400:]
    packed = gzip.compress(b'{"text": "a"}\n' * 1000)
    for name, content, words in (
        ("x.jsonl", '{"text": "a"}\n[1, 2]\n', "x.jsonl, line 2, holds"),
        ("x.jsonl", "", "x.jsonl"),
        ("x.jsonl.gz", packed[: len(packed) // 2], "x.jsonl.gz"),
        ("x.parquet", flipped, "x.parquet"),
        ("x.txt", "", "x.txt"),
        ("x.pdf", b"%PDF-1.7\n" + BINARY, "x.pdf"),
    ):
        arguments = f"text {name} --data_dir d --tokenizer bytes --workers 1"
        yield Row("prepare_data", arguments, words, {name: content})


def chat() -> Iterator[Row]:
    for arguments, words in (
        ("--data_dir {data}", "{data} holds text, not conversations: prepare some by"),
        ("--data_dir nowhere", "nowhere holds no prepared conversations: give a file by --data"),
        ("--data {text}", "--data needs the model to fine-tune: give it by --model"),
        (
            "--data none.jsonl --model {model}",
            "none.jsonl is no file: give a file of conversations",
        ),
        ("--data_dir {text}", "holds no prepared conversations"),
        ("--epochs 0", "epochs must be above 0"),
        ("--epochs inf", "epochs must be a finite number"),
    ):
        yield Row("chat_sft", arguments, words)
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    good = "".join(json.dumps({"messages": said}) + "\n" for _ in range(3))
    usual = "--model {model} --sequence_length 32"
    for content, options, words in (
        (
            '{"question": "Why?"}',
            usual,
            "r.jsonl, line 1, has the fields question, but a conversation",
        ),
        ("[1]", usual, "r.jsonl, line 1, holds a value of type list, not an object"),
        ("not json", usual, "r.jsonl, line 1, is not valid JSON"),
        ("", usual, "holds no conversation for the split 'train'"),
        (good, "--model {model} --sequence_length 9", "3 conversations of more tokens than"),
        (good, "--model {model} --sequence_length 999", "exceeds the 32 positions"),
        (good, "--model {data} --sequence_length 32", "is not a Hugging Face model"),
        (good, "--model {chars_model} --sequence_length 32", "cannot be trained with, since"),
        (good, usual + " --split test", "--split is for a data set of several files"),
        (good, "--sequence_length 32", "required: --model"),
    ):
        yield Row(
            "prepare_data", f"chat r.jsonl {options} --data_dir d", words, {"r.jsonl": content}
        )
    yield Row("prepare_data", f"chat none.jsonl {usual} --data_dir d", "none.jsonl does not exist")
    for arguments, words in (
        ("--functions 0", "functions must be at least 1"),
        ("--functions 1 --invented 9000 --output d", "1 functions have too few words for 9,150"),
        ("--functions 99999", "functions with a short docstring: lower --functions"),
    ):
        yield Row("python_conversations", arguments, words)
    arguments = "--functions 9 --invented 1 --output ."
    yield Row("python_conversations", arguments, "other questions", {"train.jsonl": "mine\n"})
    for arguments, words in (
        ("--model nowhere --data r.jsonl", "nowhere"),
        ("--model {model} --data r.jsonl", "has no chat template"),
        ("--beta 0", "beta must be above 0"),
    ):
        yield Row("chat_dpo", arguments, words)
    for arguments, words in (
        ("--tasks chat", "the task chat has no data on the Hub: give --data chat=FILE"),
        ("--tasks chat --data r.jsonl", "has no chat template"),
    ):
        yield Row(
            "evaluate",
            "--model {model} " + arguments,
            words,
            {"r.jsonl": '{"prompt": "a", "answer": "b"}'},
        )
    yield Row("sample", "--model {model} --chat true --prompt a", "has no chat template")
    study = {"s.yaml": "recipe: quickstart\nvariants: {a: {}}"}
    for arguments, words in (
        ("none.yaml", "none.yaml: there is no such file"),
        ("s.yaml --storage study.db", "storage must be postgresql://USER@HOST/NAME"),
        ("s.yaml --processes 0", "processes must be at least 1"),
        ("--output_dir d", "the following arguments are required: --study"),
    ):
        yield Row("compare", arguments, words, study)
    budget = "--data_dir {data} --budgets 1e12"
    for arguments, words in (
        ("--budgets 1e12", "the following arguments are required: --data_dir"),
        ("--data_dir {data}", "the following arguments are required: --budgets"),
        ("--data_dir {data} --budgets 0", "budgets must be above 0"),
        ("--data_dir nowhere --budgets 1e12", "nowhere"),
        (budget + " --architecture bert", "architecture must be one of"),
        (budget, "times: prepare more text, change --budgets, or raise --max_epochs"),
    ):
        yield Row("scaling_laws", arguments, words)
    yield Row("quickstart", "--data_dir {data} --law none.json", "none.json: there is no such file")
    yield Row("prepare_data", f"chat {{text}} {usual} --data_dir d", "holds no conversations")


def the_rest() -> Iterator[Row]:
    for recipe, arguments, words in (
        ("report", "", "required: RUN"),
        ("report", "nowhere", "nowhere"),
        ("report", "{data}", "{data}"),
        ("report", "{text}", "{text}"),
        ("report", "{run} --output_dir {text}", "{text}"),
        ("report", "{run} --colour red", "--colour"),
        ("report", "{run} --out d", "--out: did you mean --output_dir?"),
        ("import_checkpoint", "--input x.pt", "required: --output_dir"),
        ("import_checkpoint", "--input none.pt --output_dir m --tokenizer none", "none.pt"),
        ("import_checkpoint", "--input {data} --output_dir m --tokenizer none", "{data}"),
        ("import_checkpoint", "--input {text} --output_dir m --tokenizer none", "{text}"),
        ("import_checkpoint", "--input {text} --output_dir m --tokenizer nowhere", "nowhere"),
        ("import_checkpoint", "--input {text} --output_dir ''", ". exists already"),
        ("import_checkpoint", "--input {text} --output_dir {model}", "{model} exists already"),
        ("export", "--model {run}", "--output"),
        ("export", "--model nowhere --output x.gguf", "nowhere"),
        ("export", "--model {run} --output {text}", "{text} exists already"),
        ("export", "--model {run} --output {text}/x.gguf", "{text} is a file, not a folder"),
        (
            "export",
            "--model {run} --output x --dtype q4_0",
            "dtype must be one of f32, f16, bf16, q8_0",
        ),
        ("export", "--model {run} --output x/", "output is the path of a file to write"),
        ("export", "--model {run} --output x.onnx", "write ONNX by optimum-cli export onnx"),
        ("demo", "--model m", "m"),
        ("push_to_hub", "--model {run}", "required: --repo_id"),
        ("push_to_hub", "--model {run} --repo_id 'not a name'", "'not a name'"),
        ("speed_ladder", "--size huge", "there is no size 'huge'"),
        ("speed_ladder", "--steps 0", "steps must be at least 1"),
        ("speed_ladder", "--micro_batch_size 0", "micro_batch_size must be at least 1"),
        ("speed_ladder", "--size tiny --output_dir {text}", "{text}"),
    ):
        yield Row(recipe, arguments, words)
    header = np.array([20240326, 3, 64, 257, 2, 2, 32, 384], "<i4")
    for name, content, words in (
        ("x.pt", b"", "x.pt"),
        ("x.bin", BINARY, "x.bin"),
        ("x.bin", header.tobytes(), "llm.c's header"),
    ):
        arguments = f"--input {name} --output_dir m --tokenizer none"
        yield Row("import_checkpoint", arguments, words, {name: content})


SECTIONS = (
    *(settings, config_files, environment, folders, data, checkpoints, models, sampling),
    *(evaluation, preparation, chat, the_rest),
)
ROWS = [row for section in SECTIONS for row in section()]


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """Valid folders and files by name."""
    folder = tmp_path_factory.mktemp("whole")
    texts = {"train": [TEXT] * 3, "val": [TEXT]}
    prepare(texts, char_tokenizer(TEXT), folder / "chars", source="characters")
    shutil.copytree(data_dir, folder / "data")
    run(tiny_config(folder / "data", folder / "run", max_steps=2, save_every=1))
    run(tiny_config(folder / "chars", folder / "chars_model", max_steps=1))
    shutil.copytree(folder / "run" / "checkpoint-1", folder / "checkpoint")
    (folder / "model").mkdir()
    own = {"run.json", "status.json"}
    for path in folder.joinpath("run").iterdir():
        if path.suffix in (".json", ".safetensors") and path.name not in own:
            shutil.copy(path, folder / "model")
    (folder / "text").write_text(TEXT)
    (folder / "play").write_text(make_text(300, 1))
    return {path.name: path for path in folder.iterdir()}


def lay_out(files: dict, folder: Path, whole: dict[str, Path]) -> None:
    """Writes the files of a row."""
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink()
        elif isinstance(content, Copy):
            shutil.copytree(whole[content.name], path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def everything(*folders: Path) -> dict[str, tuple[int, int]]:
    """Returns all paths below the folders, with their modification times and sizes."""
    found = [path for folder in folders for path in sorted(folder.rglob("*"))]
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in found}


def check(row: Row, command: Callable, whole: dict[str, Path], folder: Path) -> None:
    """Runs a row's command in a folder, and checks its message, its exit code and that no path has changed."""
    lay_out(row.files, folder, whole)
    names = {name: str(path) for name, path in whole.items()}
    arguments = [part.format(**names) for part in shlex.split(row.arguments)]
    root = whole["data"].parent
    before = everything(folder, root)
    done = command(ROOT / "recipes" / f"{row.recipe}.py", *arguments, cwd=folder, **row.env)
    words = re.sub(r"{(\w+)}", lambda name: names[name[1]], row.words)
    assert done.returncode >= 1, done
    *progress, line = done.stderr.splitlines()
    assert all(
        re.match(r"about [\d.]+ (bytes|kB|MB) of text, |tokenizing the", text) for text in progress
    ), done.stderr
    assert line.startswith(f"{row.recipe}.py: ") and words in line
    assert everything(folder, root) == before


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.recipe} {row.arguments}"[:70].strip())
def test_a_bad_input_prints_one_sentence_and_writes_nothing(row, whole, tmp_path):
    check(row, python, whole, tmp_path)


def test_the_table_covers_all_recipes():
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert {row.recipe for row in ROWS} == recipes


# One row of each kind: a setting, a config file, a folder, data, a checkpoint, a model, a text, each launched recipe.
LAUNCHED = (
    "quickstart --learning_rate nan",
    "quickstart --data_dir {data} --vocab_size -1",
    "shakespeare_char --beta2 nan",
    "shakespeare_char --config c.yaml",
    "shakespeare_fast --input none.txt",
    "finetune_shakespeare --input {text} --init_from nowhere",
    "evaluate --model {run} --tasks reading",
    "evaluate --model {run} --data_dir {chars}",
    "sample --model {run} --top_p 2",
    "pretrain_124m " + SMALL + "--data_dir nowhere",
    "pretrain_124m " + SMALL + "--data_dir d --output_dir run",
    "pretrain_124m " + SMALL + "--data_dir {data} --output_dir run --resume_from c --n_layer 3",
)


@long
@pytest.mark.parametrize("command", LAUNCHED, ids=lambda command: command[:40])
def test_bad_inputs_under_the_launcher(command, whole, tmp_path):
    """`tests/cli/test_run.py` always tests one of them, with one and with several processes."""
    name, _, arguments = command.partition(" ")
    row = next(row for row in ROWS if (row.recipe, row.arguments.strip()) == (name, arguments))
    check(row, partial(launch, launcher=True), whole, tmp_path)
