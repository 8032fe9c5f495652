"""A small hybrid model with random weights, and a driver that plans one request's steps by hand."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dalsegno.config import CacheConfig
from dalsegno.kv.layout import MemoryLayout, plan_layout
from dalsegno.models.base import CausalLM
from dalsegno.models.weights import WeightTarget
from dalsegno.ops.batch import ForwardBatch, PagedLayerCache, StateLayerCache
from dalsegno.ops.causal_conv import causal_conv
from dalsegno.ops.gated_delta import gated_delta_rule
from dalsegno.ops.paged_attention import paged_attention
from dalsegno.sampling_params import SamplingParams
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec, SampleSpec, ScheduledRequest, StateExport, StateStep

VOCAB, HIDDEN, HEADS, DIM, WINDOW = 61, 24, 3, 8, 20


class StandIn(CausalLM):
    """Layers of the given kinds ("aws": attention, window, state), without norms of any trained model."""

    def __init__(self, kinds: str = "aws") -> None:
        super().__init__()
        self.kinds = kinds
        g = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=g)
        self.positions = torch.randn(4096, HIDDEN, generator=g)
        self.weights = [torch.randn(3 * HIDDEN, HIDDEN, generator=g) / HIDDEN**0.5 for _ in kinds]
        self.convs = [torch.randn(HIDDEN, 4, generator=g) / 2 for _ in kinds]
        self.num_logit_rows: list[int] = []

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def max_model_len(self) -> int:
        return len(self.positions)

    def cache_specs(self) -> list[LayerCacheSpec]:
        specs = []
        for layer, kind in enumerate(self.kinds):
            if kind == "s":
                state = CachePart("recurrent", (HEADS, DIM, DIM), "float32")
                specs.append(LayerCacheSpec(layer, GroupKind.STATE, (CachePart("conv", (HIDDEN, 3), "float32"), state)))
                continue
            parts = (CachePart("key", (HEADS, DIM), "float32"), CachePart("value", (HEADS, DIM), "float32"))
            group_kind = GroupKind.WINDOW if kind == "w" else GroupKind.ATTENTION
            specs.append(LayerCacheSpec(layer, group_kind, parts, WINDOW if kind == "w" else None))
        return specs

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = self.embedding[batch.token_ids] + self.positions[batch.positions]
        for weight, conv, cache in zip(self.weights, self.convs, batch.layers, strict=True):
            query, key, value = (F.layer_norm(hidden, (HIDDEN,)) @ weight.t()).unflatten(1, (3, HEADS, DIM)).unbind(1)
            if isinstance(cache, PagedLayerCache):
                out = paged_attention(query, key, value, cache, DIM**-0.5)
            else:
                assert isinstance(cache, StateLayerCache)
                mixed = causal_conv(value.flatten(1), conv, None, cache).unflatten(1, (HEADS, DIM))
                decay, beta = -0.1 * query.abs().mean(-1), key.mean(-1).sigmoid()
                query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
                out = gated_delta_rule(query, key, mixed, decay, beta, cache)
            hidden = hidden + out.flatten(1)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.num_logit_rows.append(len(hidden))
        return F.layer_norm(hidden, (HIDDEN,)) @ self.embedding.t()

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {}

    def tied_tensors(self) -> dict[str, str]:
        return {}


def make_layout(model: CausalLM, num_slabs: int = 250, **options: Any) -> MemoryLayout:
    """Lay out memory for a model; `options` are those of `CacheConfig`."""
    return plan_layout(model.cache_specs(), CacheConfig(**options), num_slabs=num_slabs)


@dataclass
class Planner:
    """Plans the steps of requests by hand; blocks come from slabs of their group, highest first."""

    layout: MemoryLayout
    next_slab: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_slab = self.layout.num_slabs

    def blocks(self, group_id: int, count: int) -> list[int]:
        """Return `count` new blocks of a group."""
        group = self.layout.groups[group_id]
        taken: list[int] = []
        while len(taken) < count:
            self.next_slab -= 1
            assert self.next_slab > 0, "the test's memory is too small"
            taken += range(self.next_slab * group.blocks_per_slab, (self.next_slab + 1) * group.blocks_per_slab)
        return taken[:count]

    def tables(self, num_tokens: int) -> tuple[list[int], ...]:
        """Return new block tables for a request of `num_tokens` tokens."""
        return tuple(
            [] if group.is_state else self.blocks(group.group_id, -(-num_tokens // group.block_size))
            for group in self.layout.groups
        )

    def state_block(self) -> int:
        """Return a new block of the state group."""
        group = self.layout.state_group
        assert group is not None, "the layout has no state group"
        return self.blocks(group.group_id, 1)[0]


def greedy_sample(position: int, count: int = 1) -> SampleSpec:
    """Ask for the best token."""
    return SampleSpec(SamplingParams(temperature=0), 0, tuple(range(count)), position)


def scheduled(
    name: str,
    tokens: Sequence[int],
    span: tuple[int, int],
    tables: tuple[Sequence[int], ...],
    state: tuple[int, int] | None = None,
    *,
    sample: bool = True,
    exports: Sequence[StateExport] = (),
) -> ScheduledRequest:
    """Schedule tokens `[span)` of `tokens`; `state` is (read block, write block)."""
    begin, end = span
    return ScheduledRequest(
        request_id=name,
        token_ids=array("I", tokens[begin:end]),
        start=begin,
        block_tables=tables,
        state=None if state is None else StateStep(*state, tuple(exports)),
        sample=greedy_sample(end) if sample else None,
    )
