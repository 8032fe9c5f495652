"""Naive float32 references that define the ops, token by token and request by request.

They share the ops' signatures and write the same blocks. Nothing here is meant to be fast.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dalsegno.ops.batch import PagedLayerCache, StateLayerCache

__all__ = [
    "causal_conv",
    "gated_delta_rule",
    "linear",
    "paged_attention",
    "rms_norm",
    "routed_experts",
    "selective_scan",
]


def paged_attention(query: Tensor, key: Tensor, value: Tensor, cache: PagedLayerCache, scale: float) -> Tensor:
    """Define `dalsegno.ops.paged_attention.paged_attention`."""
    view, batch = cache.view, cache.batch
    group = query.shape[1] // key.shape[1]
    out = torch.empty(*query.shape[:2], value.shape[2])
    for row, start in enumerate(batch.starts):
        keys, values = _past(cache, row)
        for token in range(batch.query_start[row], batch.query_start[row + 1]):
            position = start + token - batch.query_start[row]
            slab, sub, offset = _slot(batch.block_tables[row], position, view.block_size, view.blocks_per_slab)
            view.key[slab, sub, offset] = key[token].to(view.key.dtype)
            view.value[slab, sub, offset] = value[token].to(view.value.dtype)
            keys[position] = view.key[slab, sub, offset].float()
            values[position] = view.value[slab, sub, offset].float()
            first = max(0, position - batch.window + 1) if batch.window else 0
            seen = range(first, position + 1)
            for head in range(query.shape[1]):
                seen_keys = torch.stack([keys[i][head // group] for i in seen])
                seen_values = torch.stack([values[i][head // group] for i in seen])
                weights = torch.softmax(scale * (seen_keys @ query[token, head].float()), dim=0)
                out[token, head] = weights @ seen_values
    return out.to(query.dtype)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    cache: StateLayerCache,
    part: str = "recurrent",
) -> Tensor:
    """Define `dalsegno.ops.gated_delta.gated_delta_rule`."""
    batch = cache.batch
    out = torch.empty(value.shape)
    query, key = (
        (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            value.shape[1] // x.shape[1], dim=1
        )
        for x in (query, key)
    )
    query = query / query.shape[-1] ** 0.5
    states = _read_states(cache, part)
    written: dict[int, Tensor] = {}
    for row, state in enumerate(states):
        begin, end = batch.query_start[row], batch.query_start[row + 1]
        for token in range(begin, end):
            state *= log_decay[token].float().exp()[:, None, None]
            predicted = torch.einsum("hk,hkv->hv", key[token], state)
            delta = beta[token].float()[:, None] * (value[token].float() - predicted)
            state += key[token][:, :, None] * delta[:, None, :]
            out[token] = torch.einsum("hk,hkv->hv", query[token], state)
            _note_exports(batch.exports, row, token - begin + 1, state, written)
        written[batch.write_blocks[row]] = state
    _write_states(cache, part, written)
    return out.to(value.dtype)


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
    """Define `dalsegno.ops.selective_scan.selective_scan`."""
    batch = cache.batch
    out = torch.empty(value.shape)
    written: dict[int, Tensor] = {}
    for row, state in enumerate(_read_states(cache, part)):
        begin, end = batch.query_start[row], batch.query_start[row + 1]
        for token in range(begin, end):
            for head in range(value.shape[1]):
                group = head // (value.shape[1] // key.shape[1])
                x, dt = value[token, head].float(), step[token, head].float()
                state[head] *= (rate[head].float() * dt).exp()
                state[head] += torch.outer(dt * x, key[token, group].float())
                out[token, head] = state[head] @ query[token, group].float() + skip[head].float() * x
            _note_exports(batch.exports, row, token - begin + 1, state, written)
        written[batch.write_blocks[row]] = state
    _write_states(cache, part, written)
    return out.to(value.dtype)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: StateLayerCache,
    part: str = "conv",
    activation: str | None = "silu",
) -> Tensor:
    """Define `dalsegno.ops.causal_conv.causal_conv`."""
    batch = cache.batch
    out = torch.empty(x.shape)
    written: dict[int, Tensor] = {}
    for row, state in enumerate(_read_states(cache, part)):
        begin, end = batch.query_start[row], batch.query_start[row + 1]
        for token in range(begin, end):
            inputs = torch.cat([state, x[token].float()[:, None]], dim=1)
            out[token] = (inputs * weight.float()).sum(dim=1)
            if bias is not None:
                out[token] += bias.float()
            state = inputs[:, 1:]
            _note_exports(batch.exports, row, token - begin + 1, state, written)
        written[batch.write_blocks[row]] = state
    _write_states(cache, part, written)
    return (F.silu(out) if activation == "silu" else out).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Define `dalsegno.ops.linear.linear`."""
    out = (x.float()[..., None, :] * weight.float()).sum(-1)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    wide: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    """Define `dalsegno.ops.norms.rms_norm`; in float32 `wide` makes no difference."""
    assert hidden.dtype == torch.float32, "the reference is for float32"
    out = hidden / (hidden.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)
    return out if gate is None else out * gate * torch.sigmoid(gate)


def routed_experts(
    hidden: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, gated: bool
) -> Tensor:
    """Define `dalsegno.ops.experts.routed_experts`."""
    out = torch.zeros(hidden.shape)
    for token, x in enumerate(hidden.float()):
        for expert, weight in zip(experts[token].tolist(), weights[token].float(), strict=True):
            inner = up[expert].float() @ x
            if gated:
                gate, linear_part = inner.chunk(2)
                inner = gate * torch.sigmoid(gate) * linear_part
            else:
                inner = inner.clamp(min=0.0) ** 2
            out[token] += weight * (down[expert].float() @ inner)
    return out.to(hidden.dtype)


def _slot(
    table: Sequence[int] | np.ndarray, position: int, block_size: int, blocks_per_slab: int
) -> tuple[int, int, int]:
    block = table[position // block_size]
    return block // blocks_per_slab, block % blocks_per_slab, position % block_size


def _past(cache: PagedLayerCache, row: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return keys and values of the request's earlier tokens that any token of the step sees, by position."""
    view, batch = cache.view, cache.batch
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    start = batch.starts[row]
    for position in range(max(0, start - batch.window + 1) if batch.window else 0, start):
        slab, sub, offset = _slot(batch.block_tables[row], position, view.block_size, view.blocks_per_slab)
        keys[position] = view.key[slab, sub, offset].float()
        values[position] = view.value[slab, sub, offset].float()
    return keys, values


def _read_states(cache: StateLayerCache, part: str) -> list[Tensor]:
    memory, per_slab = cache.view.parts[part], cache.batch.blocks_per_slab
    blocks = cache.batch.read_blocks
    states = [memory[block // per_slab, block % per_slab] for block in blocks]
    return [
        torch.zeros(state.shape) if block == 0 else state.float().clone()
        for block, state in zip(blocks, states, strict=True)
    ]


def _note_exports(
    exports: list[tuple[int, int, int]], row: int, count: int, state: Tensor, written: dict[int, Tensor]
) -> None:
    for export_row, num_tokens, block in exports:
        if (export_row, num_tokens) == (row, count):
            written[block] = state.clone()


def _write_states(cache: StateLayerCache, part: str, written: dict[int, Tensor]) -> None:
    memory, per_slab = cache.view.parts[part], cache.batch.blocks_per_slab
    for block, state in written.items():
        memory[block // per_slab, block % per_slab] = state.to(memory.dtype)
