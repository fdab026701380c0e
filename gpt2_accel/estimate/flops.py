"""FLOPs of training, and the share of the peak that it reaches."""

from gpt2_accel.models import ModelConfig

# Training reaches about this share of the speed of a large matrix product; nanoGPT calls 40-60% good.
TYPICAL_MFU = 0.4


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations of forward + backward per token: 6N + 12·L·H·Q·T.

    Formula: PaLM (Chowdhery et al., 2022, arXiv:2204.02311), appendix B, with N without the position embeddings, as
    nanoGPT counts it. The attention term counts the full T x T square, as MFU conventionally does.
    """
    return 6 * config.matmul_parameters + 12 * config.attention_width * sequence_length
