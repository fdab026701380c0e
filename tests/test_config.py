"""Settings from defaults, YAML and the command line, and their `--help`."""

import dataclasses
import re
from dataclasses import asdict, dataclass
from typing import get_args, get_origin, get_type_hints

import pytest
import yaml
from conftest import refused

from gpt2_accel.config import SECTIONS, TrainConfig, parse_config, setting
from gpt2_accel.generation.sampling import Sampling
from gpt2_accel.tuning import remarks


@dataclass
class Recipe(TrainConfig):
    learning_rate: float = 1e-3
    flavour: str = setting("plain", "a setting of this recipe")
    sizes: list[int] = setting([], "numbers")


def test_command_line_overrides_yaml_and_yaml_overrides_the_recipe(tmp_path):
    """YAML has numbers without a point, switches and lists."""
    path = tmp_path / "c.yaml"
    path.write_text("learning_rate: 6e-4\nbias: false\nsample_prompts: [a, b]\nn_layer: 3\n")
    config = parse_config(Recipe, ["--config", str(path), "--n_layer", "5"])
    assert config == Recipe(learning_rate=6e-4, bias=False, sample_prompts=["a", "b"], n_layer=5)


def test_saved_settings_round_trip_without_commands(tmp_path):
    flags = ["--dropout", "0.1", "--bias", "false", "--resume_from", "latest"]
    config = parse_config(Recipe, [*flags, "--profile", "2", "--dry_run"])
    assert config.dry_run == ["here"]
    config.save(tmp_path / "config.yaml")
    saved = parse_config(Recipe, ["--config", str(tmp_path / "config.yaml")])
    assert saved == parse_config(Recipe, flags)


def test_a_file_with_a_command_that_was_saved_loads(tmp_path):
    old = asdict(Recipe())
    old["dropout"] = 0.1
    old["dry_run"] = False
    path = tmp_path / "0.3.yaml"
    path.write_text(yaml.safe_dump(old))
    assert parse_config(Recipe, ["--config", str(path)]) == Recipe(dropout=0.1)


# The options of this package: those of other programs.
OTHERS = """
output_dir: out_dir model_tag
eval_every: eval_interval eval_steps
log_every: log_interval logging_steps
eval_tokens: eval_iters
micro_batch_size: batch_size device-batch-size per_device_train_batch_size
sequence_length: block_size max-seq-len max_length
max_steps: max_iters num_iterations
learning_rate: lr
max_grad_norm: grad_clip train.max_norm
warmup_steps: warmup_iters train.lr_warmup_steps
data_dir: dataset dataset_name
core_every: core-metric-every
decay_share: warmdown_ratio
epochs: num_train_epochs
save_every: save_steps
total_batch_size: gradient_accumulation_steps train.global_batch_size
lr_schedule: lr_scheduler_type
optimizer: optim
beta2: adam_beta2
adam_eps: adam_epsilon
keep_last: save_total_limit
init_from: model_name_or_path checkpoint_dir
resume_from: resume_from_checkpoint
checkpoint_activations: gradient_checkpointing
"""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(theirs, ours) for ours, names in yaml.safe_load(OTHERS).items() for theirs in names.split()],
)
def test_a_habit_from_another_program_names_the_option(theirs, ours):
    with refused(f"did you mean --{ours}[?]$"):
        parse_config(Recipe, [f"--{theirs}", "1"])


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("settings_class", [Recipe, Sampling])
def test_numbers_out_of_range_are_refused(settings_class, value):
    for name, hint in get_type_hints(settings_class).items():
        numbers = {int, float} & {hint, *get_args(hint)}
        if numbers and get_origin(hint) is not list:
            with refused(name):
                parse_config(settings_class, [f"--{name}={value}"])


def test_help_lists_every_setting_once_with_the_recipes_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_config(Recipe, ["--help"])
    text = capsys.readouterr().out
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles == ["options", "this recipe", *SECTIONS.values()]
    lines = text.splitlines()
    assert len(lines) <= 122
    assert max(map(len, lines)) < 80
    for field in dataclasses.fields(Recipe):
        assert text.count(f"\n  --{field.name} ") == 1, field.name
    words = " ".join(text.split())
    assert "--learning_rate X peak learning rate [0.001]" in words
    assert "--flavour TEXT a setting of this recipe [plain]" in words


def test_a_tilde_is_the_home_folder_also_where_no_shell_expands_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "c.yaml"
    path.write_text("data_dir: ~/a\nsample_prompts: ['~', '~ b']\n")
    config = parse_config(Recipe, ["--config", str(path), "--init_from=~/b"])
    assert (config.data_dir, config.init_from) == ("/home/me/a", "/home/me/b")
    assert config.sample_prompts == ["~", "~ b"]


def test_a_setting_without_an_effect_is_remarked_on():
    line = "--lora_alpha has no effect without --lora"
    assert remarks(TrainConfig(lora_alpha=16)) == [line]
    assert remarks(TrainConfig(lora_alpha=16, lora=8)) == remarks(TrainConfig()) == []
