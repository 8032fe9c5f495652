"""The selective scan of Mamba2 over states kept in blocks: one step per token, or tile by tile.

Both forms are batched over requests. Heads of a group share key and query, so all of a group's states meet them in one
product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dalsegno.ops.batch import StateLayerCache
from dalsegno.ops.decays import LEAST_LOG_DECAY, tile_decays
from dalsegno.ops.native import calls as native
from dalsegno.ops.recurrence import Recurrence, run_recurrence
from dalsegno.ops.tiles import TileGrid

__all__ = ["selective_scan"]


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
    stepped = native.scan_step(value, step, rate, key, query, skip, cache, part)
    if stepped is not None:
        return stepped
    step, wide = step.float(), value.float()
    rule = _ScanRule(wide * step[..., None], step * rate.float(), key.float(), query.float())
    return run_recurrence(rule, cache, part).addcmul_(wide, skip.float()[:, None]).to(value.dtype)


@dataclass(slots=True)
class _ScanRule(Recurrence):
    """The op's inputs, `added` being step times value; states are `[heads, head_dim, state_dim]`."""

    added: Tensor
    log_decay: Tensor
    key: Tensor
    query: Tensor

    def single_step(self, states: Tensor) -> Tensor:
        """Update the states, then read them."""
        num_groups = self.key.shape[1]
        grouped = states.view(len(states), num_groups, -1, *states.shape[2:])
        states *= self.log_decay.clamp(min=LEAST_LOG_DECAY).exp()[..., None, None]
        added = self.added.view(*grouped.shape[:-1], 1)
        grouped.addcmul_(added, self.key[:, :, None, None, :])
        return (grouped.flatten(2, 3) @ self.query[..., None]).view(states.shape[:-1])

    def tiled(self, grid: TileGrid, states: Tensor, exported: Tensor) -> Tensor:
        """Do the work inside all tiles, then take the states from tile to tile."""
        num_groups = self.key.shape[1]
        tile = _prepare(self, grid)
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


def _prepare(inputs: _ScanRule, grid: TileGrid) -> _Tiles:
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


def _gather(inputs: _ScanRule, grid: TileGrid) -> list[Tensor]:
    """Return added, log_decay, key and query as `[N, size, ...]`.

    Paddings add nothing, have no key and do not decay; their queries are never looked at.
    """
    index = grid.tokens.flatten()
    tiled = [x.index_select(0, index) for x in (inputs.added, inputs.log_decay, inputs.key, inputs.query)]
    if grid.paddings is not None:
        for x in tiled[:3]:
            x.index_fill_(0, grid.paddings, 0.0)
    return [x.unflatten(0, (grid.num_tiles, grid.size)) for x in tiled]
