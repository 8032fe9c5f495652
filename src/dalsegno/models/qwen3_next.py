"""Family: Qwen3NextForCausalLM, gated delta net layers with a gated attention layer every so often, dense or MoE."""

from typing import ClassVar

import torch

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderConfig, DecoderLayer, FeedForward, Mixer
from dalsegno.models.dense import read_decoder_config, read_head_shape
from dalsegno.models.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from dalsegno.models.layers import CentredRMSNorm, GatedMLP
from dalsegno.models.moe import MixtureConfig, MixtureOfExperts
from dalsegno.models.rope import read_rope_config

__all__ = ["Qwen3Next", "build"]

_DEFAULT_HEAD_DIM = 256
_DEFAULT_KV_HEADS = 2
_DEFAULT_PARTIAL_ROTARY = 0.25
_LINEAR, _FULL = "linear_attention", "full_attention"


class Qwen3Next(Decoder):
    """The shared decoder; its checkpoints may carry the multi-token-prediction layer, which is not used."""

    ignored_tensors: ClassVar[tuple[str, ...]] = (r"mtp\..*",)


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    heads = read_head_shape(fields, _DEFAULT_HEAD_DIM, _DEFAULT_KV_HEADS)
    decoder = read_decoder_config(fields, CentredRMSNorm, read_rope_config(fields, heads[2], _DEFAULT_PARTIAL_ROTARY))
    attention = AttentionConfig(
        decoder.hidden_size,
        *heads,
        bias=fields.flag("attention_bias", False),
        head_norm=CentredRMSNorm,
        norm_eps=decoder.norm_eps,
        output_gate=True,
    )
    linear = _read_linear(fields, decoder)
    layers = []
    for index, kind in enumerate(_layer_types(fields)):
        mixer: Mixer = GatedDeltaNet(linear, dtype) if kind == _LINEAR else Attention(attention, dtype)
        name = "linear_attn" if kind == _LINEAR else "self_attn"
        layers.append(DecoderLayer(decoder, {name: mixer}, _feed_forward(fields, decoder, index, dtype), dtype))
    return Qwen3Next(decoder, layers, dtype)


def _layer_types(fields: ConfigFields) -> list[str]:
    num_layers = fields.integer("num_hidden_layers")
    if "layer_types" in fields:
        return fields.strings("layer_types", (_LINEAR, _FULL), num_layers)
    interval = fields.integer("full_attention_interval", 4)
    return [_LINEAR if (index + 1) % interval else _FULL for index in range(num_layers)]


def _read_linear(fields: ConfigFields, decoder: DecoderConfig) -> GatedDeltaNetConfig:
    config = GatedDeltaNetConfig(
        hidden_size=decoder.hidden_size,
        num_key_heads=fields.integer("linear_num_key_heads", 16),
        num_value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        norm_eps=decoder.norm_eps,
    )
    fields.check_multiple(
        "linear_num_value_heads", config.num_value_heads, "linear_num_key_heads", config.num_key_heads
    )
    return config


def _feed_forward(fields: ConfigFields, decoder: DecoderConfig, index: int, dtype: torch.dtype) -> FeedForward:
    """A layer is dense if it is listed in mlp_only_layers or not one of every decoder_sparse_step layers."""
    num_experts = fields.integer("num_experts", 512, minimum=0)
    dense_layers = fields.indices("mlp_only_layers", fields.integer("num_hidden_layers"))
    sparse = num_experts > 0 and (index + 1) % fields.integer("decoder_sparse_step", 1) == 0
    if index in dense_layers or not sparse:
        return GatedMLP(decoder.hidden_size, fields.integer("intermediate_size", 5632), dtype)
    experts_per_token = fields.integer("num_experts_per_tok", 10)
    if experts_per_token > num_experts:
        raise fields.error("num_experts_per_tok", experts_per_token, f"at most num_experts={num_experts}")
    mixture = MixtureConfig(
        decoder.hidden_size,
        num_experts,
        experts_per_token,
        intermediate_size=fields.integer("moe_intermediate_size", 512),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 512),
        normalise_top=fields.flag("norm_topk_prob", True),
    )
    return MixtureOfExperts(mixture, dtype)
