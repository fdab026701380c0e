"""A run whose ranks disagree, for tests: rank 1 stops it, or names its figure otherwise."""

import os

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.train import next_token_loss, train

RANK = os.environ.get("RANK", "0")


class Stops:
    def on_step_end(self, run, skipped):
        if run.step == 2 and RANK == "1":
            run.request_stop("rank 1 has enough")


def named(model, batch):
    return next_token_loss(model, batch), {"one" if RANK == "1" else "zero": 1.0}


def main() -> None:
    stops = os.environ["CASE"] == "stop"
    seams = {"callbacks": [Stops()]} if stops else {"objective": named}
    train(parse_config(TrainConfig), **seams)


if __name__ == "__main__":
    cli.run(main)
