"""Tensors to pointers: each function runs its kernel, or answers None where the op's torch form has to run.

A kernel is for few rows of float32 on a CPU, and for work that one thread ends before several have begun. States are
updated by kernels only in steps in which every request has one token and no request reads what another one writes.
"""

import torch
from torch import Tensor

from dalsegno.ops.batch import StateLayerCache
from dalsegno.ops.native.library import Kernels, current_kernels

__all__ = ["conv_step", "gated_delta_step", "linear", "rms_norm", "routed_experts", "scan_step"]

# Multiply-adds of one call, and rows of one product: beyond either torch's threads are faster.
_MOST_PRODUCTS = 1 << 23
_MOST_ROWS = 16
# State bytes of one call.
_MOST_STATE_BYTES = 1 << 24
# MOST_KEYS in kernels.c.
_MOST_KEYS = 512


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return `x @ weight.T + bias`, `[T, out]`, of `x` `[T, in]`; see `dalsegno.ops.linear.linear`."""
    kernels = current_kernels()
    if kernels is None or x.dim() != 2:
        return None
    num_rows, size = x.shape
    if num_rows > _MOST_ROWS or num_rows * weight.numel() > _MOST_PRODUCTS:
        return None
    if not (_is_plain(x, weight) and weight.is_contiguous() and (bias is None or _is_plain(bias))):
        return None
    out_size = weight.shape[0]
    out = x.new_empty(num_rows, out_size)
    kernels.linear(
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), _pointer(bias), num_rows, x.stride(0), size, out_size
    )
    return out


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float, gate: Tensor | None) -> Tensor | None:
    """Return the norm of `hidden` `[T, size]` or `[T, heads, size]`; see `dalsegno.ops.norms.rms_norm`."""
    kernels = current_kernels()
    if kernels is None or hidden.dim() > 3 or hidden.numel() > _MOST_PRODUCTS or not _is_plain(hidden, weight):
        return None
    if gate is not None and not _is_plain(gate):
        return None
    heads = hidden.shape[1] if hidden.dim() == 3 else 1
    open_strides = (0, 0) if gate is None else (gate.stride(0), gate.stride(-2))
    out = hidden.new_empty(hidden.shape)
    kernels.rms_norm(
        out.data_ptr(),
        hidden.data_ptr(),
        weight.data_ptr(),
        _pointer(gate),
        hidden.shape[0],
        heads,
        hidden.shape[-1],
        hidden.stride(0),
        hidden.stride(-2),
        *open_strides,
        weight.stride(0) if weight.dim() == 2 else 0,
        eps,
        offset,
    )
    return out


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateLayerCache, part: str, *, activate: bool
) -> Tensor | None:
    """Run one token per request; see `dalsegno.ops.causal_conv.causal_conv`."""
    kernels = _state_kernels(cache, part)
    if kernels is None or not (_is_plain(x, weight) and weight.is_contiguous() and (bias is None or _is_plain(bias))):
        return None
    out = x.new_empty(x.shape)
    kernels.conv_step(
        out.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        _pointer(bias),
        *_blocks(cache, part),
        x.shape[0],
        x.stride(0),
        x.shape[1],
        weight.shape[1] - 1,
        activate,
    )
    return out


def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    cache: StateLayerCache,
    part: str,
    eps: float,
) -> Tensor | None:
    """Run one token per request; see `dalsegno.ops.gated_delta.gated_delta_rule`."""
    kernels = _state_kernels(cache, part)
    key_heads, key_dim = query.shape[1:]
    if kernels is None or key_dim > _MOST_KEYS or not _is_plain(query, key, value, log_decay, beta):
        return None
    if not _heads_follow(query, key, value):
        return None
    out = value.new_empty(value.shape)
    kernels.gated_delta_step(
        out.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        log_decay.data_ptr(),
        beta.data_ptr(),
        *_blocks(cache, part),
        value.shape[0],
        key_heads,
        value.shape[1],
        key_dim,
        value.shape[2],
        query.stride(0),
        key.stride(0),
        value.stride(0),
        log_decay.stride(0),
        beta.stride(0),
        key_dim**-0.5,
        eps,
    )
    return out


def scan_step(
    value: Tensor,
    step: Tensor,
    rate: Tensor,
    key: Tensor,
    query: Tensor,
    skip: Tensor,
    cache: StateLayerCache,
    part: str,
) -> Tensor | None:
    """Run one token per request; see `dalsegno.ops.selective_scan.selective_scan`."""
    kernels = _state_kernels(cache, part)
    if kernels is None or not _is_plain(value, step, rate, key, query, skip) or not _heads_follow(value, key, query):
        return None
    out = value.new_empty(value.shape)
    kernels.scan_step(
        out.data_ptr(),
        value.data_ptr(),
        step.data_ptr(),
        rate.data_ptr(),
        key.data_ptr(),
        query.data_ptr(),
        skip.data_ptr(),
        *_blocks(cache, part),
        value.shape[0],
        value.shape[1],
        value.shape[2],
        key.shape[1],
        key.shape[2],
        value.stride(0),
        step.stride(0),
        key.stride(0),
        query.stride(0),
    )
    return out


def routed_experts(
    hidden: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, gated: bool
) -> Tensor | None:
    """Return `[T, size]`, the weighted sum of each row's experts; see `dalsegno.ops.experts.routed_experts`."""
    kernels = current_kernels()
    if kernels is None or experts.dtype is not torch.int64:
        return None
    num_rows, per_row = experts.shape
    up_size, size = up.shape[1:]
    inner_size = down.shape[2]
    pairs = num_rows * per_row
    if num_rows > _MOST_ROWS or pairs * size * (up_size + inner_size) > _MOST_PRODUCTS:
        return None
    if not (_is_plain(hidden, up, down, weights) and up.is_contiguous() and down.is_contiguous()):
        return None
    experts, weights = experts.contiguous(), weights.contiguous()
    out, scratch = hidden.new_empty(hidden.shape), hidden.new_empty(pairs * (up_size + size))
    kernels.routed_experts(
        out.data_ptr(),
        hidden.data_ptr(),
        experts.data_ptr(),
        weights.data_ptr(),
        up.data_ptr(),
        down.data_ptr(),
        scratch.data_ptr(),
        num_rows,
        per_row,
        hidden.stride(0),
        size,
        inner_size,
        gated,
    )
    return out


