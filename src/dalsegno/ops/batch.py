"""What one step asks of the ops: which tokens belong to which request and where their cache blocks are.

The worker builds one `PagedBatch` or `StateBatch` per group and step; all layers of the group share it, so index
tensors are made once per step and never per layer. No lists of the plan are kept. Ops read these; models only pass
them on.
"""

from dataclasses import dataclass

from torch import Tensor

from dalsegno.ops.paged_batch import PagedBatch
from dalsegno.ops.state_batch import StateBatch
from dalsegno.ops.views import PagedView, StateView

__all__ = ["ForwardBatch", "LayerCache", "PagedBatch", "PagedLayerCache", "StateBatch", "StateLayerCache"]


@dataclass(frozen=True, slots=True)
class PagedLayerCache:
    """One attention or window layer's memory and the step's batch of its group."""

    view: PagedView
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class StateLayerCache:
    """One state layer's memory and the step's batch of its group."""

    view: StateView
    batch: StateBatch


LayerCache = PagedLayerCache | StateLayerCache


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step, requests one after the other.

    Attributes:
        token_ids: `[T]` int64.
        positions: `[T]` int64, position of each token in its request.
        query_start: R + 1 offsets; request r has tokens `[query_start[r], query_start[r + 1])`, at least one.
        layers: cache of each model layer, None for a layer that keeps nothing.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: list[int]
    layers: list[PagedLayerCache | StateLayerCache | None]
