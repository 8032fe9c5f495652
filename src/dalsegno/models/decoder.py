"""The decoder shape all families share: embedding, layers of mixers and feed-forward, final norm, output head.

A layer has one mixer (two where attention and a state run side by side, none where it only feeds forward). Mixers
number their caches in order: cache i of a model is what its i-th mixer keeps, `ForwardBatch.layers[i]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dalsegno.models.base import CausalLM
from dalsegno.models.layers import Linear, RMSNorm, empty_parameter, scaled
from dalsegno.models.rope import RopeConfig, RotaryEmbedding, Rotation
from dalsegno.models.weights import FusedTensor, WeightTarget
from dalsegno.ops.batch import ForwardBatch, LayerCache
from dalsegno.ops.linear import linear
from dalsegno.types import LayerCacheSpec

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer", "DecoderNames", "FeedForward", "Mixer"]


class Mixer(Protocol):
    """The part of a layer that looks at other tokens of the request, through its cache."""

    def __call__(self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        ...

    def cache_spec(self, layer: int) -> LayerCacheSpec:
        """Return what the mixer keeps between steps."""
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

    def fused_tensors(self, prefix: str) -> dict[str, FusedTensor]:
        """Return tensors a checkpoint may hold instead of several of `weight_targets`."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """What a family's checkpoints call the parts; `feed_forward` is empty where its parts lie in the layer itself."""

    model: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    feed_forward: str = "mlp"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the shared shape needs.

    Attributes:
        norm: class of the layer norms and the final norm.
        rope: None in a family without rotary embedding.
        embedding_multiplier: factor on embeddings.
        residual_multiplier: factor on what mixers and feed-forward add to the residual stream.
        logits_multiplier: factor on logits.
    """

    vocab_size: int
    hidden_size: int
    max_model_len: int
    norm_eps: float
    norm: type[RMSNorm]
    rope: RopeConfig | None
    tied: bool
    names: DecoderNames = DecoderNames()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0


class DecoderLayer(nn.Module):
    """Pre-norm residual layer: mixers side by side, then the feed-forward part; each has its norm.

    Attributes:
        mixers: by their names in checkpoints, such as "self_attn".
    """

    mixers: nn.ModuleList

    def __init__(
        self,
        config: DecoderConfig,
        mixers: Mapping[str, Mixer],
        feed_forward: FeedForward | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert mixers or feed_forward is not None, "a layer does something"
        self.names = config.names
        self.residual_multiplier = config.residual_multiplier
        self.mixer_names = tuple(mixers)
        self.mixers = nn.ModuleList()
        for mixer in mixers.values():
            assert isinstance(mixer, nn.Module), "a mixer is a module"
            self.mixers.append(mixer)
        self.feed_forward = feed_forward
        self.input_norm = config.norm(config.hidden_size, config.norm_eps, dtype) if mixers else None
        self.post_norm = config.norm(config.hidden_size, config.norm_eps, dtype) if feed_forward else None

    def forward(self, hidden: Tensor, rotation: Rotation, caches: Sequence[LayerCache | None]) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`; `caches` has one entry per mixer."""
        if self.input_norm is not None:
            normed = self.input_norm(hidden)
            for mixer, cache in zip(self.mixers, caches, strict=True):
                hidden = hidden + scaled(mixer(normed, rotation, cache), self.residual_multiplier)
        if self.feed_forward is not None and self.post_norm is not None:
            hidden = hidden + scaled(self.feed_forward(self.post_norm(hidden)), self.residual_multiplier)
        return hidden

    def named_mixers(self) -> list[tuple[str, Mixer]]:
        """Return the mixers with their names in checkpoints, in the order of their caches."""
        return list(zip(self.mixer_names, cast("list[Mixer]", list(self.mixers)), strict=True))

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors of the layer."""
        targets: dict[str, WeightTarget] = {}
        if self.input_norm is not None:
            targets.update(self.input_norm.weight_targets(f"{prefix}.{self.names.input_norm}"))
        for name, mixer in self.named_mixers():
            targets.update(mixer.weight_targets(f"{prefix}.{name}"))
        if self.feed_forward is not None and self.post_norm is not None:
            targets.update(self.post_norm.weight_targets(f"{prefix}.{self.names.post_norm}"))
            targets.update(self.feed_forward.weight_targets(self._feed_forward_prefix(prefix)))
        return targets

    def fused_tensors(self, prefix: str) -> dict[str, FusedTensor]:
        """Return tensors a checkpoint may hold instead of several of `weight_targets`."""
        if self.feed_forward is None:
            return {}
        return self.feed_forward.fused_tensors(self._feed_forward_prefix(prefix))

    def _feed_forward_prefix(self, prefix: str) -> str:
        return f"{prefix}.{self.names.feed_forward}" if self.names.feed_forward else prefix


class Decoder(CausalLM):
    """A `CausalLM` of `DecoderLayer`s; families differ in the layers they put in."""

    layers: nn.ModuleList

    def __init__(self, config: DecoderConfig, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embedding = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.rotary = RotaryEmbedding(config.rope, dtype) if config.rope else None
        self.final_norm = config.norm(config.hidden_size, config.norm_eps, dtype)
        self.head = None if config.tied else Linear(config.hidden_size, config.vocab_size, dtype)
        ends = list(accumulate(len(layer.mixers) for layer in layers))
        self._cache_spans = list(zip([0, *ends], ends, strict=False))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request."""
        return self.config.max_model_len

    def cache_specs(self) -> list[LayerCacheSpec]:
        """Return what each mixer keeps between steps, numbered from 0 without gaps."""
        mixers = [mixer for layer in self._layers() for _, mixer in layer.named_mixers()]
        return [mixer.cache_spec(index) for index, mixer in enumerate(mixers)]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute `[T, hidden]` and write the caches of the batch."""
        hidden = scaled(functional.embedding(batch.token_ids, self.embedding), self.config.embedding_multiplier)
        rotation = self.rotary(batch.positions) if self.rotary is not None else None
        assert len(batch.layers) == self._cache_spans[-1][1], "a batch has one cache per mixer"
        for layer, (begin, end) in zip(self.layers, self._cache_spans, strict=True):
            hidden = layer(hidden, rotation, batch.layers[begin:end])
        normed: Tensor = self.final_norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return `[N, vocab_size]` float32."""
        logits: Tensor = linear(hidden, self.embedding) if self.head is None else self.head(hidden)
        return scaled(logits.float(), self.config.logits_multiplier)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the checkpoint tensors of embedding, layers, final norm and head."""
        names = self.config.names
        targets = {self._embedding_name: WeightTarget(self.embedding)}
        for index, layer in enumerate(self._layers()):
            targets.update(layer.weight_targets(f"{names.model}.layers.{index}"))
        targets.update(self.final_norm.weight_targets(f"{names.model}.{names.final_norm}"))
        if self.head is not None:
            targets.update(self.head.weight_targets({"lm_head": self.config.vocab_size}))
        return targets

    def fused_tensors(self) -> dict[str, FusedTensor]:
        """Return tensors a checkpoint may hold instead of several of `weight_targets`."""
        fused: dict[str, FusedTensor] = {}
        for index, layer in enumerate(self._layers()):
            fused.update(layer.fused_tensors(f"{self.config.names.model}.layers.{index}"))
        return fused

    def tied_tensors(self) -> dict[str, str]:
        """Return the output head where it is the embedding itself."""
        return {"lm_head.weight": self._embedding_name} if self.config.tied else {}

    @property
    def _embedding_name(self) -> str:
        return f"{self.config.names.model}.{self.config.names.embedding}.weight"

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
