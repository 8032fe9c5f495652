"""Family: FalconH1ForCausalLM, Mamba2 and attention side by side in every layer, with factors on nearly everything."""

from dataclasses import replace

import torch

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderConfig, DecoderLayer, DecoderNames, Mixer
from dalsegno.models.dense import read_decoder_config, read_head_shape
from dalsegno.models.hybrid_fields import read_mamba2
from dalsegno.models.layers import GatedMLP, RMSNorm
from dalsegno.models.mamba2 import GateOrder, Mamba2, Mamba2Config
from dalsegno.models.rope import read_rope_config

__all__ = ["build"]

_NAMES = DecoderNames(final_norm="final_layernorm", post_norm="pre_ff_layernorm", feed_forward="feed_forward")
_DEFAULT_KV_HEADS = 8


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    num_heads, num_kv_heads, head_dim = read_head_shape(fields, default_kv_heads=_DEFAULT_KV_HEADS)
    decoder = replace(
        read_decoder_config(fields, RMSNorm, read_rope_config(fields, head_dim), default_eps=1e-5),
        names=_NAMES,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
    )
    attention = AttentionConfig(
        decoder.hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        bias=fields.flag("attention_bias", False),
        input_multiplier=fields.number("attention_in_multiplier", 1.0),
        key_multiplier=fields.number("key_multiplier", 1.0),
        output_multiplier=fields.number("attention_out_multiplier", 1.0),
    )
    if not fields.flag("mamba_use_mlp", True):
        raise fields.error("mamba_use_mlp", False, "true")
    mamba = _read_mamba(fields, decoder)
    size, bias = fields.integer("intermediate_size", 14336), fields.flag("mlp_bias", False)
    gate, down = fields.numbers("mlp_multipliers", 2)
    layers = []
    for _ in range(fields.integer("num_hidden_layers", 32)):
        feed_forward = GatedMLP(decoder.hidden_size, size, dtype, bias=bias, multipliers=(gate, down))
        mixers: dict[str, Mixer] = {"mamba": Mamba2(mamba, dtype), "self_attn": Attention(attention, dtype)}
        layers.append(DecoderLayer(decoder, mixers, feed_forward, dtype))
    return Decoder(decoder, layers, dtype)


def _read_mamba(fields: ConfigFields, decoder: DecoderConfig) -> Mamba2Config:
    # Null is mamba_expand times the hidden size, absent is the family's default.
    null = "mamba_d_ssm" in fields.values and "mamba_d_ssm" not in fields
    inner_size = None if null else fields.integer("mamba_d_ssm", 1024)
    gate_order = GateOrder.NO_NORM
    if fields.flag("mamba_rms_norm", False):
        after = fields.flag("mamba_norm_before_gate", True)
        gate_order = GateOrder.AFTER_NORM if after else GateOrder.BEFORE_NORM
    return replace(
        read_mamba2(fields, decoder.hidden_size, decoder.norm_eps, inner_size=inner_size),
        out_bias=fields.flag("projectors_bias", False),
        gate_order=gate_order,
        input_multiplier=fields.number("ssm_in_multiplier", 1.0),
        output_multiplier=fields.number("ssm_out_multiplier", 1.0),
        part_multipliers=fields.numbers("ssm_multipliers", 5),
    )
