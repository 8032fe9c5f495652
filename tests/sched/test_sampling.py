"""What a sampled token means for its request."""

from typing import Any

import pytest

from dalsegno.request import FinishReason, Request
from dalsegno.sampling_params import SamplingParams
from dalsegno.sched.sampling import finish_of, sample_spec
from dalsegno.testing.builders import make_request

END, STOP, OTHER = 7, 8, 9
STOPPED, STOPPED_BY = (FinishReason.STOP, None), (FinishReason.STOP, STOP)
GOES_ON, TOO_LONG = (None, None), (FinishReason.LENGTH, None)


def request_with(num_output: int, last: int, *, max_tokens: int = 10, **params: Any) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=[STOP], **params)
    request = make_request("r", range(20), max_tokens, params=sampling, end_token_ids=frozenset({END}))
    request.token_ids.extend([OTHER] * (num_output - 1) + [last])
    return request


@pytest.mark.parametrize(
    ("num_output", "last", "params", "expected"),
    [
        (3, OTHER, {}, GOES_ON),
        (3, END, {}, STOPPED),
        (3, STOP, {}, STOPPED_BY),
        (3, END, {"ignore_eos": True}, GOES_ON),
        (3, STOP, {"ignore_eos": True}, STOPPED_BY),
        (3, END, {"min_tokens": 3}, STOPPED),
        (3, END, {"min_tokens": 4}, GOES_ON),
        (3, STOP, {"min_tokens": 4}, GOES_ON),
        (10, OTHER, {}, TOO_LONG),
        (10, END, {}, STOPPED),
        (10, END, {"ignore_eos": True}, TOO_LONG),
        (1, OTHER, {"max_tokens": 1}, TOO_LONG),
    ],
)
def test_a_token_ends_a_request_for_the_first_reason_that_holds(
    num_output: int, last: int, params: dict[str, Any], expected: tuple[FinishReason | None, int | None]
) -> None:
    request = request_with(num_output, last, **params)
    assert finish_of(request, last, max_model_len=1000) == expected


def test_the_models_length_ends_a_request() -> None:
    request = request_with(3, OTHER)
    assert finish_of(request, OTHER, max_model_len=24) == GOES_ON
    assert finish_of(request, OTHER, max_model_len=23) == TOO_LONG


@pytest.mark.parametrize(("num_output", "forbidden"), [(1, (END, STOP)), (3, (END, STOP)), (4, ()), (5, ())])
def test_end_tokens_are_forbidden_before_the_least_number_of_tokens(
    num_output: int, forbidden: tuple[int, ...]
) -> None:
    spec = sample_spec(request_with(num_output, OTHER, min_tokens=4))
    assert spec.forbidden_token_ids == forbidden


def test_a_sample_is_asked_for_the_position_it_will_have() -> None:
    """Random streams are keyed by (seed, sample, position), so a preemption between two tokens changes none."""
    request = request_with(3, OTHER)
    request.seed, request.sample_index = 5, 2
    spec = sample_spec(request)
    assert (spec.seed, spec.sample_indices, spec.position) == (5, (2,), 23)


def test_one_prefill_asks_for_the_first_token_of_every_sample() -> None:
    assert sample_spec(make_request("r", range(20), 5, n=4)).sample_indices == (0, 1, 2, 3)
