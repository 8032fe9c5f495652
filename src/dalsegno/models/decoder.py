"""The decoder shape all families share: embedding, layers of mixer and feed-forward, final norm, output head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dalsegno.models.base import CausalLM
from dalsegno.models.layers import Linear, RMSNorm, empty_parameter
from dalsegno.models.rope import RopeConfig, RotaryEmbedding
from dalsegno.models.weights import WeightTarget
from dalsegno.ops.batch import ForwardBatch, LayerCache
from dalsegno.types import LayerCacheSpec

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer", "FeedForward", "Mixer"]


class Mixer(Protocol):
    """The part of a layer that looks at other tokens of the request, through its cache."""

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: LayerCache | None) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        ...

    def cache_spec(self, layer: int) -> LayerCacheSpec:
        """Return what the layer keeps between steps."""
        ...

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors under `prefix`."""
        ...


class FeedForward(Protocol):
    """The part of a layer that looks at one token alone."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        ...

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors under `prefix`."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the shared shape needs; `norm` is the class of the layer norms and the final norm."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    norm_eps: float
    norm: type[RMSNorm]
    rope: RopeConfig
    tied: bool


class DecoderLayer(nn.Module):
    """Pre-norm residual layer.

    Attributes:
        mixer_name: the mixer's name in checkpoints, such as "self_attn".
    """

    def __init__(
        self, config: DecoderConfig, mixer_name: str, mixer: Mixer, feed_forward: FeedForward, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.mixer_name = mixer_name
        self.mixer = mixer
        self.feed_forward = feed_forward
        self.input_norm = config.norm(config.hidden_size, config.norm_eps, dtype)
        self.post_norm = config.norm(config.hidden_size, config.norm_eps, dtype)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: LayerCache | None) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        hidden = hidden + self.mixer(self.input_norm(hidden), rotation, cache)
        return hidden + self.feed_forward(self.post_norm(hidden))

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors of the layer."""
        return {
            **self.input_norm.weight_targets(f"{prefix}.input_layernorm"),
            **self.mixer.weight_targets(f"{prefix}.{self.mixer_name}"),
            **self.post_norm.weight_targets(f"{prefix}.post_attention_layernorm"),
            **self.feed_forward.weight_targets(f"{prefix}.mlp"),
        }


class Decoder(CausalLM):
    """A `CausalLM` of `DecoderLayer`s; families differ in the layers they put in."""

    layers: nn.ModuleList

    def __init__(self, config: DecoderConfig, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embedding = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.rotary = RotaryEmbedding(config.rope, dtype)
        self.final_norm = config.norm(config.hidden_size, config.norm_eps, dtype)
        self.head = None if config.tied else Linear(config.hidden_size, config.vocab_size, dtype)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request."""
        return self.config.max_model_len

    def cache_specs(self) -> list[LayerCacheSpec]:
        """Return what each layer keeps between steps."""
        return [layer.mixer.cache_spec(index) for index, layer in enumerate(self._layers())]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute `[T, hidden]` and write the caches of the batch."""
        hidden = functional.embedding(batch.token_ids, self.embedding)
        rotation = self.rotary(batch.positions)
        for layer, cache in zip(self.layers, batch.layers, strict=True):
            hidden = layer(hidden, rotation, cache)
        normed: Tensor = self.final_norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return `[N, vocab_size]` float32."""
        logits: Tensor = functional.linear(hidden, self.embedding) if self.head is None else self.head(hidden)
        return logits.float()

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors of embedding, layers, final norm and head."""
        targets = {"model.embed_tokens.weight": WeightTarget(self.embedding)}
        for index, layer in enumerate(self._layers()):
            targets.update(layer.weight_targets(f"model.layers.{index}"))
        targets.update(self.final_norm.weight_targets("model.norm"))
        if self.head is not None:
            targets.update(self.head.weight_targets({"lm_head": self.config.vocab_size}))
        return targets

    def tied_tensors(self) -> dict[str, str]:
        """Return the output head where it is the embedding itself."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tied else {}

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
