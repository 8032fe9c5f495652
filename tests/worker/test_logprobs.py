"""Log-probabilities: one sort per row says what must come out."""

import random

import numpy as np
import pytest
import torch

from dalsegno.errors import EngineError
from dalsegno.types import TokenLogprobs
from dalsegno.worker import logprobs
from dalsegno.worker.logprobs import row_slices, token_logprobs


def _naive(row: np.ndarray, token: int, count: int) -> TokenLogprobs:
    wide = row.astype(np.float64)
    values = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    return TokenLogprobs((token, *order), tuple(values[[token, *order]]), int((row >= row[token]).sum()))


@pytest.mark.parametrize("slice_elements", [1, 100, 1 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_every_report_is_what_a_sort_says(seed: int, slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", slice_elements)
    rng = random.Random(seed)
    num_rows, vocab = rng.choice([1, 3, 7]), rng.choice([5, 37])
    # Halves, so that many tokens tie.
    logits = (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4).round() / 2
    logits[0, 1:3] = -torch.inf
    before = logits.clone()
    asked = [(rng.randrange(num_rows), rng.choice([0, 3, 4]), rng.choice([0, 1, 2, 5, 20])) for _ in range(9)]
    rows, tokens, counts = zip(*asked, strict=True)
    found = token_logprobs(logits, rows, tokens, counts)
    assert torch.equal(logits, before)
    for (row, token, count), report in zip(asked, found, strict=True):
        expected = _naive(before[row].numpy(), token, count)
        assert (report.token_ids, report.rank) == (expected.token_ids, expected.rank)
        np.testing.assert_allclose(report.logprobs, expected.logprobs, atol=1e-5)
        assert report == token_logprobs(logits[row : row + 1], [0], [token], [count])[0]


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(EngineError, match="not a number"):
        token_logprobs(torch.tensor([[0.0, float("nan")]]), [0], [0], [1])


@pytest.mark.parametrize("vocab_size", [1, 1000, 1 << 23, 1 << 25])
def test_slices_cover_all_rows_once_and_hold_at_least_one(vocab_size: int) -> None:
    slices = list(row_slices(20, vocab_size))
    assert [row for start, end in slices for row in range(start, end)] == list(range(20))
    assert all(0 < (end - start) * vocab_size <= max(vocab_size, 1 << 23) for start, end in slices)
    assert list(row_slices(0, vocab_size)) == []
