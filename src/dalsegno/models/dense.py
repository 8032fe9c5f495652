"""What the dense attention-only families share: reading the common fields, building their layers."""

from collections.abc import Sequence

import torch

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderConfig, DecoderLayer
from dalsegno.models.layers import GatedMLP, RMSNorm
from dalsegno.models.rope import RopeConfig

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
    fields: ConfigFields,
    norm: type[RMSNorm],
    rope: RopeConfig | None,
    *,
    eps_field: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    act_field: str = "hidden_act",
) -> DecoderConfig:
    """Read the fields of `DecoderConfig`, and refuse an activation other than SiLU.

    Args:
        fields: the whole config.
        norm: class of the layer norms.
        rope: rotary settings; None in a model without.
        eps_field: the family's name of the norms' epsilon.
        default_eps: what its absence means.
        act_field: the family's name of the activation.
    """
    fields.choice(act_field, ("silu",), "silu")
    fields.refuse("per_layer_config", "all layers must share one configuration")
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_model_len=fields.integer("max_position_embeddings"),
        norm_eps=fields.number(eps_field, default_eps),
        norm=norm,
        rope=rope,
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
            {"self_attn": Attention(shape, dtype)},
            GatedMLP(decoder.hidden_size, intermediate_size, dtype, bias=mlp_bias),
            dtype,
        )
        for shape in attention
    ]
    return Decoder(decoder, layers, dtype)