def _state_kernels(cache: StateLayerCache, part: str) -> Kernels | None:
    """Return the kernels if the step's states of this part can be updated row by row and are few."""
    kernels, rows = current_kernels(), cache.view.rows[part]
    if kernels is None or rows.dtype is not torch.float32 or not rows.is_cpu:
        return None
    batch = cache.batch
    if batch.tiles is not None or batch.num_requests * rows.shape[1] * 4 > _MOST_STATE_BYTES:
        return None
    return kernels if batch.rows_are_apart else None


def _blocks(cache: StateLayerCache, part: str) -> tuple[int, int, int, int]:
    """Return where the memory begins, its unit in floats, and the rows to read and to write."""
    rows, strides = cache.view.rows[part], cache.view.strides[part]
    read, written = cache.batch.read_rows(strides), cache.batch.write_rows(strides)
    return rows.data_ptr(), rows.stride(0), read.data_ptr(), written.data_ptr()


def _is_plain(*tensors: Tensor) -> bool:
    # A loop costs half of what `all` over a generator does, and this runs before every kernel.
    for x in tensors:  # noqa: SIM110
        if x.dtype is not torch.float32 or not x.is_cpu or x.stride(-1) != 1:
            return False
    return True


def _heads_follow(*tensors: Tensor) -> bool:
    """Whether the heads of `[T, heads, dim]` lie one after the other."""
    return all(x.stride(1) == x.shape[2] or x.shape[1] == 1 for x in tensors)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
