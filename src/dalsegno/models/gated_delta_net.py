"""The gated delta net layer: a short causal convolution, then a recurrent state per value head.

Both are state layers' parts: "conv" holds the last inputs of the convolution, "recurrent" the `[key_dim, value_dim]`
state of each value head, always float32. The decay's parameters stay float32 in any dtype, since a rounded decay is
raised to the power of the distance.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dalsegno.models.layers import Linear, RMSNorm, empty_parameter
from dalsegno.models.rope import Rotation
from dalsegno.models.weights import WeightTarget
from dalsegno.ops.batch import LayerCache, StateLayerCache
from dalsegno.ops.causal_conv import causal_conv
from dalsegno.ops.gated_delta import gated_delta_rule
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec

__all__ = ["GatedDeltaNet", "GatedDeltaNetConfig"]


@dataclass(frozen=True, slots=True)
class GatedDeltaNetConfig:
    """Shape of a gated delta net layer; `num_value_heads` is a multiple of `num_key_heads`.

    Attributes:
        interleaved: checkpoints hold the input projections by key head in two tensors, else plainly in four.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    interleaved: bool = True

    @property
    def key_size(self) -> int:
        """Channels of all key (or query) heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size


class GatedDeltaNet(nn.Module):
    """Linear attention with a decaying, self-correcting state.

    `in_proj` computes, in this order of rows: queries, keys, values, output gate z, beta, decay input. Checkpoints
    may interleave them by key head in two tensors; `weight_targets` reorders.
    """

    def __init__(self, config: GatedDeltaNetConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype_name = str(dtype).removeprefix("torch.")
        heads = config.num_value_heads
        self.in_proj = Linear(config.hidden_size, config.conv_size + config.value_size + 2 * heads, dtype)
        self.conv_weight = empty_parameter(config.conv_size, config.conv_kernel, dtype=dtype)
        self.dt_bias = empty_parameter(heads, dtype=torch.float32)
        self.A_log = empty_parameter(heads, dtype=torch.float32)
        self.norm = RMSNorm(config.value_dim, config.norm_eps, dtype)
        self.out_proj = Linear(config.value_size, config.hidden_size, dtype)

    def forward(self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`; moves the state on. The layer has no use for the rotation."""
        assert isinstance(cache, StateLayerCache), "a gated delta net layer needs a state cache"
        config, num_tokens = self.config, hidden.shape[0]
        heads = config.num_value_heads
        mixed, gate, beta, decay = self.in_proj(hidden).split(
            (config.conv_size, config.value_size, heads, heads), dim=-1
        )
        mixed = causal_conv(mixed, self.conv_weight, None, cache, part="conv", activation="silu")
        query, key, value = mixed.split((config.key_size, config.key_size, config.value_size), dim=-1)
        output = gated_delta_rule(
            query.unflatten(-1, (-1, config.key_dim)),
            key.unflatten(-1, (-1, config.key_dim)),
            value.unflatten(-1, (heads, config.value_dim)),
            -self.A_log.exp() * functional.softplus(decay.float() + self.dt_bias),
            beta.sigmoid(),
            cache,
            part="recurrent",
        )
        output = self.norm(output.to(hidden.dtype), gate.unflatten(-1, (heads, config.value_dim)))
        projected: Tensor = self.out_proj(output.reshape(num_tokens, -1))
        return projected

    def cache_spec(self, layer: int) -> LayerCacheSpec:
        """Return what the layer keeps: the convolution's last inputs, oldest first, and the state of each head."""
        config = self.config
        conv = CachePart("conv", (config.conv_size, config.conv_kernel - 1), self.dtype_name)
        shape = (config.num_value_heads, config.key_dim, config.value_dim)
        return LayerCacheSpec(layer, GroupKind.STATE, (conv, CachePart("recurrent", shape, "float32")))

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors; interleaved input projections are reordered."""
        return {
            **self._input_targets(prefix),
            f"{prefix}.conv1d.weight": WeightTarget(self.conv_weight[:, None]),
            f"{prefix}.dt_bias": WeightTarget(self.dt_bias),
            f"{prefix}.A_log": WeightTarget(self.A_log),
            **self.norm.weight_targets(f"{prefix}.norm"),
            **self.out_proj.weight_targets({f"{prefix}.out_proj": self.config.hidden_size}),
        }

    def _input_targets(self, prefix: str) -> dict[str, WeightTarget]:
        config, weight = self.config, self.in_proj.weight
        if not config.interleaved:
            sizes = {"qkv": config.conv_size, "z": config.value_size}
            sizes |= {"b": config.num_value_heads, "a": config.num_value_heads}
            return self.in_proj.weight_targets({f"{prefix}.in_proj_{name}": size for name, size in sizes.items()})
        values = config.num_value_heads // config.num_key_heads
        wide = (config.key_dim, config.key_dim, values * config.value_dim, values * config.value_dim)
        split = config.conv_size + config.value_size
        return {
            f"{prefix}.in_proj_qkvz.weight": WeightTarget(weight[:split], _deinterleave(config.num_key_heads, wide)),
            f"{prefix}.in_proj_ba.weight": WeightTarget(
                weight[split:], _deinterleave(config.num_key_heads, (values, values))
            ),
        }


def _deinterleave(num_heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Return, for rows that hold per head parts of `sizes`, the order that puts each part's heads together."""
    rows = torch.arange(num_heads * sum(sizes), device="cpu").view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])
