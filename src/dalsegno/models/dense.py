"""What the dense attention-only families share: reading the common fields, building their layers."""

from collections.abc import Sequence

import torch

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderConfig, DecoderLayer
from dalsegno.models.layers import GatedMLP, RMSNorm
from dalsegno.models.rope import read_rope_config

__all__ = ["build_dense", "read_decoder_config", "read_head_shape"]


def read_head_shape(
    fields: ConfigFields, default_head_dim: int | None = None, default_kv_heads: int | None = None
) -> tuple[int, int, int]:
    """Return `(query heads, kv heads, head_dim)`.

    Args:
        fields: the whole config.
        default_head_dim: what an absent head_dim means; None is the heads' share of the width.
        default_kv_heads: what an absent num_key_value_heads means; None (or null in the config) is one per head.
    """
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    is_null = "num_key_value_heads" in fields.values
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if is_null else default_kv_heads or num_heads)
    fields.check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    if "head_dim" not in fields and default_head_dim is None:
        fields.check_multiple("hidden_size", hidden_size, "num_attention_heads", num_heads)
    return num_heads, num_kv_heads, fields.integer("head_dim", default_head_dim or hidden_size // num_heads)


def read_decoder_config(
    fields: ConfigFields, norm: type[RMSNorm], head_dim: int, default_partial_rotary: float | None = None
) -> DecoderConfig:
    """Read the fields of `DecoderConfig`, and refuse an activation other than SiLU."""
    fields.choice("hidden_act", ("silu",), "silu")
    fields.refuse("per_layer_config", "all layers must share one configuration")
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_model_len=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm=norm,
        rope=read_rope_config(fields, head_dim, default_partial_rotary),
        tied=fields.flag("tie_word_embeddings", False),
    )


def build_dense(
    fields: ConfigFields,
    decoder: DecoderConfig,
    attention: Sequence[AttentionConfig],
    dtype: torch.dtype,
    *,
    mlp_bias: bool = False,
) -> Decoder:
    """Build a decoder of one attention and one gated MLP per entry of `attention`."""
    intermediate_size = fields.integer("intermediate_size")
    layers = [
        DecoderLayer(
            decoder,
            "self_attn",
            Attention(shape, dtype),
            GatedMLP(decoder.hidden_size, intermediate_size, dtype, bias=mlp_bias),
            dtype,
        )
        for shape in attention
    ]
    return Decoder(decoder, layers, dtype)
