"""Biases and penalties: the rules of vLLM, against one loop over rows and tokens."""

import random
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dalsegno.sampling_params import SamplingParams
from dalsegno.types import SampleSpec
from dalsegno.worker.logit_rules import apply_logit_rules
from dalsegno.worker.sampler import sample_tokens

VOCAB = 53


def _spec(
    prompt: list[int], answer: list[int], forbidden: tuple[int, ...] = (), temperature: float = 0.0, **options: Any
) -> SampleSpec:
    params = SamplingParams(temperature=temperature, **options)
    known = array("I", prompt + answer) if params.has_penalties else None
    return SampleSpec(params, 3, (0,), len(prompt + answer), forbidden, known, len(prompt))


def _naive(row: np.ndarray, spec: SampleSpec, prompt: list[int], answer: list[int]) -> np.ndarray:
    params = spec.params
    row = row.astype(np.float32).copy()
    for token in range(len(row)):
        if token in spec.forbidden_token_ids:
            row[token] = -np.inf
        row[token] += np.float32((params.logit_bias or {}).get(token, 0.0))
        if token in prompt or token in answer:
            penalty = np.float32(params.repetition_penalty)
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] -= np.float32(params.frequency_penalty) * answer.count(token)
        row[token] -= np.float32(params.presence_penalty) * (token in answer)
    return row


def _random_case(rng: random.Random) -> tuple[list[int], list[int], SampleSpec]:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 70]))]
    answer = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 30]))]
    options: dict[str, Any] = {
        "presence_penalty": rng.choice([0.0, 0.0, -1.5, 2.0]),
        "frequency_penalty": rng.choice([0.0, 0.0, -0.3, 0.7]),
        "repetition_penalty": rng.choice([1.0, 1.0, 0.8, 1.7]),
        "logit_bias": {token: rng.uniform(-3, 3) for token in rng.sample(range(VOCAB), rng.choice([0, 0, 4]))},
    }
    forbidden = tuple(rng.sample(range(VOCAB + 9), rng.choice([0, 3])))
    return prompt, answer, _spec(prompt, answer, forbidden, **options)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_what_the_rules_say_in_any_batch(seed: int) -> None:
    rng = random.Random(seed)
    cases = [_random_case(rng) for _ in range(rng.choice([1, 2, 17]))]
    specs = [spec for _, _, spec in cases]
    logits = torch.randn(len(cases), VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    found = apply_logit_rules(logits, specs)
    assert torch.equal(logits, before)
    for i, (prompt, answer, spec) in enumerate(cases):
        np.testing.assert_allclose(found[i].numpy(), _naive(before[i].numpy(), spec, prompt, answer), rtol=1e-5)
        assert torch.equal(apply_logit_rules(logits[i : i + 1], [spec])[0], found[i])


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    logits = torch.randn(3, VOCAB)
    assert apply_logit_rules(logits, [_spec([1], [2], min_p=0.5)] * 3) is logits


def test_a_request_may_append_to_its_tokens_after_the_step() -> None:
    spec = _spec([1, 2], [3], repetition_penalty=2.0)
    found = apply_logit_rules(torch.ones(1, VOCAB), [spec])
    assert spec.known_token_ids is not None
    spec.known_token_ids.append(4)
    assert found[0, 3] == 0.5
    assert found[0, 4] == 1.0


def _greedy(logits: Tensor, **options: Any) -> int:
    return sample_tokens(logits, [_spec([1], [2], **options)])[0][0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"logit_bias": {0: 3.0}}, 0),
        ({"logit_bias": {1: -100}}, 2),
        ({"repetition_penalty": 10.0}, 3),
        ({"presence_penalty": 2.0}, 1),
        ({"presence_penalty": 2.0, "logit_bias": {1: -100}}, 3),
        ({"frequency_penalty": 2.0, "logit_bias": {1: -100}}, 3),
        ({"frequency_penalty": -2.0}, 2),
        ({"forbidden": (0,), "logit_bias": {0: 100}}, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_the_rules_decide_the_token_greedy_or_not(options: dict[str, Any], expected: int, temperature: float) -> None:
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, :4] = torch.tensor([1.0, 3.0, 2.5, 2.0])
    assert _greedy(logits, temperature=temperature, **options) == expected
