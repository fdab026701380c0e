"""Exports a model as ONNX, for onnxruntime and other programs."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gpt2_accel import kernels
from gpt2_accel.hf.convert import check_finite
from gpt2_accel.models import LanguageModel


class Logits(torch.nn.Module):
    """The forward pass with an explicit causal mask, since the argument `is_causal` would fix the length."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: (B, T) -> logits (B, T, vocab_size)."""
        position = torch.arange(input_ids.shape[1])
        mask = position[:, None] >= position
        return self.model(input_ids, attention_mask=mask[None, None])


def write_onnx(model: LanguageModel, path: Path) -> None:
    """Writes an fp32 ONNX model: `input_ids` (batch, length) int64 -> `logits` (batch, length, vocab_size) fp32.

    Batch and length are dynamic; the length is at most `n_positions`. The embedding and the tied head are one tensor.
    Weights above 1.5 GB are in a second file, `path` with `.data` added. Raises `ValueError` if a package is missing or
    a weight is NaN or infinite.
    """
    try:
        import onnxscript.optimizer
    except ImportError as error:
        missing = (error.name or "onnxscript").partition(".")[0]
        raise ValueError(
            f"ONNX files need {missing}: pip install 'onnx>=1.20' 'onnxscript>=0.7'"
        ) from error
    check_finite(model)
    length = torch.export.Dim("length", max=model.config.n_positions)
    with plain_and_quiet():
        program = torch.onnx.export(
            Logits(model).eval(),
            (torch.zeros(2, 2, dtype=torch.int64),),
            dynamo=True,
            verbose=False,
            optimize=False,
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": {0: torch.export.Dim("batch"), 1: length}},
        )
        # A folded constant as large as the embedding would be its transpose, a second copy of it for the head.
        onnxscript.optimizer.optimize(program.model, output_size_limit=1024)
    program.save(path)


@contextmanager
def plain_and_quiet() -> Iterator[None]:
    """Turns the kernels and the exporter's warnings off, which tell of torchvision and of deprecated calls in torch."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with kernels.chosen(enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
