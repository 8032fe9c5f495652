"""Attention over paged keys and values, decode and prefill in one step.

Requests with one token are batched by context length. Requests with several are done one by one, a run of queries at a
time, so scores never take more memory than `_MAX_SCORES` per head. Paddings are rows of the null block and masked.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dalsegno.ops.batch import PagedLayerCache
from dalsegno.ops.paged_batch import DecodeGather, Gather, PrefillGather
from dalsegno.ops.views import PagedView

__all__ = ["paged_attention"]

_MAX_QUERIES = 128
_MAX_SCORES = 1 << 22


def paged_attention(query: Tensor, key: Tensor, value: Tensor, cache: PagedLayerCache, scale: float) -> Tensor:
    """Write the step's keys and values to their slots, then attend causally.

    Token p of a request sees its request's tokens `[0, p]`, or `[p - window + 1, p]` in a window group. Query head h
    reads kv head `h // (query_heads // kv_heads)`.

    Args:
        query: `[T, query_heads, head_dim]`.
        key: `[T, kv_heads, head_dim]`.
        value: `[T, kv_heads, value_dim]`.
        cache: the layer's memory and the step's batch; slots of the step's tokens are written.
        scale: factor on the scores.

    Returns:
        `[T, query_heads, value_dim]`, dtype of `query`.
    """
    view, batch = cache.view, cache.batch
    view.key_rows[batch.write_rows(view.key_strides)] = key.flatten(1).to(view.key_rows.dtype)
    view.value_rows[batch.write_rows(view.value_strides)] = value.flatten(1).to(view.value_rows.dtype)
    # [T, kv_heads, queries per kv head, head_dim]: queries of one kv head share its keys without copies of them.
    grouped = query.unflatten(1, (key.shape[1], -1))
    if len(batch.decodes) == 1 and not batch.prefills:
        return _decode(grouped, view, batch.decodes[0], scale).flatten(1, 2)
    out = query.new_empty(*grouped.shape[:3], value.shape[2])
    for decode in batch.decodes:
        out[decode.tokens] = _decode(grouped.index_select(0, decode.tokens), view, decode, scale)
    for prefill in batch.prefills:
        _prefill(grouped, view, prefill, batch.window, scale, out)
    return out.flatten(1, 2)


def _decode(query: Tensor, view: PagedView, decode: DecodeGather, scale: float) -> Tensor:
    """Attend from one token per request, `[R, kv_heads, group, head_dim]`."""
    keys, values = _take(view, decode.gather, query.dtype)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=decode.mask, scale=scale)


def _prefill(
    query: Tensor, view: PagedView, prefill: PrefillGather, window: int | None, scale: float, out: Tensor
) -> None:
    """Attend from one request's tokens, writing their rows of `out` `[T, kv_heads, group, value_dim]`."""
    keys, values = _take(view, prefill.gather, query.dtype)
    queries = query[prefill.begin : prefill.end].permute(1, 2, 0, 3)
    outputs = out[prefill.begin : prefill.end].permute(1, 2, 0, 3)
    # Batch is the kv head, heads are its queries' heads, which share keys and values by a stride of 0.
    keys = keys[0, :, None].expand(-1, queries.shape[1], -1, -1)
    values = values[0, :, None].expand(-1, queries.shape[1], -1, -1)
    step = min(_MAX_QUERIES, max(1, _MAX_SCORES // prefill.gather.width))
    for begin in range(0, queries.shape[2], step):
        end = min(begin + step, queries.shape[2])
        # Columns count from the first position the request's first token sees; column `behind` is the query itself.
        last = prefill.offset + end
        first = max(0, prefill.offset + begin - window + 1) if window else 0
        behind = prefill.offset + begin - first
        mask = torch.ones(end - begin, last - first, dtype=torch.bool, device=query.device).tril_(behind)
        if window:
            mask.triu_(behind - window + 1)
        outputs[:, :, begin:end] = F.scaled_dot_product_attention(
            queries[:, :, begin:end], keys[:, :, first:last], values[:, :, first:last], attn_mask=mask, scale=scale
        )


def _take(view: PagedView, gather: Gather, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values `[R, kv_heads, width, dim]` of a gather's contexts, zeros at paddings."""
    shape = (len(gather.block_ids), gather.width, view.num_kv_heads, -1)
    keys = view.key_rows.index_select(0, gather.rows(view.key_strides)).view(shape)
    values = view.value_rows.index_select(0, gather.rows(view.value_strides)).view(shape)
    return keys.transpose(1, 2).to(dtype), values.transpose(1, 2).to(dtype)
