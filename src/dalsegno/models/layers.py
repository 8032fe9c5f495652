"""Building blocks that families share: linear maps, norms, the gated MLP.

Parameters are made empty on the ambient device (`with torch.device(...)`) and never need gradients. Every block
lists its checkpoint tensors in `weight_targets(prefix)`, under the names of the Hugging Face layout; projections of
one input are fused into one matrix, whose rows are the single ones.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dalsegno.models.weights import WeightTarget

__all__ = ["CentredRMSNorm", "GatedMLP", "GatedRMSNorm", "Linear", "RMSNorm", "empty_parameter"]


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter without gradient, on the ambient device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """A linear map `[..., in] -> [..., out]` whose output rows are one or several named projections."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the map."""
        return functional.linear(hidden, self.weight, self.bias)

    def weight_targets(self, rows: dict[str, int]) -> dict[str, WeightTarget]:
        """Return the targets of projections stacked in order: checkpoint prefix -> number of output rows."""
        targets: dict[str, WeightTarget] = {}
        begin = 0
        for prefix, count in rows.items():
            targets[f"{prefix}.weight"] = WeightTarget(self.weight[begin : begin + count])
            if self.bias is not None:
                targets[f"{prefix}.bias"] = WeightTarget(self.bias[begin : begin + count])
            begin += count
        assert begin == self.weight.shape[0], "the named projections must be all output rows"
        return targets


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension: normalised in float32, then times the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `[..., size]`."""
        return self.weight * _normalise(hidden.float(), self.eps).to(hidden.dtype)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the one checkpoint tensor."""
        return {f"{prefix}.weight": WeightTarget(self.weight)}


class CentredRMSNorm(RMSNorm):
    """RMSNorm whose weight is stored as its distance from one; all of it in float32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `[..., size]`."""
        return (_normalise(hidden.float(), self.eps) * (1.0 + self.weight.float())).to(hidden.dtype)


class GatedRMSNorm(RMSNorm):
    """RMSNorm followed by a SiLU gate, which is applied in float32."""

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise `[..., size]` and multiply by `silu(gate)`, a tensor of the same shape."""
        assert gate is not None, "the gated norm needs its gate"
        return (super().forward(hidden) * functional.silu(gate.float())).to(hidden.dtype)


def _normalise(hidden: Tensor, eps: float) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, dtype, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        output: Tensor = self.down_proj(functional.silu(gate) * up)
        return output

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return gate, up and down projections."""
        size = self.intermediate_size
        return {
            **self.gate_up_proj.weight_targets({f"{prefix}.gate_proj": size, f"{prefix}.up_proj": size}),
            **self.down_proj.weight_targets({f"{prefix}.down_proj": self.down_proj.weight.shape[0]}),
        }
