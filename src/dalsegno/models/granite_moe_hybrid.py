"""Family: GraniteMoeHybridForCausalLM, Mamba2 and attention layers, dense or MoE beside a shared MLP."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from dalsegno.models.attention import Attention, AttentionConfig
from dalsegno.models.base import CausalLM
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.decoder import Decoder, DecoderConfig, DecoderLayer, DecoderNames, Mixer
from dalsegno.models.dense import read_decoder_config, read_head_shape
from dalsegno.models.hybrid_fields import STATE, read_layer_types, read_mamba2
from dalsegno.models.layers import GatedMLP, Linear, MLPNames, RMSNorm
from dalsegno.models.mamba2 import Mamba2
from dalsegno.models.moe import Experts
from dalsegno.models.rope import read_rope_config
from dalsegno.models.weights import FusedTensor, WeightTarget

__all__ = ["build"]

_SHARED_NAMES = MLPNames(down="output_linear", gate_up="input_linear")


class _FeedForward(nn.Module):
    """A shared MLP, plus top-k routed experts where the model has any."""

    def __init__(self, shared: GatedMLP, experts: Experts | None, experts_per_token: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared = shared
        self.experts = experts
        self.experts_per_token = experts_per_token
        hidden_size = shared.down_proj.weight.shape[0]
        self.router = Linear(hidden_size, experts.down.shape[0], dtype) if experts is not None else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        shared: Tensor = self.shared(hidden)
        if self.experts is None or self.router is None:
            return shared
        scores, experts = self.router(hidden).topk(self.experts_per_token, dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(hidden.dtype)
        routed: Tensor = self.experts(hidden, experts, weights)
        return routed + shared

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the shared MLP, and router and experts in one piece each."""
        targets = self.shared.weight_targets(f"{prefix}.shared_mlp")
        if self.experts is not None and self.router is not None:
            name = f"{prefix}.block_sparse_moe"
            targets |= self.router.weight_targets({f"{name}.router.layer": self.experts.down.shape[0]})
            targets[f"{name}.input_linear.weight"] = WeightTarget(self.experts.up)
            targets[f"{name}.output_linear.weight"] = WeightTarget(self.experts.down)
        return targets

    def fused_tensors(self, prefix: str) -> dict[str, FusedTensor]:
        """Return nothing: there is one spelling."""
        return {}


def build(fields: ConfigFields, dtype: torch.dtype) -> CausalLM:
    """Build the model on the ambient device, with empty parameters.

    Raises:
        CheckpointError: naming the config field that is missing or not supported.
    """
    num_heads, num_kv_heads, head_dim = read_head_shape(fields)
    decoder = _read_decoder(fields, head_dim)
    attention = AttentionConfig(
        decoder.hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        bias=fields.flag("attention_bias", False),
        scale=fields.number("attention_multiplier", 1.0),
    )
    mamba = read_mamba2(fields, decoder.hidden_size, decoder.norm_eps)
    num_layers = fields.integer("num_hidden_layers", 32)
    layers = []
    for kind in read_layer_types(fields, num_layers) or [STATE] * num_layers:
        mixer: Mixer = Mamba2(mamba, dtype) if kind == STATE else Attention(attention, dtype)
        name = "mamba" if kind == STATE else "self_attn"
        layers.append(DecoderLayer(decoder, {name: mixer}, _feed_forward(fields, decoder, dtype), dtype))
    return Decoder(decoder, layers, dtype)


def _read_decoder(fields: ConfigFields, head_dim: int) -> DecoderConfig:
    fields.choice("normalization_function", ("rmsnorm",), "rmsnorm")
    rotary = fields.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    return replace(
        read_decoder_config(fields, RMSNorm, read_rope_config(fields, head_dim) if rotary else None),
        names=DecoderNames(feed_forward=""),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )


def _feed_forward(fields: ConfigFields, decoder: DecoderConfig, dtype: torch.dtype) -> _FeedForward:
    hidden_size = decoder.hidden_size
    shared = GatedMLP(hidden_size, fields.integer("shared_intermediate_size", 1024), dtype, names=_SHARED_NAMES)
    num_experts = fields.integer("num_local_experts", 8, minimum=0)
    per_token = fields.integer("num_experts_per_tok", 2, minimum=0 if num_experts == 0 else 1)
    if num_experts == 0:
        return _FeedForward(shared, None, 0, dtype)
    if per_token > num_experts:
        raise fields.error("num_experts_per_tok", per_token, f"at most num_local_experts={num_experts}")
    experts = Experts(hidden_size, num_experts, fields.integer("intermediate_size"), dtype)
    return _FeedForward(shared, experts, per_token, dtype)
