"""The gated delta rule over states kept in blocks: one step per token, or tile by tile.

Both forms are batched over requests and heads. Inside a tile the rule is a triangular system (the WY form), so only
the state itself goes from tile to tile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dalsegno.ops.batch import StateLayerCache
from dalsegno.ops.decays import LEAST_LOG_DECAY, tile_decays
from dalsegno.ops.native import calls as native
from dalsegno.ops.recurrence import Recurrence, run_recurrence
from dalsegno.ops.tiles import TileGrid

__all__ = ["gated_delta_rule"]

_NORM_EPS = 1e-6


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
    `S = exp(log_decay_t) S; S = S + key_t (beta_t (value_t - key_t S))^T; out_t = query_t S / sqrt(key_dim)`,
    where query and key are first made unit vectors: `x / sqrt(sum(x^2) + 1e-6)`.

    Args:
        query: `[T, key_heads, key_dim]`; head h reads key head `h // (heads // key_heads)`.
        key: `[T, key_heads, key_dim]`, likewise.
        value: `[T, heads, value_dim]`.
        log_decay: `[T, heads]`, at most 0.
        beta: `[T, heads]`.
        cache: the layer's memory and the step's batch; write and export blocks are written whole.
        part: which part of the layer's state this is, of shape `[heads, key_dim, value_dim]`.

    Returns:
        `[T, heads, value_dim]`, dtype of `value`.
    """
    stepped = native.gated_delta_step(query, key, value, log_decay, beta, cache, part, _NORM_EPS)
    if stepped is not None:
        return stepped
    repeats = value.shape[1] // query.shape[1]
    query, key = _unit(query, repeats) * query.shape[-1] ** -0.5, _unit(key, repeats)
    rule = _DeltaRule(query, key, value.float(), log_decay.float(), beta.float())
    return run_recurrence(rule, cache, part).to(value.dtype)


def _unit(heads: Tensor, repeats: int) -> Tensor:
    """Normalise `[T, key_heads, key_dim]` in float32 and repeat each head for its value heads."""
    heads = heads.float()
    heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)
    return heads.repeat_interleave(repeats, dim=1)


@dataclass(slots=True)
class _DeltaRule(Recurrence):
    """The op's inputs by value head, `[T, heads, dim]` and `[T, heads]`; states are `[heads, key_dim, value_dim]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def single_step(self, states: Tensor) -> Tensor:
        """Put the output together from query and key times the old state: it is read once and updated once."""
        decay = self.log_decay.clamp(min=LEAST_LOG_DECAY).exp()[:, :, None]
        both = torch.stack([self.query, self.key], dim=2) @ states
        both *= decay[..., None]
        delta = self.beta[:, :, None] * (self.value - both[:, :, 1])
        overlap = (self.query * self.key).sum(dim=-1, keepdim=True)
        states *= decay[..., None]
        states.addcmul_(self.key[..., None], delta[:, :, None, :])
        return both[:, :, 0].addcmul_(overlap, delta)

    def tiled(self, grid: TileGrid, states: Tensor, exported: Tensor) -> Tensor:
        """Do the work inside all tiles, then take the states from tile to tile."""
        num_heads, value_dim = self.value.shape[1:]
        tile = _prepare(self, grid)
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


def _prepare(inputs: _DeltaRule, grid: TileGrid) -> _Tiles:
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


def _gather(inputs: _DeltaRule, grid: TileGrid) -> list[Tensor]:
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
