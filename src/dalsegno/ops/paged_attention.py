"""Attention over paged keys and values."""

from torch import Tensor

from dalsegno.ops import reference
from dalsegno.ops.batch import PagedLayerCache

__all__ = ["paged_attention"]


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
    return reference.paged_attention(query, key, value, cache, scale)
