"""The speedrun recipe: its arithmetic, and a short run that opens in a pipeline."""

import pytest
from conftest import load_recipe

from gpt2_accel.models import config_class

# Worked out by hand from the formulas of the recipe's header, with GPT-2's 50,257 tokens:
# width, tokens, batch, updates, learning rate, weight decay.
BY_HAND = {
    4: (256, 192_138_240, 262_144, 732, 0.00442, 0.546),
    20: (1280, 5_490_539_520, 1_048_576, 5236, 0.00395, 0.0382),
}


@pytest.mark.parametrize("depth", BY_HAND)
def test_settings_follow_the_depth(depth):
    recipe = load_recipe("speedrun")
    config = recipe.Speedrun(depth=depth)
    recipe.follow_depth(config, 50257)
    actual = (recipe.width_of(depth), recipe.tokens_of(depth, 50257), config.total_batch_size)
    actual += (config.max_steps, config.learning_rate, config.weight_decay)
    assert actual == BY_HAND[depth]
    shape = config_class("nanochat").from_settings(config, 50257)
    assert shape.n_layer == depth
    assert shape.n_embd == actual[0]
    assert shape.head_dim == 128
    assert config.micro_batch_size == 0
