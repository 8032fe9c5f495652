"""Linear maps."""

from torch import Tensor
from torch.nn import functional

from dalsegno.ops.native import calls as native

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.

    Returns:
        `[..., out]`.
    """
    out = native.linear(x, weight, bias)
    return functional.linear(x, weight, bias) if out is None else out
