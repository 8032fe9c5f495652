"""The gated delta rule over states kept in blocks: one step per token, or tile by tile.

Requests with one token take the single-step form, the others the tiled one; both are batched over requests and heads
and keep the state in float32. Inside a tile the rule is a triangular system (the WY form), so only the state itself
goes from tile to tile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dalsegno.ops.batch import StateLayerCache
from dalsegno.ops.decays import LEAST_LOG_DECAY, tile_decays
from dalsegno.ops.tiles import TileGrid

__all__ = ["gated_delta_rule"]


@dataclass(slots=True)
class _Inputs:
    """The op's inputs in float32, `[T, heads, dim]` and `[T, heads]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def take(self, tokens: Tensor) -> "_Inputs":
        fields = (self.query, self.key, self.value, self.log_decay, self.beta)
        return _Inputs(*(x.index_select(0, tokens) for x in fields))


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    cache: StateLayerCache,
    part: str = "recurrent",
) -> Tensor:
    """Run the gated delta rule from each request's read block, and write its state to its write and export blocks.

    Per token t and head, with the state S `[key_dim, value_dim]` in float32:
    `S = exp(log_decay_t) S; S = S + key_t (beta_t (value_t - key_t S))^T; out_t = query_t S`.

    `query` and `key` are used as given: normalizing and scaling are the caller's. All heads are value heads: fewer key
    heads are repeated by the caller.

    Args:
        query: `[T, heads, key_dim]`.
        key: `[T, heads, key_dim]`.
        value: `[T, heads, value_dim]`.
        log_decay: `[T, heads]`, at most 0.
        beta: `[T, heads]`.
        cache: the layer's memory and the step's batch; write and export blocks are written whole.
        part: which part of the layer's state this is, of shape `[heads, key_dim, value_dim]`.

    Returns:
        `[T, heads, value_dim]`, dtype of `value`.
    """
    batch, rows, strides = cache.batch, cache.view.rows[part], cache.view.strides[part]
    shape = cache.view.parts[part].shape[2:]
    num_requests, num_exports = batch.num_requests, len(batch.exports)
    states = rows.new_empty((num_requests + num_exports, *shape), dtype=torch.float32)
    running, exported = states[:num_requests], states[num_requests:]
    if rows.dtype == torch.float32:
        torch.index_select(rows, 0, batch.read_rows(strides), out=running.flatten(1))
    else:
        running.copy_(rows.index_select(0, batch.read_rows(strides)).view(running.shape))
    inputs = _Inputs(query.float(), key.float(), value.float(), log_decay.float(), beta.float())
    if batch.tiles is None:
        out = _single_step(inputs, running)
        exported.copy_(running.index_select(0, batch.single_export_rows))
    else:
        out = _mixed(inputs, cache, running, exported)
    rows[batch.write_rows(strides)] = states.flatten(1).to(rows.dtype)
    return out.to(value.dtype)


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
    out = torch.empty_like(inputs.value)
    out[batch.tiles.token_ids] = tiled
    out[batch.single_tokens] = _single_step(inputs.take(batch.single_tokens), states)
    running[batch.single_rows] = states
    exported[batch.single_exports] = states.index_select(0, batch.single_export_rows)
    return out


def _single_step(inputs: _Inputs, states: Tensor) -> Tensor:
    """Apply one token to each of `states` `[R, heads, key_dim, value_dim]` in place; return `[R, heads, value_dim]`.

    The output is put together from query and key times the old state, so the state is read once and updated once.
    """
    decay = inputs.log_decay.clamp(min=LEAST_LOG_DECAY).exp()[:, :, None]
    both = torch.stack([inputs.query, inputs.key], dim=2) @ states
    both *= decay[..., None]
    delta = inputs.beta[:, :, None] * (inputs.value - both[:, :, 1])
    overlap = (inputs.query * inputs.key).sum(dim=-1, keepdim=True)
    states *= decay[..., None]
    states.addcmul_(inputs.key[..., None], delta[:, :, None, :])
    return both[:, :, 0].addcmul_(overlap, delta)


