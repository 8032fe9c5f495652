"""Family: LlamaForCausalLM."""

import torch

from dalsegno.models.attention import AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.dense import build_dense, read_decoder_config, read_head_shape
from dalsegno.models.layers import RMSNorm
from dalsegno.models.rope import read_rope_config

__all__ = ["build"]


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    num_heads, num_kv_heads, head_dim = read_head_shape(fields)
    decoder = read_decoder_config(fields, RMSNorm, read_rope_config(fields, head_dim))
    attention = AttentionConfig(
        decoder.hidden_size, num_heads, num_kv_heads, head_dim, bias=fields.flag("attention_bias", False)
    )
    layers = [attention] * fields.integer("num_hidden_layers")
    return build_dense(fields, decoder, layers, dtype, mlp_bias=fields.flag("mlp_bias", False))
