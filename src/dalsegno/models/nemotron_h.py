"""Family: NemotronHForCausalLM; every layer is one thing: Mamba2, attention without rope, an MLP or experts."""

from dataclasses import replace
from typing import ClassVar

import torch

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderConfig, DecoderLayer, DecoderNames
from dalsegno.models.dense import read_decoder_config, read_head_shape
from dalsegno.models.hybrid_fields import ATTENTION, STATE, read_layer_types
from dalsegno.models.layers import WideRMSNorm
from dalsegno.models.mamba2 import Mamba2, Mamba2Config
from dalsegno.models.nemotron_moe import GroupRoutedExperts, RoutingConfig, SquaredMLP

__all__ = ["NemotronH", "build"]

_MLP, _EXPERTS = "mlp", "moe"
_PATTERN = {"M": STATE, "*": ATTENTION, "-": _MLP, "E": _EXPERTS}
_NAMES = DecoderNames("backbone", "embeddings", "norm_f", "norm", "norm", "mixer")


class NemotronH(Decoder):
    """The shared decoder; its checkpoints may carry the multi-token-prediction layers, which are not used."""

    ignored_tensors: ClassVar[tuple[str, ...]] = (r"mtp\..*",)


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    num_heads, num_kv_heads, head_dim = read_head_shape(fields, 128, 8)
    fields.refuse("attention_bias", "the family's attention layers have no biases")
    fields.refuse("sliding_window", "the family's attention layers see all tokens")
    fields.refuse("residual_in_fp32", "the residual stream has the dtype of the weights")
    fields.choice("mlp_hidden_act", ("relu2",), "relu2")
    decoder = replace(
        read_decoder_config(
            fields,
            WideRMSNorm,
            None,
            eps_field="layer_norm_epsilon",
            default_eps=1e-5,
            act_field="mamba_hidden_act",
        ),
        names=_NAMES,
    )
    attention = AttentionConfig(decoder.hidden_size, num_heads, num_kv_heads, head_dim)
    mamba = _read_mamba(fields, decoder)
    kinds = _layer_types(fields)
    if fields.integer("num_hidden_layers", len(kinds)) != len(kinds):
        raise fields.error(
            "num_hidden_layers", fields.values["num_hidden_layers"], f"{len(kinds)}, as many as are listed"
        )
    layers = [_layer(kind, fields, decoder, attention, mamba, dtype) for kind in kinds]
    return NemotronH(decoder, layers, dtype)


def _layer(
    kind: str,
    fields: ConfigFields,
    decoder: DecoderConfig,
    attention: AttentionConfig,
    mamba: Mamba2Config,
    dtype: torch.dtype,
) -> DecoderLayer:
    if kind == STATE:
        return DecoderLayer(decoder, {"mixer": Mamba2(mamba, dtype)}, None, dtype)
    if kind == ATTENTION:
        return DecoderLayer(decoder, {"mixer": Attention(attention, dtype)}, None, dtype)
    bias = fields.flag("mlp_bias", False)
    if kind == _MLP:
        size = fields.integer("intermediate_size", 21504)
        return DecoderLayer(decoder, {}, SquaredMLP(decoder.hidden_size, size, dtype, bias=bias), dtype)
    return DecoderLayer(decoder, {}, GroupRoutedExperts(_read_routing(fields, decoder), dtype, bias=bias), dtype)


def _layer_types(fields: ConfigFields) -> list[str]:
    given = read_layer_types(fields, None, (_MLP, _EXPERTS))
    if given is not None:
        return given
    pattern = fields.require("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_PATTERN):
        raise fields.error("hybrid_override_pattern", pattern, f"made of {' '.join(_PATTERN)}")
    return [_PATTERN[letter] for letter in pattern]


def _read_mamba(fields: ConfigFields, decoder: DecoderConfig) -> Mamba2Config:
    def name(new: str, old: str) -> str:
        return old if old in fields else new

    num_heads = fields.integer("mamba_num_heads", 128)
    num_groups = fields.integer(name("n_groups", "mamba_n_groups"), 8)
    fields.check_multiple("mamba_num_heads", num_heads, "n_groups", num_groups)
    bias = fields.flag("use_bias", False)
    return Mamba2Config(
        hidden_size=decoder.hidden_size,
        num_heads=num_heads,
        head_dim=fields.integer("mamba_head_dim", 64),
        num_groups=num_groups,
        state_dim=fields.integer("ssm_state_size", 128),
        conv_kernel=fields.integer(name("conv_kernel", "mamba_d_conv"), 4, minimum=2),
        norm_eps=decoder.norm_eps,
        conv_bias=fields.flag(name("use_conv_bias", "mamba_conv_bias"), True),
        in_bias=bias,
        out_bias=bias,
        # In prefill and decode alike: an answer must not depend on how a prompt is split.
        step_limit=(fields.number(name("time_step_min", "mamba_dt_min"), 0.001), float("inf")),
    )


def _read_routing(fields: ConfigFields, decoder: DecoderConfig) -> RoutingConfig:
    config = RoutingConfig(
        hidden_size=decoder.hidden_size,
        latent_size=fields.integer("moe_latent_size") if "moe_latent_size" in fields else None,
        num_experts=fields.integer("n_routed_experts", 8),
        experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("moe_intermediate_size", 7688),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        num_groups=fields.integer("n_group", 1),
        groups_per_token=fields.integer("topk_group", 1),
        normalise_top=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    fields.check_multiple("n_routed_experts", config.num_experts, "n_group", config.num_groups)
    if config.groups_per_token > config.num_groups:
        raise fields.error("topk_group", config.groups_per_token, f"at most n_group={config.num_groups}")
    within = config.groups_per_token * config.num_experts // config.num_groups
    if config.experts_per_token > within:
        raise fields.error(
            "num_experts_per_tok", config.experts_per_token, f"at most {within}, those of topk_group groups"
        )
    return config
