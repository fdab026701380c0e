"""Trains with collectives that time out after 5 seconds and a main process that takes longer for its own work.

ACCELERATE_USE_CPU=true accelerate launch --multi_gpu ... slow_main_process.py --data_dir ...
"""

import os
import time
from datetime import timedelta

import huggingface_hub.constants
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

import gpt2_accel.runtime.accelerator as accelerator_module
from gpt2_accel.checkpoint.writer import CheckpointWriter
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.train import train

LIMIT = 5.0


def slowly(function):
    def run(*args):
        time.sleep(1.6 * LIMIT)
        return function(*args)

    return run


limited = InitProcessGroupKwargs(timeout=timedelta(seconds=LIMIT))
accelerator_module.Accelerator = lambda kwargs_handlers, **settings: Accelerator(
    kwargs_handlers=[*kwargs_handlers, limited], **settings
)
CheckpointWriter._write = slowly(CheckpointWriter._write)
huggingface_hub.constants.ENDPOINT = os.environ["HF_ENDPOINT"]
huggingface_hub.constants.HF_HUB_OFFLINE = False
train(parse_config(TrainConfig))
