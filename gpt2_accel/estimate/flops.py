"""FLOPs per token of training, a typical model FLOPs utilisation (MFU)."""

from gpt2_accel.models import ModelConfig

# Share of a device's peak that training typically reaches; nanoGPT calls 40-60% good.
TYPICAL_MFU = 0.4


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Returns the floating-point operations of forward + backward per token: 6N + 12·L·H·Q·T.

    The formula of PaLM (Chowdhery et al., 2022, arXiv:2204.02311), appendix B. As in nanoGPT, N
    excludes position embeddings. The attention term counts the full T x T square, as MFU does by
    convention.
    """
    width = config.n_layer * config.n_head * config.head_dim
    return 6 * config.matmul_parameters + 12 * width * sequence_length
