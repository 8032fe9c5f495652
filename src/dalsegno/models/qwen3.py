"""Family: Qwen3ForCausalLM, with full and sliding attention layers."""

from dataclasses import replace

import torch

from dalsegno.models.attention import AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.dense import build_dense, read_decoder_config, read_head_shape
from dalsegno.models.layers import RMSNorm
from dalsegno.models.rope import read_rope_config

__all__ = ["build"]

_DEFAULT_HEAD_DIM = 128
_DEFAULT_KV_HEADS = 32
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    num_heads, num_kv_heads, head_dim = read_head_shape(fields, _DEFAULT_HEAD_DIM, _DEFAULT_KV_HEADS)
    decoder = read_decoder_config(fields, RMSNorm, read_rope_config(fields, head_dim))
    full = AttentionConfig(
        decoder.hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        bias=fields.flag("attention_bias", False),
        head_norm=RMSNorm,
        norm_eps=decoder.norm_eps,
    )
    return build_dense(fields, decoder, [replace(full, window=window) for window in _windows(fields)], dtype)


def _windows(fields: ConfigFields) -> list[int | None]:
    """Return each layer's window in tokens, None for full attention."""
    num_layers = fields.integer("num_hidden_layers")
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", _DEFAULT_WINDOW)
    if "layer_types" not in fields:
        first = fields.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        return [window if layer >= first else None for layer in range(num_layers)]
    types = fields.strings("layer_types", ("full_attention", "sliding_attention"), num_layers)
    if window is None and "sliding_attention" in types:
        raise fields.error("use_sliding_window", False, "true when layer_types has sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in types]
