"""The speedrun recipe: its arithmetic, and a short run that opens in a pipeline."""

import pytest
from conftest import load_recipe
from tables import table

from gpt2_accel.models import config_class

BY_HAND = table("recipes/cases")["speedrun"]


@pytest.mark.parametrize("depth", BY_HAND)
def test_settings_follow_the_depth(depth):
    recipe = load_recipe("speedrun")
    config = recipe.Speedrun(depth=depth)
    recipe.follow_depth(config, 50257)
    actual = [recipe.width_of(depth), recipe.tokens_of(depth, 50257), config.total_batch_size]
    actual += [config.max_steps, config.learning_rate, config.weight_decay]
    assert actual == BY_HAND[depth]
    shape = config_class("nanochat").from_settings(config, 50257)
    assert shape.n_layer == depth
    assert shape.n_embd == actual[0]
    assert shape.head_dim == 128
    assert config.micro_batch_size == 0
