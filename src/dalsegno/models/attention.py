"""The attention layer of all families: grouped heads, rotary, optional biases, query/key norms, window, output gate.

Keys and values live in paged memory behind `ops.paged_attention`; the layer sees a flat batch of tokens and no request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dalsegno.models.layers import Linear, RMSNorm, scaled
from dalsegno.models.rope import Rotation, apply_rotary
from dalsegno.models.weights import WeightTarget
from dalsegno.ops.batch import LayerCache, PagedLayerCache
from dalsegno.ops.paged_attention import paged_attention
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec

__all__ = ["Attention", "AttentionConfig"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Shape of an attention layer.

    Attributes:
        bias: whether the four projections have one.
        head_norm: norm applied to each query and key head before the rotation, or None.
        norm_eps: its epsilon.
        window: how many tokens a token sees, itself included; None is all.
        output_gate: the query projection carries, head by head, a sigmoid gate for the output.
        scale: factor on the scores; None is one over the root of head_dim.
        input_multiplier, key_multiplier, output_multiplier: factors on the layer's input, its keys, its output.
        names: what checkpoints call output projection, query norm and key norm.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    head_norm: type[RMSNorm] | None = None
    norm_eps: float = 1e-6
    window: int | None = None
    output_gate: bool = False
    scale: float | None = None
    input_multiplier: float = 1.0
    key_multiplier: float = 1.0
    output_multiplier: float = 1.0
    names: tuple[str, str, str] = ("o_proj", "q_norm", "k_norm")


class Attention(nn.Module):
    """Causal attention over a request's tokens."""

    def __init__(self, config: AttentionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.query_size = config.num_heads * config.head_dim * (2 if config.output_gate else 1)
        self.kv_size = config.num_kv_heads * config.head_dim
        rows = self.query_size + 2 * self.kv_size
        self.qkv_proj = Linear(config.hidden_size, rows, dtype, bias=config.bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, dtype, bias=config.bias)
        norm = config.head_norm
        self.q_norm = norm(config.head_dim, config.norm_eps, dtype) if norm else None
        self.k_norm = norm(config.head_dim, config.norm_eps, dtype) if norm else None

    def forward(self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`; writes the tokens' keys and values to the cache."""
        assert isinstance(cache, PagedLayerCache), "an attention layer needs a paged cache"
        config, num_tokens = self.config, hidden.shape[0]
        dim = config.head_dim
        hidden = scaled(hidden, config.input_multiplier)
        query, key, value = self.qkv_proj(hidden).split((self.query_size, self.kv_size, self.kv_size), dim=-1)
        key, value = key.unflatten(-1, (-1, dim)), value.unflatten(-1, (-1, dim))
        gate: Tensor | None = None
        if config.output_gate:
            query, gate = query.unflatten(-1, (-1, 2 * dim)).chunk(2, dim=-1)
        else:
            query = query.unflatten(-1, (-1, dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        key = scaled(key, config.key_multiplier)
        if rotation is not None:
            query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)
        output = paged_attention(query, key, value, cache, dim**-0.5 if config.scale is None else config.scale)
        if gate is not None:
            output = output * gate.sigmoid()
        return scaled(self.o_proj(output.reshape(num_tokens, -1)), config.output_multiplier)

    def cache_spec(self, layer: int) -> LayerCacheSpec:
        """Return what the layer keeps: per token one key and one value."""
        shape = (self.config.num_kv_heads, self.config.head_dim)
        parts = tuple(CachePart(name, shape, self.dtype_name) for name in ("key", "value"))
        kind = GroupKind.ATTENTION if self.config.window is None else GroupKind.WINDOW
        return LayerCacheSpec(layer, kind, parts, self.config.window)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the four projections and the head norms."""
        sizes = {"q_proj": self.query_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        output_name, query_norm, key_norm = self.config.names
        targets = {
            **self.qkv_proj.weight_targets({f"{prefix}.{name}": size for name, size in sizes.items()}),
            **self.o_proj.weight_targets({f"{prefix}.{output_name}": self.config.hidden_size}),
        }
        if self.q_norm is not None and self.k_norm is not None:
            targets.update(self.q_norm.weight_targets(f"{prefix}.{query_norm}"))
            targets.update(self.k_norm.weight_targets(f"{prefix}.{key_norm}"))
        return targets
