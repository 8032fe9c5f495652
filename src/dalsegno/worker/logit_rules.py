"""What requests ask to be done to their logits before a token is picked: forbidden tokens, biases, penalties.

The order is vLLM's; temperature and what drops tokens come after it. Every rule touches only the rows that ask for it,
all of them at once, and what it does to a row depends on that row alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dalsegno.types import SampleSpec

__all__ = ["apply_logit_rules"]


def apply_logit_rules(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Return the logits to sample from; the given ones are not changed, and returned where no row asks for anything.

    Args:
        logits: `[N, vocab]` float32.
        specs: what each row asks for.
    """
    return _penalize(_add_biases(_forbid(logits, specs), specs), specs)


def _forbid(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Return logits with the forbidden tokens at minus infinity."""
    vocab_size = logits.shape[1]
    pairs = [(i, token) for i, spec in enumerate(specs) for token in spec.forbidden_token_ids if token < vocab_size]
    if not pairs:
        return logits
    rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
    return logits.index_put((rows, tokens), logits.new_tensor(-torch.inf))


def _add_biases(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    biases = [(i, *pair) for i, spec in enumerate(specs) for pair in (spec.params.logit_bias or {}).items()]
    if not biases:
        return logits
    rows, tokens, values = zip(*biases, strict=True)
    place = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    # A row has at most one bias per token, so no place comes twice.
    return logits.index_put(place, logits[place] + torch.tensor(values, dtype=logits.dtype, device=logits.device))


def _penalize(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Return logits with the repetition penalty for tokens known so far, then those for tokens of the answer."""
    asking = [i for i, spec in enumerate(specs) if spec.params.has_penalties]
    if not asking:
        return logits
    params = [specs[i].params for i in asking]
    known = [_known(specs[i]) for i in asking]
    answers = [ids[specs[i].num_prompt_tokens :] for i, ids in zip(asking, known, strict=True)]
    rows = logits[asking]
    repetition = _column([p.repetition_penalty for p in params], rows)
    factors = torch.where(rows > 0, 1 / repetition, repetition)
    rows = torch.where(_counts(known, rows) > 0, rows * factors, rows)
    if any(p.frequency_penalty or p.presence_penalty for p in params):
        counts = _counts(answers, rows)
        rows = rows - _column([p.frequency_penalty for p in params], rows) * counts
        rows = rows - _column([p.presence_penalty for p in params], rows) * (counts > 0)
    return logits.index_copy(0, torch.tensor(asking, device=logits.device), rows)


def _known(spec: SampleSpec) -> np.ndarray:
    assert spec.known_token_ids is not None, "a request with penalties comes with the tokens it knows"
    # A copy: the request cannot append to its array while a view of it is alive.
    return np.array(spec.known_token_ids, dtype=np.int64)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _counts(token_ids: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """Return `[R, vocab]`, how often each row's tokens come."""
    rows = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    place = tuple(torch.from_numpy(ids).to(like.device) for ids in (rows, np.concatenate(token_ids)))
    return torch.zeros_like(like).index_put_(place, like.new_tensor(1.0), accumulate=True)
