"""What the worker needs of a model, whatever its family."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from dalsegno.models.weights import FusedTensor, WeightTarget
from dalsegno.ops.batch import ForwardBatch
from dalsegno.types import LayerCacheSpec

__all__ = ["CausalLM"]


class CausalLM(nn.Module, ABC):
    """A decoder that turns a flat batch of tokens of several requests into hidden states and logits.

    A model keeps nothing between calls: all it remembers is in the caches of the batch. It is made on the ambient
    device with empty parameters; `registry.load_model` fills them.

    Attributes:
        ignored_tensors: regular expressions of checkpoint tensors the model has no use for.
    """

    ignored_tensors: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Most tokens of one request, `max_position_embeddings`."""

    @abstractmethod
    def cache_specs(self) -> list[LayerCacheSpec]:
        """Return what the model keeps between steps; spec i belongs to `ForwardBatch.layers[i]`."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute `[T, hidden]`, the normed hidden state of every token, and write the caches of the batch."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return `[N, vocab_size]` float32 logits of `[N, hidden]` rows of `forward`'s result."""

    @abstractmethod
    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return, for every tensor name of a checkpoint, the part of a parameter it fills."""

    def fused_tensors(self) -> dict[str, FusedTensor]:
        """Return tensors a checkpoint may hold instead of several of `weight_targets`, by name."""
        return {}

    @abstractmethod
    def tied_tensors(self) -> dict[str, str]:
        """Return names a checkpoint may hold besides, as copies: name -> name of the tied tensor."""
