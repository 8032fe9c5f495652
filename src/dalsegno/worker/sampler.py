"""From logits to token ids.

Every row is sampled on its own: nothing here depends on which rows come together. One number per sampled token, a hash
of (seed, sample index, position), drives the choice, so batching, chunking and preemption do not change it. Ties go to
the lowest id.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from dalsegno.errors import EngineError
from dalsegno.types import SampleSpec
from dalsegno.worker.logit_rules import apply_logit_rules

__all__ = ["sample_tokens", "uniform"]


def sample_tokens(logits: Tensor, specs: Sequence[SampleSpec]) -> list[list[int]]:
    """Sample `len(spec.sample_indices)` tokens from each row.

    Args:
        logits: `[N, vocab]` float32; not changed.
        specs: how to sample from each row.

    Returns:
        Token ids per row, in the order of its sample indices.

    Raises:
        EngineError: a row has a NaN, or no token that is allowed.
    """
    logits = apply_logit_rules(logits, specs)
    best, greedy = logits.max(dim=-1)
    if not bool(best.isfinite().all()):
        rows = [i for i, finite in enumerate(best.isfinite().tolist()) if not finite]
        raise EngineError(f"logits of rows {rows} have no finite maximum: the model's output is not a number")
    sampled = [[token] * len(spec.sample_indices) for token, spec in zip(greedy.tolist(), specs, strict=True)]
    drawn = [i for i, spec in enumerate(specs) if spec.params.temperature > 0 and spec.params.top_k != 1]
    if drawn:
        chosen = [specs[i] for i in drawn]
        weights = _weights(logits[drawn], best[drawn], chosen)
        for i, tokens in zip(drawn, _draw(weights, chosen), strict=True):
            sampled[i] = tokens
    return sampled


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token at `position` of one sample; a hash of the three."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, sample_index, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _weights(logits: Tensor, best: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Return `[N, vocab]` float64 weights, not normalized; tokens that min-p, top-k and top-p drop have none."""
    temperatures = torch.tensor([spec.params.temperature for spec in specs], dtype=torch.float64, device=logits.device)
    # The best token is at 0 before the division, so no temperature overflows.
    weights = (logits.double() - best.double()[:, None]).div_(temperatures[:, None]).exp_()
    if any(spec.params.min_p for spec in specs):
        shares = torch.tensor([spec.params.min_p for spec in specs], dtype=torch.float64, device=logits.device)
        # The best token weighs 1.
        weights.masked_fill_(weights < shares[:, None], 0.0)
    for i, spec in enumerate(specs):
        if 0 < spec.params.top_k < logits.shape[1]:
            weights[i] *= _top_k(logits[i], spec.params.top_k)
        if spec.params.top_p < 1.0:
            weights[i] = _top_p(weights[i], spec.params.top_p)
    return weights


def _top_k(row: Tensor, count: int) -> Tensor:
    """Return `[vocab]` bool, the `count` best tokens; those that tie for the last places stay by lowest id."""
    last = row.topk(count).values[-1]
    above, tied = row > last, row == last
    return above | (tied & (tied.cumsum(0) <= count - above.sum()))


def _top_p(weights: Tensor, share: float) -> Tensor:
    """Return the weights with only the heaviest tokens left, the fewest that have `share` of the whole."""
    ordered, ids = weights.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    return weights.index_fill(0, ids[before >= share * ordered.sum()], 0.0)


def _draw(weights: Tensor, specs: Sequence[SampleSpec]) -> list[list[int]]:
    """Pick tokens where each sample's number falls in the running sum of the weights."""
    sums = weights.cumsum(dim=-1)
    counts = [len(spec.sample_indices) for spec in specs]
    numbers = [uniform(spec.seed, index, spec.position) for spec in specs for index in spec.sample_indices]
    sums = sums.repeat_interleave(torch.tensor(counts, device=sums.device), dim=0)
    total = sums[:, -1:]
    points = torch.tensor(numbers, dtype=torch.float64, device=sums.device)[:, None] * total
    # A point at the very end would be behind every token that has a weight.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    picked = iter(torch.searchsorted(sums, points, right=True).flatten().tolist())
    return [[next(picked) for _ in range(count)] for count in counts]
