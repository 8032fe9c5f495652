"""Family: Qwen3NextForCausalLM, gated delta net layers with a gated attention layer every so often, dense or MoE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderConfig, DecoderLayer, FeedForward, Mixer
from dalsegno.models.dense import read_decoder_config, read_head_shape
from dalsegno.models.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from dalsegno.models.hybrid_fields import ATTENTION, STATE, read_layer_types
from dalsegno.models.layers import CentredRMSNorm, GatedMLP
from dalsegno.models.moe import MixtureConfig, MixtureOfExperts
from dalsegno.models.rope import read_rope_config

__all__ = ["Qwen3Next", "build", "build_layers", "read_decoder"]

_DEFAULT_HEAD_DIM = 256
_DEFAULT_KV_HEADS = 2
_DEFAULT_PARTIAL_ROTARY = 0.25


class Qwen3Next(Decoder):
    """The shared decoder; its checkpoints may carry the multi-token-prediction layer, which is not used."""

    ignored_tensors: ClassVar[tuple[str, ...]] = (r"mtp\..*",)


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    decoder = read_decoder(fields, _DEFAULT_KV_HEADS)
    num_layers = fields.integer("num_hidden_layers")
    parts = [_feed_forward(fields, decoder, index, dtype) for index in range(num_layers)]
    return Qwen3Next(decoder, build_layers(fields, decoder, parts, _DEFAULT_KV_HEADS, dtype, interleaved=True), dtype)


def read_decoder(fields: ConfigFields, default_kv_heads: int) -> DecoderConfig:
    """Read the shared shape; `default_kv_heads` is what an absent num_key_value_heads means."""
    _, _, head_dim = read_head_shape(fields, _DEFAULT_HEAD_DIM, default_kv_heads)
    return read_decoder_config(fields, CentredRMSNorm, read_rope_config(fields, head_dim, _DEFAULT_PARTIAL_ROTARY))


def build_layers(
    fields: ConfigFields,
    decoder: DecoderConfig,
    feed_forward: Sequence[FeedForward],
    default_kv_heads: int,
    dtype: torch.dtype,
    *,
    interleaved: bool,
) -> list[DecoderLayer]:
    """Build one layer per entry of `feed_forward`, its mixer by the config.

    Args:
        fields: the whole config.
        decoder: what `read_decoder` read from it.
        feed_forward: of each layer.
        default_kv_heads: what an absent num_key_value_heads means.
        dtype: of the parameters.
        interleaved: how checkpoints hold the input projections, see `GatedDeltaNetConfig`.
    """
    attention = AttentionConfig(
        decoder.hidden_size,
        *read_head_shape(fields, _DEFAULT_HEAD_DIM, default_kv_heads),
        bias=fields.flag("attention_bias", False),
        head_norm=CentredRMSNorm,
        norm_eps=decoder.norm_eps,
        output_gate=True,
    )
    linear = replace(_read_linear(fields, decoder), interleaved=interleaved)
    layers = []
    for kind, part in zip(_layer_types(fields, len(feed_forward)), feed_forward, strict=True):
        mixer: Mixer = GatedDeltaNet(linear, dtype) if kind == STATE else Attention(attention, dtype)
        name = "linear_attn" if kind == STATE else "self_attn"
        layers.append(DecoderLayer(decoder, {name: mixer}, part, dtype))
    return layers


def _layer_types(fields: ConfigFields, num_layers: int) -> list[str]:
    given = read_layer_types(fields, num_layers)
    if given is not None:
        return given
    interval = fields.integer("full_attention_interval", 4)
    return [STATE if (index + 1) % interval else ATTENTION for index in range(num_layers)]


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
