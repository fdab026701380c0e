"""Runs the commands of README.md and docs/ with flags for small models, and parses those of the recipes' headers."""

import inspect
import os
import re
import shlex
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import load_recipe, make_text, write_lines
from launching import ROOT, forked, free_port, launched

from gpt2_accel.cli.command import run as run_program
from gpt2_accel.config import TrainConfig, parse_config

ASSIGNMENT = re.compile(r"\w+=")
MODEL = "--n_layer 1 --n_head 2 --n_embd 16 --max_steps 2"
LOG = "--eval_tokens 256 --sample_tokens 2"
SMALL = f"{MODEL} {LOG} --n_positions 32 --micro_batch_size 2 --total_batch_size 128"
CHAT = f"--max_steps 2 --micro_batch_size 2 {LOG}"
CORPUS = "--workers 1 --tokenizer runs/mine --shard_tokens 2000"
# Command -> flags for a small model; later commands use the output of earlier ones.
LOCAL = {
    "python recipes/prepare_data.py text my_texts/ --tokenizer bpe --data_dir data/mine": (
        "--workers 1 --vocab_size 300"
    ),
    "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/quickstart.py "
    "--data_dir data/mine --output_dir runs/mine --sample_prompts 'Once upon a time'": SMALL,
    "python recipes/sample.py --model runs/mine --prompt 'Once upon a time'": "--max_new_tokens 3",
    "python recipes/prepare_data.py text my_texts/ more.jsonl.zst --data_dir data/mine": (
        f"--data_dir data/more {CORPUS}"
    ),
    "python recipes/prepare_data.py mix data/mine=0.3 data/fineweb_edu=0.7 --data_dir data/both": "",
    "python recipes/prepare_data.py --data_dir data/mine": "",
    "python recipes/prepare_data.py --verify --data_dir data/mine": "",
    "accelerate launch --config_file accelerate_configs/1xgpu.yaml recipes/shakespeare_char.py "
    "--config my_settings.yaml --learning_rate 5e-4 --optimizer muon": (
        f"{SMALL} --input my_texts/0.txt"
    ),
    "accelerate launch --config_file accelerate_configs/1xgpu.yaml recipes/shakespeare_char.py": (
        f"{SMALL} --input my_texts/0.txt --output_dir runs/shakespeare"
    ),
    "accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/pretrain_124m.py": SMALL,
    "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/ema.py --data_dir "
    "data/python_stdlib --config recipes/changes/small.yaml --output_dir runs/ema": SMALL,
    "python recipes/pretrain_124m.py --dry_run accelerate_configs/8xa100.yaml A100": "",
    "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/pretrain_124m.py --data_dir "
    "data/mine --output_dir runs/try --n_layer 2 --n_head 2 --n_embd 128 --n_positions 128 "
    "--micro_batch_size 4 --total_batch_size 2048 --max_steps 20 --warmup_steps 2 --eval_tokens 20480": (
        SMALL
    ),
    "ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 accelerate launch --multi_gpu --num_processes 2 "
    "recipes/quickstart.py": f"{MODEL} {LOG}",  # keeps the batch size
    "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/quickstart.py --architecture "
    "qwen3 --output_dir runs/qwen3": f"{MODEL} {LOG}",
    "accelerate launch --config_file accelerate_configs/cpu_bf16.yaml --dynamo_backend inductor "
    "recipes/pretrain_124m.py": f"{SMALL} --output_dir runs/bf16",
    "python recipes/sample.py --model runs/quickstart --prompt 'def ' --stop return --num_samples 1": (
        "--max_new_tokens 3"
    ),
    "python recipes/evaluate.py --model runs/quickstart --data_dir data/python_stdlib": (
        "--eval_tokens 256"
    ),
}
PROGRAM = {  # `gpt2-accel` runs the same recipes
    "gpt2-accel prepare-data text my_texts/ --tokenizer bpe --data_dir data/mine": (
        "--workers 1 --vocab_size 300 --data_dir data/program"
    ),
    "gpt2-accel launch cpu quickstart --data_dir data/mine --output_dir runs/mine --sample_prompts "
    "'Once upon a time'": f"{SMALL} --output_dir runs/program",
    "gpt2-accel sample --model runs/mine --prompt 'Once upon a time'": "--max_new_tokens 3",
    "gpt2-accel launch my.yaml pretrain-124m": f"{SMALL} --output_dir runs/mine_yaml",
}
# The Hub ids of OpenAI's four checkpoints.
BASELINES = [f"openai-community/gpt2{size}" for size in ("", "-medium", "-large", "-xl")]
# Commands that need the Hub; `tests/hf/test_hub.py` runs them with a local Hub.
ON_HUB = {
    "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/quickstart.py --push_to_hub "
    "USER/NAME --hub_strategy checkpoint": SMALL,
    "python recipes/push_to_hub.py --model runs/quickstart --repo_id USER/NAME": "",
    "accelerate launch recipes/evaluate.py --tasks hellaswag --data_dir data/openwebtext --model "
    f"{' '.join(BASELINES)}": "--limit 2 --eval_tokens 256",
    "python recipes/prepare_data.py chat my_chats.jsonl --model HuggingFaceTB/SmolLM2-135M "
    "--sequence_length 128 --data_dir data/chat": "",
    "python recipes/chat_sft.py --data_dir data/chat": CHAT,
    "python recipes/chat_dpo.py --model runs/chat_sft --data pairs.jsonl --batch_size 4 --epochs 10 "
    "--learning_rate 1e-5": "--epochs 0.2 --sample_every 0",
    "python recipes/sample.py --model runs/chat_dpo --chat true --prompt 'What is the capital of "
    "France?'": "--max_new_tokens 3",
    "python recipes/push_to_hub.py --model runs/chat_dpo --repo_id USER/NAME": "",
    "python recipes/prepare_data.py text my_texts/ --tokenizer data/chat/tokenizer --data_dir "
    "data/my_texts": "--workers 1",
    "python recipes/prepare_data.py mix data/chat=0.8 data/my_texts=0.2 --data_dir data/chat_and_text": "",
    "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/chat_sft.py --data_dir "
    "data/chat_and_text --output_dir runs/chat_and_text": CHAT,
    "python recipes/evaluate.py --model runs/chat_sft --tasks chat --data my_questions.jsonl --data_dir "
    "data/chat": "--limit 2 --eval_tokens 256",
}
SERVERS = (
    "transformers serve runs/quickstart --port 8000",
    "curl -N http://localhost:8000/v1/completions -H 'Content-Type: application/json' -d "
    """'{"prompt": "def ", "max_tokens": 64, "temperature": 0.8, "stream": true}'""",
    "llama-server -m quickstart.gguf --port 8080",
    "python -m llama_cpp.server --model quickstart.gguf --n_ctx 128 --port 8080",
    "ollama create quickstart -f Modelfile",
    "ollama run quickstart 'def '",
    "vllm serve runs/quickstart --port 8000",
)
FROM_HUB = "needs the Hub; tests/data/test_prepare.py prepares a data set of a local Hub"
NOT_RUN = {
    "python recipes/prepare_data.py fineweb-edu --data_dir data/fineweb_edu": FROM_HUB,
    "python recipes/prepare_data.py openwebtext --data_dir data/openwebtext": FROM_HUB,
    "python recipes/prepare_data.py hf roneneldan/TinyStories --data_dir data/stories": FROM_HUB,
    "accelerate launch recipes/evaluate.py --model USER/NAME --tasks core": "tests/evals/test_core.py does",
    "lm_eval --model hf --model_args pretrained=runs/quickstart,dtype=float32 --tasks "
    "lambada_openai,wikitext": "needs data sets; tests/recipes/test_evaluate.py runs local ones",
    "python recipes/evaluate.py --model runs/quickstart --tasks text --data my_text.txt --stride 64": (
        "tests/recipes/test_evaluate.py does"
    ),
    "python recipes/evaluate.py --model openai-community/gpt2 --tasks text --data ptb.test.txt": (
        "needs the Penn Treebank; tests/recipes/test_evaluate.py runs another text"
    ),
    "python recipes/prepare_data.py text my_texts/ --tokenizer google/gemma-3-270m --data_dir data/gemma": (
        "tests/models/test_any_model.py does, with a small model"
    ),
    "accelerate launch --config_file accelerate_configs/1xgpu.yaml recipes/finetune_shakespeare.py --init_from "
    "google/gemma-3-270m --data_dir data/gemma --output_dir runs/gemma --dropout 0": (
        "tests/models/test_any_model.py does, with a small model"
    ),
    "make quickstart": "installs, and trains for two minutes",
    "make chat": "trains for five minutes; tests/recipes/test_talking.py runs its parts",
    "python recipes/sample.py --model runs/moe --model_class recipes/changes/moe.py:MoE": (
        "tests/recipes/test_changes.py does"
    ),
    "python recipes/demo.py --model runs/chat_python": "tests/recipes/test_demo.py does",
    "git clone ADDRESS mine && cd mine": "needs the repository's address",
    "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/quickstart.py "
    "--output_dir runs/changed": "trains for two minutes",
    "python recipes/report.py runs/quickstart runs/changed": "tests/tools/test_report.py does",
    "make gpu PART=tests": "tests/benchmarks/test_gpu.py does",
    "pip install git+ADDRESS": "installs",
    "pip wheel --no-deps --wheel-dir dist .": "tests/test_install.py does",
    "pip install dist/gpt2_accel-*.whl": "tests/test_install.py does",
    "gpt2-accel quickstart": "trains for two minutes",
    "gpt2-accel config 8xa100 > my.yaml": "tests/cli/test_command.py does",
    "gpt2-accel config notebook > notebook.ipynb": "tests/cli/test_command.py does",
    "pip install 'matplotlib>=3.9'": "installs",
    "pip install 'gradio>=6.0'": "installs",
    "pip install 'scipy>=1.13' 'matplotlib>=3.9'": "installs",
    "pip install 'scipy>=1.13'": "installs",
    "srun -N 8 python recipes/compare.py STUDY.yaml --output_dir SHARED/STUDY": (
        "tests/tools/study/test_runs.py does, on one machine"
    ),
    **dict.fromkeys(
        (
            f"python recipes/compare.py recipes/studies/{name}.yaml"
            for name in ("learning_rate", "clipping", "initialization", "beta2")
        ),
        "tests/tools/study/test_runs.py runs small ones",
    ),
    "python recipes/scaling_laws.py --data_dir data/mine --budgets 1e12 3e12 1e13 --target_flops 1e14": (
        "tests/tools/study/test_scaling.py does"
    ),
    "python recipes/scaling_laws.py --data_dir data/mine --budgets 1e12 3e12 1e13 --dry_run true": (
        "tests/tools/study/test_scaling.py does"
    ),
    "pip install 'transformers[serving]>=5.17'": "installs",
    "python recipes/export.py --model runs/quickstart --average 2 --output runs/average": "--average 1",
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp": "needs a network",
    "pip install sentencepiece": "installs",
    "python llama.cpp/convert_hf_to_gguf.py models/mine --outfile mine.gguf --outtype f32": (
        "tests/hf/test_serving.py does, with another tokenizer"
    ),
    "pip install 'optimum-onnx[onnxruntime]'": "installs",
    "optimum-cli export onnx --model runs/quickstart --task text-generation quickstart_onnx": (
        "needs an environment of its own"
    ),
    "pip install 'llama-cpp-python[server]==0.3.36'": "compiles",
    **dict.fromkeys(
        SERVERS, "tests/hf/test_serving.py does, or docs/hub.md says that it does not run"
    ),
    "hf auth login": "asks for a token",
    **dict.fromkeys(
        (
            "python recipes/prepare_data.py push USER/NAME --data_dir data/mine",
            "python recipes/prepare_data.py pull USER/NAME --data_dir data/theirs",
            "accelerate launch --config_file accelerate_configs/1xgpu.yaml recipes/pretrain_124m.py --data_dir "
            "hub:USER/NAME",
        ),
        "tests/hf/test_hub_data.py does",
    ),
    "python recipes/report.py runs/quickstart": "tests/tools/test_report.py does",
    "python recipes/demo.py --model runs/quickstart": "tests/recipes/test_demo.py does",
}


