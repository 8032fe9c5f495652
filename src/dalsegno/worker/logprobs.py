"""Log-probabilities of given tokens and of the likeliest ones, from the model's own logits.

Every row is computed on its own and ties go to the lowest id, so nothing depends on which rows come together. Rows are
taken in slices, so the memory beside the logits is bounded whatever is asked.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dalsegno.errors import EngineError
from dalsegno.types import TokenLogprobs

__all__ = ["row_slices", "token_logprobs"]

_SLICE_ELEMENTS = 1 << 23


def row_slices(num_rows: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    """Cut rows of logits into slices `[start, end)` of some 32 MiB of float32 each, at least a row."""
    step = max(1, _SLICE_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        yield start, min(num_rows, start + step)


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Report on tokens, each at a row of its own or at one it shares.

    Args:
        logits: `[N, vocab]` float32; not changed.
        rows: index of the row of each token.
        token_ids: the tokens.
        counts: how many of the likeliest tokens to report with each.

    Raises:
        EngineError: a row has a NaN.
    """
    found: list[TokenLogprobs] = []
    for start, end in row_slices(len(rows), logits.shape[1]):
        part = slice(start, end)
        index = torch.tensor(rows[part], device=logits.device)
        found += _report(logits.index_select(0, index), token_ids[part], counts[part])
    return found


def _report(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    values = logits.log_softmax(dim=-1)
    own = values.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    if bool(own.isnan().any()):
        raise EngineError("log-probabilities were asked for, and the model's output is not a number")
    # Counting in 32 bits is many times faster than in 64.
    ranks = (values >= own).sum(dim=-1, dtype=torch.int32).tolist()
    best_ids = _best(values, min(max(counts), logits.shape[1]))
    best = values.gather(1, best_ids).tolist()
    low, high = logits.aminmax(dim=-1)
    scales = high.maximum(-low).tolist()
    reports = []
    for row, (token_id, value, ids) in enumerate(
        zip(token_ids, own.flatten().tolist(), best_ids.tolist(), strict=True)
    ):
        count = counts[row]
        reports.append(TokenLogprobs((token_id, *ids[:count]), (value, *best[row][:count]), ranks[row], scales[row]))
    return reports


def _best(values: Tensor, count: int) -> Tensor:
    """Return `[N, count]`, the ids of the best values of each row, best first; ties go to the lowest id."""
    if count == 0:
        return values.new_empty((len(values), 0), dtype=torch.int64)
    best = values.topk(min(count + 1, values.shape[1]), dim=-1)
    ids = best.indices[:, :count].clone()
    if best.values.shape[1] > count:
        # Which of the tokens that tie for the last place `topk` takes is left open.
        tied = (best.values[:, count - 1] == best.values[:, count]).nonzero().flatten()
        if len(tied):
            ids[tied] = _lowest(values[tied], best.values[tied, count - 1 : count], count)
    ids = ids.sort(dim=-1).values
    order = values.gather(1, ids).argsort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order)


def _lowest(values: Tensor, last: Tensor, count: int) -> Tensor:
    """Return `[N, count]`, the ids above `last` `[N, 1]` and the lowest of those that equal it."""
    above, tied = values > last, values == last
    kept = above | (tied & (tied.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    return kept.nonzero()[:, 1].view(len(values), count)
