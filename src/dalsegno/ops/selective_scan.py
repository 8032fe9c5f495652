"""The selective scan of Mamba2 over states kept in blocks: one step per token, or tile by tile.

Requests with one token take the single-step form, the others the tiled one; both are batched over requests and keep
the state in float32. Heads of a group share key and query, so all of a group's states meet them in one product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dalsegno.ops.batch import StateLayerCache
from dalsegno.ops.decays import LEAST_LOG_DECAY, tile_decays
from dalsegno.ops.tiles import TileGrid

__all__ = ["selective_scan"]

# States of a decode step that are worked on together; what fits the processor's cache is read and written once.
_CACHED_BYTES = 2 << 20


@dataclass(slots=True)
class _Inputs:
    """The op's inputs in float32: `added` `[T, heads, head_dim]` is step times value, the rest as in the op."""

    added: Tensor
    log_decay: Tensor
    key: Tensor
    query: Tensor

    def take(self, tokens: Tensor) -> "_Inputs":
        return _Inputs(*(x.index_select(0, tokens) for x in (self.added, self.log_decay, self.key, self.query)))

    def part(self, begin: int, end: int) -> "_Inputs":
        return _Inputs(*(x[begin:end] for x in (self.added, self.log_decay, self.key, self.query)))


def selective_scan(
    value: Tensor,
    step: Tensor,
    rate: Tensor,
    key: Tensor,
    query: Tensor,
    skip: Tensor,
    cache: StateLayerCache,
    part: str = "recurrent",
) -> Tensor:
    """Run the scan from each request's read block, and write its state to its write and export blocks.

    Per token t and head, with the state S `[head_dim, state_dim]` in float32:
    `S = exp(rate step_t) S + step_t value_t key_t^T; out_t = S query_t + skip value_t`.
    In Mamba's letters: value x, step dt, rate A, key B, query C, skip D.

    Args:
        value: `[T, heads, head_dim]`.
        step: `[T, heads]`, not negative.
        rate: `[heads]`, not positive.
        key: `[T, groups, state_dim]`; head h reads group `h // (heads // groups)`.
        query: `[T, groups, state_dim]`, likewise.
        skip: `[heads]`.
        cache: the layer's memory and the step's batch; write and export blocks are written whole.
        part: which part of the layer's state this is, of shape `[heads, head_dim, state_dim]`.

    Returns:
        `[T, heads, head_dim]`, dtype of `value`.
    """
    step, wide = step.float(), value.float()
    inputs = _Inputs(wide * step[..., None], step * rate.float(), key.float(), query.float())
    if cache.batch.tiles is None and cache.batch.rows_are_apart:
        out = _decode(inputs, cache, part)
    else:
        out = _at_once(inputs, cache, part)
    return out.addcmul_(wide, skip.float()[:, None]).to(value.dtype)


