"""Families: Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM, also as the text part of the ForConditionalGeneration ones.

Text positions are the same on all axes of the multimodal rotary embedding, so it is the plain one.
"""

from dataclasses import replace
from typing import ClassVar

import torch

from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderConfig, DecoderNames, FeedForward
from dalsegno.models.layers import GatedMLP
from dalsegno.models.moe import MixtureConfig, MixtureOfExperts
from dalsegno.models.qwen3_next import build_layers, read_decoder

__all__ = ["Qwen35", "build"]

_DEFAULT_KV_HEADS = {False: 4, True: 2}


class Qwen35(Decoder):
    """The shared decoder; vision and multi-token prediction, which checkpoints may carry, are not used."""

    ignored_tensors: ClassVar[tuple[str, ...]] = (r"mtp\..*", r"model\.visual\..*")


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    sparse = any("Moe" in name for name in fields.require("architectures"))
    text = fields.section("text_config") if "text_config" in fields else fields
    decoder = read_decoder(text, _DEFAULT_KV_HEADS[sparse])
    if text is not fields:
        decoder = replace(
            decoder,
            tied=fields.flag("tie_word_embeddings", decoder.tied),
            names=DecoderNames(model="model.language_model"),
        )
    if not text.flag("attn_output_gate", True):
        raise text.error("attn_output_gate", False, "true")
    num_layers = text.integer("num_hidden_layers", 40 if sparse else 32)
    make = _experts if sparse else _mlp
    parts = [make(text, decoder, dtype) for _ in range(num_layers)]
    return Qwen35(
        decoder, build_layers(text, decoder, parts, _DEFAULT_KV_HEADS[sparse], dtype, interleaved=False), dtype
    )


def _mlp(fields: ConfigFields, decoder: DecoderConfig, dtype: torch.dtype) -> FeedForward:
    return GatedMLP(decoder.hidden_size, fields.integer("intermediate_size", 12288), dtype)


def _experts(fields: ConfigFields, decoder: DecoderConfig, dtype: torch.dtype) -> FeedForward:
    fields.refuse("mlp_only_layers", "every layer of the family has experts")
    if not fields.flag("norm_topk_prob", True):
        raise fields.error("norm_topk_prob", False, "true")
    num_experts, per_token = fields.integer("num_experts", 256), fields.integer("num_experts_per_tok", 8)
    if per_token > num_experts:
        raise fields.error("num_experts_per_tok", per_token, f"at most num_experts={num_experts}")
    mixture = MixtureConfig(
        decoder.hidden_size,
        num_experts,
        per_token,
        intermediate_size=fields.integer("moe_intermediate_size", 512),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 512),
        normalise_top=True,
    )
    return MixtureOfExperts(mixture, dtype)
