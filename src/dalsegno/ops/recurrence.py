"""The frame of ops that carry a state from token to token: read states, run the step, write the blocks.

Requests with one token take the single-step form, the others the tiled one; states are float32 whatever the memory
holds. What a step does to a state is the rule's; which blocks are read and written, and in what order, is decided here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from dalsegno.ops.batch import StateLayerCache
from dalsegno.ops.tiles import TileGrid

__all__ = ["Recurrence", "run_recurrence"]

# States of a decode step that are worked on together; what fits the processor's cache is read and written once.
_CACHED_BYTES = 2 << 20


@dataclass(slots=True)
class Recurrence(ABC):
    """A rule with its inputs of the step; every field of a subclass is a `[T, ...]` tensor in float32."""

    def take(self, tokens: Tensor) -> Self:
        """Return the rule for some tokens (int64)."""
        return type(self)(*(x.index_select(0, tokens) for x in self._tensors()))

    def part(self, begin: int, end: int) -> Self:
        """Return the rule for tokens `[begin, end)`."""
        return type(self)(*(x[begin:end] for x in self._tensors()))

    @abstractmethod
    def single_step(self, states: Tensor) -> Tensor:
        """Apply one token to each of `states` `[T, ...]` in place; return the outputs `[T, ...]`."""

    @abstractmethod
    def tiled(self, grid: TileGrid, states: Tensor, exported: Tensor) -> Tensor:
        """Run the grid's requests, updating their `states` `[R2, ...]` in place.

        Args:
            grid: the tiles, over the tokens of this rule.
            states: of the grid's requests, in the grid's order.
            exported: `[E, ...]`; the grid's exports are written.

        Returns:
            Outputs `[T2, ...]` for `grid.token_ids`.
        """

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, entry.name) for entry in fields(self)]


def run_recurrence(rule: Recurrence, cache: StateLayerCache, part: str) -> Tensor:
    """Run a step from each request's read block, and write its state to its write and export blocks.

    Args:
        rule: the op with its inputs.
        cache: the layer's memory and the step's batch; write and export blocks are written whole.
        part: which part of the layer's state is carried.

    Returns:
        Outputs `[T, ...]` in float32.
    """
    if cache.batch.tiles is None and cache.batch.rows_are_apart:
        return _row_by_row(rule, cache, part)
    return _at_once(rule, cache, part)


def _row_by_row(rule: Recurrence, cache: StateLayerCache, part: str) -> Tensor:
    """Run one token of each request, a few requests at a time, so that a state is still in the cache when written."""
    batch, rows, strides = cache.batch, cache.view.rows[part], cache.view.strides[part]
    shape = cache.view.parts[part].shape[2:]
    count = max(1, _CACHED_BYTES // (4 * rows.shape[1]))
    if count >= batch.num_requests:
        return _run(rule, rows, batch.read_rows(strides), batch.write_rows(strides), shape)
    read, write = batch.read_rows(strides).split(count), batch.write_rows(strides).split(count)
    firsts = range(0, batch.num_requests, count)
    return torch.cat(
        [
            _run(rule.part(first, first + count), rows, source, target, shape)
            for first, source, target in zip(firsts, read, write, strict=True)
        ]
    )


def _run(rule: Recurrence, rows: Tensor, source: Tensor, target: Tensor, shape: torch.Size) -> Tensor:
    states = rows.index_select(0, source).float().view(-1, *shape)
    out = rule.single_step(states)
    rows[target] = states.flatten(1).to(rows.dtype)
    return out


def _at_once(rule: Recurrence, cache: StateLayerCache, part: str) -> Tensor:
    """Run any step: read all states, then write all."""
    batch, rows, strides = cache.batch, cache.view.rows[part], cache.view.strides[part]
    shape = cache.view.parts[part].shape[2:]
    num_requests, num_exports = batch.num_requests, len(batch.exports)
    states = rows.new_empty((num_requests + num_exports, *shape), dtype=torch.float32)
    running, exported = states[:num_requests], states[num_requests:]
    if rows.dtype == torch.float32:
        torch.index_select(rows, 0, batch.read_rows(strides), out=running.flatten(1))
    else:
        running.copy_(rows.index_select(0, batch.read_rows(strides)).view(running.shape))
    if batch.tiles is None:
        out = rule.single_step(running)
        exported.copy_(running.index_select(0, batch.single_export_rows))
    else:
        out = _mixed(rule, cache, running, exported)
    rows[batch.write_rows(strides)] = states.flatten(1).to(rows.dtype)
    return out


def _mixed(rule: Recurrence, cache: StateLayerCache, running: Tensor, exported: Tensor) -> Tensor:
    """Run a step in which some request has several tokens; states are updated in place."""
    batch = cache.batch
    assert batch.tiles is not None, "a mixed step has tiles"
    tiled_states = running.index_select(0, batch.tiles.rows)
    tiled = rule.tiled(batch.tiles, tiled_states, exported)
    running[batch.tiles.rows] = tiled_states
    if len(batch.tiles.rows) == len(running):
        return tiled
    states = running.index_select(0, batch.single_rows)
    out = tiled.new_empty(batch.query_start[-1], *tiled.shape[1:])
    out[batch.tiles.token_ids] = tiled
    out[batch.single_tokens] = rule.take(batch.single_tokens).single_step(states)
    running[batch.single_rows] = states
    exported[batch.single_exports] = states.index_select(0, batch.single_export_rows)
    return out