def _decode(inputs: _Inputs, cache: StateLayerCache, part: str) -> Tensor:
    """Run one token of each request, a few requests at a time, so that a state is still in the cache when written."""
    batch, rows, strides = cache.batch, cache.view.rows[part], cache.view.strides[part]
    shape = cache.view.parts[part].shape[2:]
    count = max(1, _CACHED_BYTES // (4 * rows.shape[1]))
    read, write = batch.read_rows(strides).split(count), batch.write_rows(strides).split(count)
    out = []
    for first, source, target in zip(range(0, batch.num_requests, count), read, write, strict=True):
        states = rows.index_select(0, source).float().view(-1, *shape)
        out.append(_single_step(inputs.part(first, first + count), states))
        rows[target] = states.flatten(1).to(rows.dtype)
    return torch.cat(out) if len(out) > 1 else out[0]


def _at_once(inputs: _Inputs, cache: StateLayerCache, part: str) -> Tensor:
    """Run any step: read all states, then write all."""
    batch, rows, strides = cache.batch, cache.view.rows[part], cache.view.strides[part]
    shape = cache.view.parts[part].shape[2:]
    num_requests, num_exports = batch.num_requests, len(batch.exports)
    states = rows.new_empty((num_requests + num_exports, *shape), dtype=torch.float32)
    running, exported = states[:num_requests], states[num_requests:]
    running.copy_(rows.index_select(0, batch.read_rows(strides)).view(running.shape))
    if batch.tiles is None:
        out = _single_step(inputs, running)
        exported.copy_(running.index_select(0, batch.single_export_rows))
    else:
        out = _mixed(inputs, cache, running, exported)
    rows[batch.write_rows(strides)] = states.flatten(1).to(rows.dtype)
    return out


def _mixed(inputs: _Inputs, cache: StateLayerCache, running: Tensor, exported: Tensor) -> Tensor:
    """Run a step in which some request has several tokens; states are updated in place."""
    batch = cache.batch
    assert batch.tiles is not None, "a mixed step has tiles"
    tiled_states = running.index_select(0, batch.tiles.rows)
    tiled = _tiled(inputs, batch.tiles, tiled_states, exported)
    running[batch.tiles.rows] = tiled_states
    if len(batch.tiles.rows) == len(running):
        return tiled
    states = running.index_select(0, batch.single_rows)
    out = torch.empty_like(inputs.added)
    out[batch.tiles.token_ids] = tiled
    out[batch.single_tokens] = _single_step(inputs.take(batch.single_tokens), states)
    running[batch.single_rows] = states
    exported[batch.single_exports] = states.index_select(0, batch.single_export_rows)
    return out


def _single_step(inputs: _Inputs, states: Tensor) -> Tensor:
    """Apply one token to each of `states` `[R, heads, head_dim, state_dim]` in place; return `[R, heads, head_dim]`."""
    num_groups = inputs.key.shape[1]
    grouped = states.view(len(states), num_groups, -1, *states.shape[2:])
    states *= inputs.log_decay.clamp(min=LEAST_LOG_DECAY).exp()[..., None, None]
    added = inputs.added.view(*grouped.shape[:-1], 1)
    grouped.addcmul_(added, inputs.key[:, :, None, None, :])
    return (grouped.flatten(2, 3) @ inputs.query[..., None]).view(states.shape[:-1])


def _tiled(inputs: _Inputs, grid: TileGrid, states: Tensor, exported: Tensor) -> Tensor:
    """Run the grid's requests, updating `states` `[R2, heads, head_dim, state_dim]` and the grid's rows of `exported`.

    Returns:
        `[T2, heads, head_dim]` for `grid.token_ids`.
    """
    num_groups = inputs.key.shape[1]
    tile = _prepare(inputs, grid)
    out = tile.query.new_empty(*tile.query.shape[:2], tile.to_state.shape[1])
    for i, (begin, end) in enumerate(zip(grid.round_start, grid.round_start[1:], strict=False)):
        first, last = begin * num_groups, end * num_groups
        state = states[: end - begin].view(last - first, -1, states.shape[-1])
        torch.bmm(tile.query[first:last], state.mT, out=out[first:last])
        states[: end - begin] *= tile.keep[begin:end]
        state.baddbmm_(tile.to_state[first:last], tile.key[first:last])
        if (exports := grid.exports[i]) is not None:
            exported[exports[1]] = states.index_select(0, exports[0])
    # [N, groups, size, heads per group, head_dim] to [N, size, heads, head_dim].
    read = out.view(grid.num_tiles, num_groups, grid.size, -1, states.shape[2]).transpose(1, 2).flatten(2, 3)
    out = (read * tile.total).add_(tile.inside)
    return out.flatten(0, 1).index_select(0, grid.places)


@dataclass(slots=True)
class _Tiles:
    """What the rounds need; S is the state at the tile's begin, N the number of tiles.

    Attributes:
        query: `[N * groups, size, state_dim]`.
        key: `[N * groups, size, state_dim]`, zero at paddings.
        to_state: `[N * groups, heads per group * head_dim, size]`, times `key` what the tile leaves in the state.
        inside: `[N, size, heads, head_dim]`, what each token reads of the tile's tokens.
        total: `[N, size, heads, 1]`, what is left of S at each token.
        keep: `[N, heads, 1, 1]`, what is left of S at the tile's end.
    """

    query: Tensor
    key: Tensor
    to_state: Tensor
    inside: Tensor
    total: Tensor
    keep: Tensor


def _prepare(inputs: _Inputs, grid: TileGrid) -> _Tiles:
    """Do the work inside tiles, all tiles at once."""
    added, log_decay, key, query = _gather(inputs, grid)
    num_groups, size = key.shape[2], grid.size
    total, within = tile_decays(log_decay.transpose(1, 2).unsqueeze(-1))
    key, query = (x.transpose(1, 2).reshape(grid.num_tiles * num_groups, size, -1) for x in (key, query))
    by_head = added.transpose(1, 2)
    # [N, heads, size, size]: scores are a group's, decays a head's.
    scores = (query @ key.mT).view(grid.num_tiles, num_groups, 1, size, size)
    to_state = (by_head * within[..., -1, :, None]).mT.reshape(grid.num_tiles * num_groups, -1, size)
    attend = within.view(grid.num_tiles, num_groups, -1, size, size).mul_(scores).flatten(1, 2)
    return _Tiles(
        query=query,
        key=key,
        to_state=to_state,
        inside=(attend @ by_head).transpose(1, 2),
        total=total.transpose(1, 2),
        keep=total[:, :, -1:],
    )


def _gather(inputs: _Inputs, grid: TileGrid) -> list[Tensor]:
    """Return added, log_decay, key and query as `[N, size, ...]`.

    Paddings add nothing, have no key and do not decay; their queries are never looked at.
    """
    index = grid.tokens.flatten()
    tiled = [x.index_select(0, index) for x in (inputs.added, inputs.log_decay, inputs.key, inputs.query)]
    if grid.paddings is not None:
        for x in tiled[:3]:
            x.index_fill_(0, grid.paddings, 0.0)
    return [x.unflatten(0, (grid.num_tiles, grid.size)) for x in tiled]
