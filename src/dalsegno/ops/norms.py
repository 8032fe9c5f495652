"""Root-mean-square norms over the last dimension."""

import torch
from torch import Tensor
from torch.nn import functional

from dalsegno.ops.native import calls as native

__all__ = ["rms_norm"]


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    wide: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    """Return `hidden / sqrt(mean(hidden^2) + eps) * (weight + offset) * silu(gate)`; the mean is of the last dimension.

    Norm and gate are computed in float32 in any dtype.

    Args:
        hidden: `[T, size]` or `[T, heads, size]`.
        weight: `[size]` or `[heads, size]`.
        eps: added to the mean.
        offset: added to the weight.
        wide: the weight is applied before the norm is rounded to the dtype of `hidden`, not after.
        gate: of the shape of `hidden`, or None.

    Returns:
        Shape and dtype of `hidden`.
    """
    out = native.rms_norm(hidden, weight, eps, offset, gate)
    if out is not None:
        return out
    normed = hidden.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if wide:
        factors = weight.float() if offset == 0.0 else weight.float() + offset
        out = (normed * factors).to(hidden.dtype)
    else:
        out = (weight if offset == 0.0 else weight + offset) * normed.to(hidden.dtype)
    return out if gate is None else (out * functional.silu(gate.float())).to(hidden.dtype)
