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
    known = {i: _known(spec) for i, spec in enumerate(specs) if spec.params.has_penalties}
    repeated = [i for i in known if specs[i].params.repetition_penalty != 1.0]
    if repeated:
        tokens = [_distinct(known[i], logits.shape[1]) for i in repeated]
        place = _place(repeated, tokens, logits)
        penalties = _spread([specs[i].params.repetition_penalty for i in repeated], tokens, logits)
        values = logits[place]
        logits = logits.index_put(place, values * torch.where(values > 0, 1 / penalties, penalties))
    counted = [i for i in known if specs[i].params.frequency_penalty or specs[i].params.presence_penalty]
    if counted:
        answers = [np.unique(known[i][specs[i].num_prompt_tokens :], return_counts=True) for i in counted]
        tokens = [ids for ids, _ in answers]
        place = _place(counted, tokens, logits)
        counts = torch.from_numpy(np.concatenate([count for _, count in answers])).to(logits)
        values = logits[place] - _spread([specs[i].params.frequency_penalty for i in counted], tokens, logits) * counts
        presence = _spread([specs[i].params.presence_penalty for i in counted], tokens, logits)
        logits = logits.index_put(place, values - presence)
    return logits


def _known(spec: SampleSpec) -> np.ndarray:
    assert spec.known_token_ids is not None, "a request with penalties comes with the tokens it knows"
    # A copy: the request cannot append to its array while a view of it is alive.
    return np.array(spec.known_token_ids, dtype=np.int64)


def _distinct(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return each id once; faster than sorting a long prompt."""
    present = np.zeros(vocab_size, dtype=np.bool_)
    present[token_ids] = True
    return np.flatnonzero(present)


def _place(rows: Sequence[int], tokens: Sequence[np.ndarray], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and token of every entry of `tokens`, one array per row; no entry comes twice."""
    spread = np.repeat(np.asarray(rows), [len(ids) for ids in tokens])
    return torch.from_numpy(spread).to(like.device), torch.from_numpy(np.concatenate(tokens)).to(like.device)


def _spread(values: Sequence[float], tokens: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """Return each row's value once per entry of its tokens."""
    return torch.from_numpy(np.repeat(np.asarray(values), [len(ids) for ids in tokens])).to(like)
