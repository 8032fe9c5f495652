"""The Mamba2 layer: a short causal convolution, then a selective scan with one state per head.

Both are parts of a state layer: "conv" holds the last inputs of the convolution, "recurrent" the
`[head_dim, state_dim]` state of each head, always float32. Step, decay and skip parameters stay float32 in any dtype,
since a rounded decay is raised to the power of the distance.
"""

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.nn import functional

from dalsegno.models.layers import Linear, empty_parameter, scaled
from dalsegno.models.rope import Rotation
from dalsegno.models.weights import WeightTarget
from dalsegno.ops.batch import LayerCache, StateLayerCache
from dalsegno.ops.causal_conv import causal_conv
from dalsegno.ops.norms import rms_norm
from dalsegno.ops.selective_scan import selective_scan
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec

__all__ = ["GateOrder", "Mamba2", "Mamba2Config"]


class GateOrder(Enum):
    """Where the gate acts on the scan's output: before its norm, after it, or without one."""

    BEFORE_NORM = auto()
    AFTER_NORM = auto()
    NO_NORM = auto()


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Shape of a Mamba2 layer; `num_heads` is a multiple of `num_groups`.

    Attributes:
        num_groups: heads of a group share key and query (B and C), and the norm is over a group's channels.
        step_limit: least and largest step.
        input_multiplier, output_multiplier: factors on the layer's input and output.
        part_multipliers: factors on gate, values, keys, queries and steps as projected.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    norm_eps: float
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    gate_order: GateOrder = GateOrder.BEFORE_NORM
    step_limit: tuple[float, float] = (0.0, float("inf"))
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0
    part_multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Channels of all groups' keys (or queries)."""
        return self.num_groups * self.state_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner_size + 2 * self.group_size


class Mamba2(nn.Module):
    """Linear attention with a decay that depends on the token.

    `in_proj` computes, in this order of rows: gate, values, keys, queries, steps.
    """

    part_multipliers: Tensor

    def __init__(self, config: Mamba2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype_name = str(dtype).removeprefix("torch.")
        rows = config.inner_size + config.conv_size + config.num_heads
        self.in_proj = Linear(config.hidden_size, rows, dtype, bias=config.in_bias)
        self.conv_weight = empty_parameter(config.conv_size, config.conv_kernel, dtype=dtype)
        self.conv_bias = empty_parameter(config.conv_size, dtype=dtype) if config.conv_bias else None
        self.dt_bias = empty_parameter(config.num_heads, dtype=torch.float32)
        self.A_log = empty_parameter(config.num_heads, dtype=torch.float32)
        self.skip = empty_parameter(config.num_heads, dtype=torch.float32)
        has_norm = config.gate_order is not GateOrder.NO_NORM
        self.norm_weight = empty_parameter(config.inner_size, dtype=dtype) if has_norm else None
        self.out_proj = Linear(config.inner_size, config.hidden_size, dtype, bias=config.out_bias)
        self.has_part_multipliers = any(factor != 1.0 for factor in config.part_multipliers)
        sizes = (config.inner_size, config.inner_size, config.group_size, config.group_size, config.num_heads)
        parts = [torch.full((size,), factor) for size, factor in zip(sizes, config.part_multipliers, strict=True)]
        self.register_buffer("part_multipliers", torch.cat(parts).to(dtype), persistent=False)

    def forward(self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`; moves the state on. The layer has no use for the rotation."""
        assert isinstance(cache, StateLayerCache), "a Mamba2 layer needs a state cache"
        config = self.config
        projected = self.in_proj(scaled(hidden, config.input_multiplier))
        if self.has_part_multipliers:
            projected = projected * self.part_multipliers
        gate, mixed, step = projected.split((config.inner_size, config.conv_size, config.num_heads), dim=-1)
        mixed = causal_conv(mixed, self.conv_weight, self.conv_bias, cache, part="conv", activation="silu")
        value, key, query = mixed.split((config.inner_size, config.group_size, config.group_size), dim=-1)
        output = selective_scan(
            value.unflatten(-1, (config.num_heads, config.head_dim)),
            functional.softplus(step.float() + self.dt_bias).clamp(*config.step_limit),
            -self.A_log.exp(),
            key.unflatten(-1, (config.num_groups, config.state_dim)),
            query.unflatten(-1, (config.num_groups, config.state_dim)),
            self.skip,
            cache,
            part="recurrent",
        )
        return scaled(self.out_proj(self._gated(output.flatten(1), gate)), config.output_multiplier)

    def _gated(self, output: Tensor, gate: Tensor) -> Tensor:
        """Apply gate and norm to `[T, inner_size]`, in float32; the norm is over each group's channels."""
        wide, factor = output.float(), functional.silu(gate.float())
        if self.config.gate_order is not GateOrder.AFTER_NORM:
            wide = wide * factor
        if self.norm_weight is not None:
            weight = self.norm_weight.unflatten(0, (self.config.num_groups, -1))
            grouped = wide.unflatten(-1, (self.config.num_groups, -1))
            wide = rms_norm(grouped, weight, self.config.norm_eps, wide=True).flatten(1)
        if self.config.gate_order is GateOrder.AFTER_NORM:
            wide = wide * factor
        return wide.to(gate.dtype)

    def cache_spec(self, layer: int) -> LayerCacheSpec:
        """Return what the layer keeps: the convolution's last inputs, oldest first, and the state of each head."""
        config = self.config
        conv = CachePart("conv", (config.conv_size, config.conv_kernel - 1), self.dtype_name)
        shape = (config.num_heads, config.head_dim, config.state_dim)
        return LayerCacheSpec(layer, GroupKind.STATE, (conv, CachePart("recurrent", shape, "float32")))

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors."""
        targets = {
            **self.in_proj.weight_targets({f"{prefix}.in_proj": self.in_proj.weight.shape[0]}),
            f"{prefix}.conv1d.weight": WeightTarget(self.conv_weight[:, None]),
            f"{prefix}.dt_bias": WeightTarget(self.dt_bias),
            f"{prefix}.A_log": WeightTarget(self.A_log),
            f"{prefix}.D": WeightTarget(self.skip),
            **self.out_proj.weight_targets({f"{prefix}.out_proj": self.config.hidden_size}),
        }
        if self.conv_bias is not None:
            targets[f"{prefix}.conv1d.bias"] = WeightTarget(self.conv_bias)
        if self.norm_weight is not None:
            targets[f"{prefix}.norm.weight"] = WeightTarget(self.norm_weight)
        return targets
