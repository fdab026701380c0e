"""FLOPs per token of training, a typical model FLOPs utilisation (MFU), and times in words."""

from gpt2_accel.models import ModelConfig

# Typical share of a device's peak that training reaches; nanoGPT calls 40-60% good.
TYPICAL_MFU = 0.4


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Returns the floating-point operations of forward + backward per token: 6N + 12·L·H·Q·T.

    Formula: PaLM (Chowdhery et al., 2022, arXiv:2204.02311), appendix B, with N without the position embeddings, as
    nanoGPT counts it. The attention term counts the full T x T square, as MFU conventionally does.
    """
    width = config.n_layer * config.n_head * config.head_dim
    return 6 * config.matmul_parameters + 12 * width * sequence_length


def duration(seconds: float) -> str:
    """Formats a duration: 14 s, 2 min 18 s, 3 h 05 min, 4 d 07 h."""
    if seconds < 1:
        return "less than 1 s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    for limit, unit, big, small in ((3600, 1, "min", "s"), (48 * 3600, 60, "h", "min")):
        if seconds < limit:
            whole, rest = divmod(round(seconds / unit), 60)
            return f"{whole} {big} {rest:02d} {small}"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours:02d} h"
