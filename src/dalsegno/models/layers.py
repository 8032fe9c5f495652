"""Building blocks that families share: linear maps, norms, the gated MLP.

Parameters are made empty on the ambient device (`with torch.device(...)`) and never need gradients. Every block
lists its checkpoint tensors in `weight_targets(prefix)`, under the names of the Hugging Face layout; projections of
one input are fused into one matrix, whose rows are the single ones.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dalsegno.models.weights import FusedTensor, WeightTarget
from dalsegno.ops.linear import linear
from dalsegno.ops.norms import rms_norm

__all__ = [
    "CentredRMSNorm",
    "GatedMLP",
    "Linear",
    "MLPNames",
    "RMSNorm",
    "WideRMSNorm",
    "empty_parameter",
    "scaled",
]


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter without gradient, on the ambient device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def scaled(hidden: Tensor, multiplier: float) -> Tensor:
    """Return `hidden` times `multiplier`, and `hidden` itself where that is one."""
    return hidden if multiplier == 1.0 else hidden * multiplier


class Linear(nn.Module):
    """A linear map `[..., in] -> [..., out]` whose output rows are one or several named projections."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the map."""
        return linear(hidden, self.weight, self.bias)

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
    """Root-mean-square norm over the last dimension: normalised in float32, then times the weight.

    Attributes:
        offset: added to the weight, which checkpoints may store as its distance from one.
        wide: the weight is applied in float32.
    """

    offset: ClassVar[float] = 0.0
    wide: ClassVar[bool] = False

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype)

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise `[..., size]`, then multiply by `silu(gate)`, a tensor of the same shape, where there is one."""
        return rms_norm(hidden, self.weight, self.eps, offset=self.offset, wide=self.wide, gate=gate)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the one checkpoint tensor."""
        return {f"{prefix}.weight": WeightTarget(self.weight)}


class CentredRMSNorm(RMSNorm):
    """RMSNorm whose weight is stored as its distance from one."""

    offset: ClassVar[float] = 1.0
    wide: ClassVar[bool] = True


class WideRMSNorm(RMSNorm):
    """RMSNorm whose weight is applied in float32."""

    wide: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class MLPNames:
    """What checkpoints call the projections of a gated MLP; `gate_up` names gate and up as one tensor."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with a factor on gate and on the result where a family has them."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        names: MLPNames | None = None,
        multipliers: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.names = names or MLPNames()
        self.multipliers = multipliers
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, dtype, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        gate_multiplier, down_multiplier = self.multipliers
        return scaled(self.down_proj(functional.silu(scaled(gate, gate_multiplier)) * up), down_multiplier)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return gate, up and down projections."""
        size, names = self.intermediate_size, self.names
        rows = {f"{prefix}.{names.gate}": size, f"{prefix}.{names.up}": size}
        if names.gate_up is not None:
            rows = {f"{prefix}.{names.gate_up}": 2 * size}
        return {
            **self.gate_up_proj.weight_targets(rows),
            **self.down_proj.weight_targets({f"{prefix}.{names.down}": self.down_proj.weight.shape[0]}),
        }

    def fused_tensors(self, prefix: str) -> dict[str, FusedTensor]:
        """Return nothing: there is one spelling."""
        return {}
