"""Decays between the tokens of a tile, for the ops whose state decays from token to token."""

from torch import Tensor

__all__ = ["LEAST_LOG_DECAY", "tile_decays"]

LEAST_LOG_DECAY = -87.0
"""exp(-87) is the smallest normal float32; what decays further is as good as gone, and denormals are slow."""


def tile_decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much is left of the state at a tile's begin, and of each token, at each token.

    The logarithms add up to large numbers whose differences matter, hence float64. Differences above the diagonal are
    positive and would overflow: they are cut to 0 before and to nothing after.

    Args:
        log_decay: `[..., size, 1]` float32, at most 0.

    Returns:
        `[..., size, 1]` float32, the decay from the tile's begin to each token, its own included; and
        `[..., size, size]` float32, at `[i, j]` the decay from token j to token i >= j, else 0.
    """
    reach = log_decay.clamp(min=LEAST_LOG_DECAY).double().cumsum(dim=-2)
    within = (reach - reach.mT).float().clamp_(min=LEAST_LOG_DECAY, max=0.0).exp_().tril_()
    return reach.float().clamp_(min=LEAST_LOG_DECAY).exp_(), within
