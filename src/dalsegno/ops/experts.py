"""Routed experts: each token meets the matrices of the experts chosen for it, and no others.

Tokens are sorted by expert and each expert's matrix meets its own tokens in one grouped product, without a host sync
and without a loop over tokens, so the cost is that of the chosen experts for one token as for thousands. Sums run in a
fixed order: a token's result depends on no other.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dalsegno.ops.native import calls as native

__all__ = ["routed_experts"]


def routed_experts(
    hidden: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, gated: bool
) -> Tensor:
    """Return the weighted sum of each token's experts.

    Args:
        hidden: `[T, size]`.
        experts: `[T, k]` int64, the experts chosen for each token.
        weights: `[T, k]`, their weights.
        up: `[experts, inner, size]`; with `gated` `[experts, 2 * inner, size]`, the rows of the gate first.
        down: `[experts, size, inner]`.
        gated: an expert is `down(silu(gate(x)) * up(x))`, else `down(relu(up(x))^2)`.

    Returns:
        `[T, size]`.
    """
    out = native.routed_experts(hidden, experts, weights, up, down, gated=gated)
    if out is not None:
        return out
    flat, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(flat, torch.arange(len(up), device=flat.device), right=True).int()
    rows = functional.grouped_mm(hidden[order // experts.shape[1]], up.transpose(1, 2), offs=ends)
    if gated:
        gate, inner = rows.chunk(2, dim=-1)
        rows = functional.silu(gate) * inner
    else:
        rows = functional.relu(rows).square()
    rows = functional.grouped_mm(rows, down.transpose(1, 2), offs=ends)
    outputs = torch.empty_like(rows)
    outputs[order] = rows
    return (outputs.view(*weights.shape, -1) * weights[..., None]).sum(1)
