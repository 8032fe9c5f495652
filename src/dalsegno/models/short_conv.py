"""The short convolution layer: a gated causal convolution, whose last inputs are all the state it has."""

import torch
from torch import Tensor, nn

from dalsegno.models.layers import Linear, empty_parameter
from dalsegno.models.rope import Rotation
from dalsegno.models.weights import WeightTarget
from dalsegno.ops.batch import LayerCache, StateLayerCache
from dalsegno.ops.causal_conv import causal_conv
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec

__all__ = ["ShortConv"]


class ShortConv(nn.Module):
    """`out(c * conv(b * x))`; `in_proj` computes, in this order of rows, b, c and x."""

    def __init__(self, hidden_size: int, kernel: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.in_proj = Linear(hidden_size, 3 * hidden_size, dtype, bias=bias)
        self.conv_weight = empty_parameter(hidden_size, kernel, dtype=dtype)
        self.conv_bias = empty_parameter(hidden_size, dtype=dtype) if bias else None
        self.out_proj = Linear(hidden_size, hidden_size, dtype, bias=bias)

    def forward(self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`; moves the state on. The layer has no use for the rotation."""
        assert isinstance(cache, StateLayerCache), "a short convolution layer needs a state cache"
        gate_in, gate_out, value = self.in_proj(hidden).chunk(3, dim=-1)
        mixed = causal_conv(gate_in * value, self.conv_weight, self.conv_bias, cache, part="conv", activation=None)
        projected: Tensor = self.out_proj(gate_out * mixed)
        return projected

    def cache_spec(self, layer: int) -> LayerCacheSpec:
        """Return what the layer keeps: the convolution's last inputs, oldest first."""
        channels, kernel = self.conv_weight.shape
        return LayerCacheSpec(layer, GroupKind.STATE, (CachePart("conv", (channels, kernel - 1), self.dtype_name),))

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors."""
        targets = {
            **self.in_proj.weight_targets({f"{prefix}.in_proj": self.in_proj.weight.shape[0]}),
            f"{prefix}.conv.weight": WeightTarget(self.conv_weight[:, None]),
            **self.out_proj.weight_targets({f"{prefix}.out_proj": self.out_proj.weight.shape[0]}),
        }
        if self.conv_bias is not None:
            targets[f"{prefix}.conv.bias"] = WeightTarget(self.conv_bias)
        return targets
