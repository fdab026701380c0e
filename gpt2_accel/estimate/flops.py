"""FLOPs per token of training, and a typical model FLOPs utilisation (MFU)."""

from gpt2_accel.models import ModelConfig

# Typical share of a device's peak that training reaches; nanoGPT calls 40-60% good.
TYPICAL_MFU = 0.4


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Returns the floating-point operations of forward + backward per token: 6N + 12·L·H·Q·T.

    Formula: PaLM (Chowdhery et al., 2022, arXiv:2204.02311), appendix B, with N without the position embeddings, as
    nanoGPT counts it. The attention term counts the full T x T square, as MFU conventionally does.
    """
    return 6 * config.matmul_parameters + 12 * config.attention_width * sequence_length
