"""Family: BambaForCausalLM, Mamba2 layers with an attention layer every so often."""

from dataclasses import replace

import torch

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderLayer, DecoderNames, Mixer
from dalsegno.models.dense import read_decoder_config, read_head_shape
from dalsegno.models.hybrid_fields import read_mamba2
from dalsegno.models.layers import GatedMLP, RMSNorm
from dalsegno.models.mamba2 import Mamba2
from dalsegno.models.rope import read_rope_config

__all__ = ["build"]

_NAMES = DecoderNames(final_norm="final_layernorm", post_norm="pre_ff_layernorm", feed_forward="feed_forward")
_DEFAULT_KV_HEADS = 8
_PARTIAL_ROTARY = 0.5


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    num_heads, num_kv_heads, head_dim = read_head_shape(fields, default_kv_heads=_DEFAULT_KV_HEADS)
    decoder = read_decoder_config(
        fields, RMSNorm, read_rope_config(fields, head_dim, _PARTIAL_ROTARY), default_eps=1e-5
    )
    decoder = replace(decoder, names=_NAMES)
    bias = fields.flag("attention_bias", False)
    attention = AttentionConfig(decoder.hidden_size, num_heads, num_kv_heads, head_dim, bias=bias)
    mamba = read_mamba2(fields, decoder.hidden_size, decoder.norm_eps)
    intermediate_size, mlp_bias = fields.integer("intermediate_size", 14336), fields.flag("mlp_bias", False)
    num_layers = fields.integer("num_hidden_layers", 32)
    attending = fields.indices("attn_layer_indices", num_layers)
    layers = []
    for index in range(num_layers):
        mixer: Mixer = Attention(attention, dtype) if index in attending else Mamba2(mamba, dtype)
        name = "self_attn" if index in attending else "mamba"
        feed_forward = GatedMLP(decoder.hidden_size, intermediate_size, dtype, bias=mlp_bias)
        layers.append(DecoderLayer(decoder, {name: mixer}, feed_forward, dtype))
    return Decoder(decoder, layers, dtype)
