"""Depthwise causal convolution over windows kept in blocks."""

from torch import Tensor

from dalsegno.ops import reference
from dalsegno.ops.batch import StateLayerCache

__all__ = ["causal_conv"]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: StateLayerCache,
    part: str = "conv",
    activation: str | None = "silu",
) -> Tensor:
    """Convolve each channel over the last K inputs of its request, and write the last K - 1 inputs as the new state.

    `out_t = activation(bias + sum_j weight[:, j] x[t - K + 1 + j])`; inputs before the step come from the read block.

    Args:
        x: `[T, channels]`.
        weight: `[channels, K]`, oldest input first.
        bias: `[channels]` or None.
        cache: the layer's memory and the step's batch; write and export blocks are written whole.
        part: which part of the layer's state this is, of shape `[channels, K - 1]`, oldest input first.
        activation: "silu" or None.

    Returns:
        `[T, channels]`, dtype of `x`.
    """
    return reference.causal_conv(x, weight, bias, cache, part, activation)
