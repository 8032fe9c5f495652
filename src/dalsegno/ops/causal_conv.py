"""Depthwise causal convolution over windows kept in blocks.

The step's inputs are laid out with each request's window before its tokens. The convolution then is K shifted sums
over the whole layout; places where a window begins give sums of two requests, which nobody takes.
"""

from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from dalsegno.ops.batch import StateLayerCache
from dalsegno.ops.native import calls as native

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
    assert activation in ("silu", None), f"activation must be 'silu' or None, got {activation!r}"
    stepped = native.conv_step(x, weight, bias, cache, part, activate=activation == "silu")
    if stepped is not None:
        return stepped
    batch, rows, strides = cache.batch, cache.view.rows[part], cache.view.strides[part]
    num_channels, width = weight.shape
    windows = rows.index_select(0, batch.read_rows(strides)).view(-1, num_channels, width - 1).to(x.dtype).mT
    places = batch.window_places(width - 1)
    layout = torch.cat(list(chain.from_iterable(zip(windows.unbind(), x.split(batch.lengths), strict=True))))
    out = _shifted_sums(layout.float(), weight.float(), bias)
    out = out if places.outputs is None else out.index_select(0, places.outputs)
    kept = layout.index_select(0, places.kept).view(-1, width - 1, num_channels).mT
    rows[batch.write_rows(strides)] = kept.reshape(-1, num_channels * (width - 1)).to(rows.dtype)
    return (F.silu(out, inplace=True) if activation == "silu" else out).to(x.dtype)


def _shifted_sums(layout: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `[rows - K + 1, channels]`: row i is the convolution of rows `[i, i + K)` of `layout`."""
    taps = weight.t().contiguous()
    length = len(layout) - len(taps) + 1
    sums = layout[:length] * taps[0] if bias is None else torch.addcmul(bias.float(), layout[:length], taps[0])
    for j in range(1, len(taps)):
        sums.addcmul_(layout[j : j + length], taps[j])
    return sums
