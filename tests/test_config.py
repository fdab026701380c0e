from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_accel.config import TrainConfig, parse_config, setting


@dataclass
class Recipe(TrainConfig):
    learning_rate: float = 1e-3
    flavour: str = setting("plain", "a setting of the recipe's own")


def test_the_command_line_wins_over_yaml_and_yaml_over_the_recipe(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("learning_rate: 6e-4\nn_layer: 3\nbias: false\nsample_prompts: [a, b]\n")
    config = parse_config(Recipe, ["--config", str(path), "--n_layer", "5"])
    assert (config.learning_rate, config.n_layer, config.n_head) == (6e-4, 5, 12)
    assert config.bias is False
    assert config.sample_prompts == ["a", "b"]


def test_saved_settings_read_back_equal(tmp_path):
    config = parse_config(Recipe, ["--dropout", "0.1", "--no_bias", "--resume_from", "latest"])
    config.save(tmp_path / "config.yaml")
    assert parse_config(Recipe, ["--config", str(tmp_path / "config.yaml")]) == config


def test_the_sequence_is_as_long_as_the_positions_unless_set():
    assert parse_config(Recipe, ["--n_positions", "64"]).sequence_length == 64
    assert parse_config(Recipe, ["--sequence_length", "32"]).sequence_length == 32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--learning_rat", "1"], "--learning_rat: did you mean learning_rate"),
        (["--zzz"], "--zzz: --help lists"),
        (["--n_layer", "two"], "n_layer.*'two'"),
        (["--optimizer", "sgd"], "optimizer must be one of adamw, muon"),
        (["--lr_schedule", "step"], "lr_schedule must be one of"),
        (["--max_steps", "0"], "max_steps must be at least 1"),
        (["--weight_decay", "-1"], "weight_decay must not be negative"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_a_bad_option_is_one_sentence(args, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parse_config(Recipe, args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "'learning_rat': did you mean learning_rate"),
        ("n_layer: many", "n_layer.*'many'"),
        ("- a\n- b", "`name: value`"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_bad_yaml_file_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_config(Recipe, ["--config", str(path)])


@given(
    st.dictionaries(
        st.sampled_from(
            ["n_layer", "learning_rate", "bias", "data_dir", "n_layers", "sample_prompts"]
        ),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers()),
    )
)
@settings(deadline=None, max_examples=100)
def test_any_yaml_gives_a_config_or_a_valueerror(tmp_path_factory, values):
    import yaml

    path = tmp_path_factory.mktemp("yaml") / "c.yaml"
    path.write_text(yaml.safe_dump(values))
    try:
        config = parse_config(Recipe, ["--config", str(path)])
    except ValueError:
        return
    assert isinstance(config.n_layer, int) and isinstance(config.learning_rate, float)
    assert isinstance(config.bias, bool) and isinstance(config.data_dir, str)
    assert all(isinstance(prompt, str) for prompt in config.sample_prompts)
