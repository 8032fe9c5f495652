"""The gated delta rule over states kept in blocks."""

from torch import Tensor

from dalsegno.ops import reference
from dalsegno.ops.batch import StateLayerCache

__all__ = ["gated_delta_rule"]


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
    return reference.gated_delta_rule(query, key, value, log_decay, beta, cache, part)