def _tiled(inputs: _Inputs, grid: TileGrid, states: Tensor, exported: Tensor) -> Tensor:
    """Run the grid's requests, updating `states` `[R2, heads, key_dim, value_dim]` and the grid's rows of `exported`.

    Returns:
        `[T2, heads, value_dim]` for `grid.token_ids`.
    """
    num_heads, value_dim = inputs.value.shape[1:]
    tile = _prepare(inputs, grid)
    added, out = tile.added, tile.query.new_empty(*tile.query.shape[:2], value_dim)
    for i, (begin, end) in enumerate(zip(grid.round_start, grid.round_start[1:], strict=False)):
        first, last = begin * num_heads, end * num_heads
        state = states[: end - begin].flatten(0, 1)
        torch.bmm(tile.query[first:last], state, out=out[first:last])
        added[first:last].baddbmm_(state.mT, tile.correction[first:last], alpha=-1.0)
        state *= tile.keep[first:last]
        state.baddbmm_(tile.to_state[first:last], added[first:last].mT)
        if (exports := grid.exports[i]) is not None:
            exported[exports[1]] = states.index_select(0, exports[0])
    out.baddbmm_(tile.attend, added.mT)
    return out.view(-1, value_dim).index_select(0, grid.head_places(num_heads)).view(-1, num_heads, value_dim)


@dataclass(slots=True)
class _Tiles:
    """What the rounds need, `[N * heads, ...]` in the order tile, head; S is the state at the tile's begin.

    Attributes:
        query: `[size, key_dim]`, times S what each token reads from S.
        added: `[value_dim, size]`, what each token adds to the state under its key if S is zero; contiguous.
        correction: `[key_dim, size]`; S transposed times this is to be subtracted from `added`.
        attend: `[size, size]`, times the corrected `added` what each token reads from the tile's tokens.
        to_state: `[key_dim, size]`, times the corrected `added` what the tile leaves in the state.
        keep: `[1, 1]`, what is left of S at the tile's end.
    """

    query: Tensor
    added: Tensor
    correction: Tensor
    attend: Tensor
    to_state: Tensor
    keep: Tensor


def _prepare(inputs: _Inputs, grid: TileGrid) -> _Tiles:
    """Do the work inside tiles, all tiles at once."""
    query, key, value, log_decay, beta = _gather(inputs, grid)
    total, within = tile_decays(log_decay)
    value_dim = value.shape[-1]
    right = value.new_empty(*value.shape[:-1], value_dim + key.shape[-1])
    torch.mul(value, beta, out=right[..., :value_dim])
    torch.mul(key, beta * total, out=right[..., value_dim:])
    lower = (key @ key.mT).mul_(within).mul_(beta)
    solved = _solve_unit_lower(lower, right)
    attend = (query @ key.mT).mul_(within)
    return _Tiles(
        query=query.mul_(total),
        added=solved[..., :value_dim, :].contiguous(),
        correction=solved[..., value_dim:, :],
        attend=attend,
        to_state=key.mul_(within[..., -1, :, None]).mT,
        keep=total[..., -1:, :],
    )


def _gather(inputs: _Inputs, grid: TileGrid) -> list[Tensor]:
    """Return query, key, value `[N * heads, size, dim]` and log_decay, beta `[N * heads, size, 1]` by tile and head.

    Paddings have no key, value or beta and do not decay; their queries are never looked at.
    """
    num_heads = inputs.value.shape[1]
    index = grid.head_tokens(num_heads)
    tiled = [
        x.reshape(-1, x.shape[2] if x.dim() == 3 else 1).index_select(0, index)
        for x in (inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    ]
    paddings = grid.head_paddings(num_heads)
    if paddings is not None:
        for x in tiled[1:]:
            x.index_fill_(0, paddings, 0.0)
    return [x.view(grid.num_tiles * num_heads, grid.size, -1) for x in tiled]


def _solve_unit_lower(lower: Tensor, right: Tensor) -> Tensor:
    """Solve (I + strictly lower triangle of `lower`) x = `right` in place; return x transposed.

    The rest of `lower` is not read. The transposed system takes both matrices as they lie in memory.
    """
    turned = right.mT
    torch.linalg.solve_triangular(lower.mT, turned, upper=True, left=False, unitriangular=True, out=turned)
    return turned
