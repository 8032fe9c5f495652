"""Family: Lfm2ForCausalLM, short convolution layers with an attention layer every so often."""

from dataclasses import replace

import torch

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderLayer, DecoderNames, Mixer
from dalsegno.models.dense import read_decoder_config, read_head_shape
from dalsegno.models.hybrid_fields import ATTENTION, read_layer_types
from dalsegno.models.layers import GatedMLP, MLPNames, RMSNorm
from dalsegno.models.rope import read_rope_config
from dalsegno.models.short_conv import ShortConv

__all__ = ["build"]

_CONV = "conv"
_NAMES = DecoderNames(
    final_norm="embedding_norm", input_norm="operator_norm", post_norm="ffn_norm", feed_forward="feed_forward"
)
_MLP_NAMES = MLPNames(gate="w1", up="w3", down="w2")
_DEFAULT_KV_HEADS = 8
_DEFAULT_THETA = 1_000_000.0


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    num_heads, num_kv_heads, head_dim = read_head_shape(fields, default_kv_heads=_DEFAULT_KV_HEADS)
    rope = read_rope_config(fields, head_dim, default_theta=_DEFAULT_THETA)
    decoder = replace(
        read_decoder_config(fields, RMSNorm, rope, eps_field="norm_eps", default_eps=1e-5),
        tied=fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
        names=_NAMES,
    )
    attention = AttentionConfig(
        decoder.hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        head_norm=RMSNorm,
        norm_eps=decoder.norm_eps,
        names=("out_proj", "q_layernorm", "k_layernorm"),
    )
    kernel, bias = fields.integer("conv_L_cache", 3, minimum=2), fields.flag("conv_bias", False)
    size = _intermediate_size(fields)
    layers = []
    for kind in _layer_types(fields):
        attends = kind == ATTENTION
        mixer: Mixer = (
            Attention(attention, dtype) if attends else ShortConv(decoder.hidden_size, kernel, dtype, bias=bias)
        )
        feed_forward = GatedMLP(decoder.hidden_size, size, dtype, names=_MLP_NAMES)
        layers.append(DecoderLayer(decoder, {"self_attn" if attends else "conv": mixer}, feed_forward, dtype))
    return Decoder(decoder, layers, dtype)


def _layer_types(fields: ConfigFields) -> list[str]:
    num_layers = fields.integer("num_hidden_layers", 32)
    given = read_layer_types(fields, num_layers, (_CONV,))
    if given is not None:
        return [ATTENTION if kind == ATTENTION else _CONV for kind in given]
    if "full_attn_idxs" not in fields:
        return [ATTENTION] * num_layers
    attending = fields.indices("full_attn_idxs", num_layers)
    return [ATTENTION if index in attending else _CONV for index in range(num_layers)]


def _intermediate_size(fields: ConfigFields) -> int:
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    null = "block_ffn_dim_multiplier" in fields.values and "block_ffn_dim_multiplier" not in fields
    if null:
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
    multiple = fields.integer("block_multiple_of", 256)
    return multiple * -(-size // multiple)
