"""Runs a model through the ops on plain memory: no scheduler, no manager, one block table per request.

Everything that no token was written to is NaN, so a byte read too far shows. Blocks are handed out in a shuffled order,
several to a slab.
"""

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dalsegno.models.base import CausalLM
from dalsegno.ops.batch import ForwardBatch, LayerCache, PagedBatch, PagedLayerCache, StateBatch, StateLayerCache
from dalsegno.ops.views import PagedView, StateView
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec

BLOCKS_PER_SLAB = 3


@dataclass(frozen=True)
class Export:
    """Keep the state after `num_tokens` of a row's tokens of the step in spare slot `slot` of that row."""

    row: int
    num_tokens: int
    slot: int = 0


def _part(spec: CachePart, num_slabs: int, block_tokens: int | None) -> Tensor:
    lead = (num_slabs, BLOCKS_PER_SLAB) + (() if block_tokens is None else (block_tokens,))
    part = torch.full(lead + spec.shape, float("nan"), dtype=getattr(torch, spec.dtype))
    part[0] = 0
    return part


class ModelRunner:
    """A model with memory for `num_rows` requests of at most `max_tokens` tokens each."""

    def __init__(self, model: CausalLM, num_rows: int, max_tokens: int, block_size: int = 16, spare: int = 2) -> None:
        self.model = model
        self.block_size = block_size
        self.starts = [0] * num_rows
        per_row = -(-max_tokens // block_size)
        order = list(range(1, num_rows * per_row + 1))
        random.Random(7).shuffle(order)
        # The first slab is the null block's alone.
        ids = [block - 1 + BLOCKS_PER_SLAB for block in order]
        self.tables = [ids[row * per_row : (row + 1) * per_row] for row in range(num_rows)]
        self.states = [BLOCKS_PER_SLAB + row for row in range(num_rows)]
        self.fresh = [True] * num_rows
        self.spares = [[state + num_rows * (slot + 1) for slot in range(spare)] for state in self.states]
        self.specs: list[LayerCacheSpec] = model.cache_specs()
        paged_slabs = -(-(num_rows * per_row) // BLOCKS_PER_SLAB) + 1
        state_slabs = -(-(num_rows * (spare + 1)) // BLOCKS_PER_SLAB) + 1
        self.views = [self._view(spec, paged_slabs, state_slabs) for spec in self.specs]

    def _view(self, spec: LayerCacheSpec, paged_slabs: int, state_slabs: int) -> PagedView | StateView:
        if spec.kind is GroupKind.STATE:
            return StateView({part.name: _part(part, state_slabs, None) for part in spec.parts})
        key, value = (_part(part, paged_slabs, self.block_size) for part in spec.parts)
        return PagedView(key, value)

    def step(self, tokens: Mapping[int, Sequence[int]], exports: Sequence[Export] = ()) -> Tensor:
        """Run the given tokens of the given rows; return `[T, hidden]`."""
        rows = list(tokens)
        query_start = [0]
        for row in rows:
            query_start.append(query_start[-1] + len(tokens[row]))
        starts = [self.starts[row] for row in rows]
        caches = self._caches(rows, query_start, starts, exports)
        positions = [start + i for row, start in zip(rows, starts, strict=True) for i in range(len(tokens[row]))]
        batch = ForwardBatch(
            token_ids=torch.tensor([token for row in rows for token in tokens[row]]),
            positions=torch.tensor(positions),
            query_start=query_start,
            layers=caches,
        )
        with torch.inference_mode():
            hidden = self.model(batch)
        for row in rows:
            self.starts[row] += len(tokens[row])
            self.fresh[row] = False
        assert isinstance(hidden, Tensor)
        return hidden

    def _caches(
        self, rows: list[int], query_start: list[int], starts: list[int], exports: Sequence[Export]
    ) -> list[LayerCache | None]:
        paged: dict[int | None, PagedBatch] = {}
        state: StateBatch | None = None
        caches: list[LayerCache | None] = []
        for spec, view in zip(self.specs, self.views, strict=True):
            if isinstance(view, StateView):
                state = state or StateBatch.build(
                    query_start,
                    [0 if self.fresh[row] else self.states[row] for row in rows],
                    [self.states[row] for row in rows],
                    [(rows.index(e.row), e.num_tokens, self.spares[e.row][e.slot]) for e in exports],
                    BLOCKS_PER_SLAB,
                )
                caches.append(StateLayerCache(view, state))
                continue
            if spec.window not in paged:
                tables = [self.tables[row] for row in rows]
                paged[spec.window] = PagedBatch.build(
                    query_start, starts, tables, self.block_size, BLOCKS_PER_SLAB, spec.window
                )
            caches.append(PagedLayerCache(view, paged[spec.window]))
        return caches

    def logits(self, tokens: Mapping[int, Sequence[int]], exports: Sequence[Export] = ()) -> Tensor:
        """Run a step; return the logits of each row's last token, `[R, vocab]`."""
        hidden = self.step(tokens, exports)
        last = torch.tensor([len(ids) for ids in tokens.values()]).cumsum(0) - 1
        with torch.inference_mode():
            return self.model.compute_logits(hidden[last])

    def greedy(self, tokens: Mapping[int, Sequence[int]], count: int) -> dict[int, list[int]]:
        """Run the tokens and then `count` greedy ones; return those per row."""
        answers: dict[int, list[int]] = {row: [] for row in tokens}
        step: Mapping[int, Sequence[int]] = tokens
        for _ in range(count):
            best = self.logits(step).argmax(-1).tolist()
            step = {row: [token] for row, token in zip(step, best, strict=True)}
            for row, token in zip(answers, best, strict=True):
                answers[row].append(token)
        return answers

    def fork(self) -> "ModelRunner":
        """Return a runner of the same model with a copy of the memory."""
        other = copy.copy(self)
        other.starts, other.fresh = list(self.starts), list(self.fresh)
        other.views = [_cloned(view) for view in self.views]
        return other

    def state_parts(self, name: str) -> list[Tensor]:
        """Return the state part of every state layer, by block: `[blocks, *shape]`, a view of the memory."""
        return [
            view.parts[name].flatten(0, 1) for view in self.views if isinstance(view, StateView) and name in view.parts
        ]

    def paged_parts(self, kind: GroupKind | None = None) -> list[Tensor]:
        """Return keys and values of the paged layers (of one kind), by block: `[blocks, block_size, heads, dim]`."""
        pairs = zip(self.specs, self.views, strict=True)
        views = [view for spec, view in pairs if isinstance(view, PagedView) and kind in (None, spec.kind)]
        return [part.flatten(0, 1) for view in views for part in (view.key, view.value)]


def _cloned(view: PagedView | StateView) -> PagedView | StateView:
    if isinstance(view, StateView):
        return StateView({name: part.clone() for name, part in view.parts.items()})
    return PagedView(view.key.clone(), view.value.clone())
