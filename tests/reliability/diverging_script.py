"""Trains with NaN gradients from the seventh update on."""

import torch

import gpt2_accel.train as train_module
from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config

honest = train_module.accumulate_gradients


def accumulate(run, first, sequences):
    figures = honest(run, first, sequences)
    return {"loss": figures["loss"] * torch.nan} if first // sequences >= 6 else figures


train_module.accumulate_gradients = accumulate
cli.run(lambda: train_module.train(parse_config(TrainConfig)))