def commands_of(text: str) -> list[str]:
    """Returns the commands in a Markdown file's `sh` blocks, without comments and `.venv/bin/`."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return commands_in(blocks.replace("\\\n", " ").splitlines())


def commands_in(lines: list[str]) -> list[str]:
    """Returns the commands in lines of a shell, with one space between words."""
    split = (shlex.split(line.replace(".venv/bin/", ""), comments=True) for line in lines)
    return [" ".join(quoted(word) for word in words) for words in split if words]


def quoted(word: str) -> str:
    """Quotes a word of a command if it needs quotes."""
    return f"'{word}'" if set(word) & set(" []>") and word != ">" else word


def run_command(
    command: str, flags: str, cwd: Path, at_import: dict[str, str] | None = None, **env: str
):
    """Runs a command of the README with additional `flags`, not compiled, on CPUs, with at most two processes."""
    words = shlex.split(f"{command} {flags}")
    while ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    environment = {**os.environ, **(at_import or {}), "ACCELERATE_USE_CPU": "true", **env}
    if words[0] == "gpt2-accel":
        words = started_by(words[1:], cwd)
    if words[0] == "python":
        return forked(words[1:], [environment], cwd, at_import)
    launcher = words[2 : next(i for i, word in enumerate(words) if word.endswith(".py"))]
    config = next((word for word in launcher if word.endswith(".yaml")), None)
    added = ["--main_process_port", free_port()]
    if config and yaml.safe_load((cwd / config).read_text())["num_processes"] > 2:
        added += ["--num_processes", "2"]
    argv, environments = launched([*launcher, *added, *words[2 + len(launcher) :]], environment)
    eager = [{**each, "ACCELERATE_DYNAMO_BACKEND": "NO"} for each in environments]
    return forked(argv, eager, cwd, at_import)


def started_by(words: list[str], cwd: Path) -> list[str]:
    """Returns the command that `gpt2-accel` starts in `cwd`: `python …` or `accelerate launch …`."""
    with pytest.MonkeyPatch.context() as patch:
        started = []
        patch.setattr(os, "execv", lambda _, argv: started.extend(argv[1:]))
        words = [str(cwd / word) if word.endswith(".yaml") else word for word in words]
        patch.chdir(cwd)
        run_program(words)
    launcher = ["-P", "-m", "accelerate.commands.launch"]
    return (
        ["accelerate", "launch", *started[3:]] if started[:3] == launcher else ["python", *started]
    )


def prepare_folder(folder: Path) -> None:
    """Fills a folder like the project's root with the texts and settings of the commands."""
    for name in ("recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    texts = [make_text(800, seed) for seed in range(40)]
    for name in ("my_texts", "data"):
        (folder / name).mkdir()
    for name in ("fineweb_edu", "openwebtext"):
        (folder / "data" / name).symlink_to("more")
    for number, text in enumerate(texts):
        (folder / "my_texts" / f"{number}.txt").write_text(text)
    lines = "".join(f'{{"text": "{text.strip()}"}}\n' for text in texts)
    with pyarrow.output_stream(str(folder / "more.jsonl.zst"), compression="zstd") as file:
        file.write(lines.encode())
    write_lines(folder / "my_questions.jsonl", [{"prompt": "Why?", "answer": "So."}] * 2)
    (folder / "my_settings.yaml").write_text("warmup_steps: 1\n")
    (folder / "data/python_stdlib").symlink_to("mine")
    (folder / "my.yaml").symlink_to(ROOT / "accelerate_configs/8xa100.yaml")


def test_the_tables_list_exactly_the_commands_of_the_documentation():
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [command for path in files for command in commands_of(path.read_text())]
    assert set(found) == {*LOCAL, *PROGRAM, *ON_HUB, *NOT_RUN}


def test_every_documented_command_runs(tmp_path):
    prepare_folder(tmp_path)
    for line, flags in (LOCAL | PROGRAM).items():
        run_command(line, flags, tmp_path)


def test_the_dry_run_prints_what_the_hardware_page_quotes(tmp_path):
    prepare_folder(tmp_path)
    page = (ROOT / "docs/hardware.md").read_text()
    [command] = [command for command in commands_of(page) if "--dry_run" in command]
    done = run_command(command, "", tmp_path)
    assert f"```\n{done.stdout}```" in page


def header_commands() -> list[str]:
    """Returns the commands in the headers of the recipes."""
    headers = (path.read_text().split('"""')[1] for path in (ROOT / "recipes").rglob("*.py"))
    lines = (re.sub(r"\\+\n", " ", header).splitlines() for header in headers)
    command = re.compile(r"    (python recipes/|accelerate launch)")
    return commands_in([line for found in lines for line in found if command.match(line)])


@pytest.mark.parametrize("command", sorted({*header_commands()} - {*LOCAL, *ON_HUB, *NOT_RUN}))
def test_every_command_of_a_recipes_header_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setitem(sys.modules, "gradio", None)  # takes seconds to import
    words = shlex.split(command)
    if words[0] == "accelerate":
        parsed = launch_command_parser().parse_args(words[2:])
        script, args = parsed.training_script, parsed.training_script_args
    else:
        script, args = words[1], words[2:]
    recipe = load_recipe(Path(script).relative_to("recipes").with_suffix("").as_posix())
    if hasattr(recipe, "parse_options"):
        monkeypatch.setattr(sys, "argv", [script, *args])
        assert recipe.parse_options()
        return
    kinds = [
        kind
        for _, kind in inspect.getmembers(recipe, is_dataclass)
        if inspect.isclass(kind) and kind.__module__ == recipe.__name__
    ]
    assert parse_config([*kinds, TrainConfig][0], args)
