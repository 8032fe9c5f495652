"""Sampling parameters: strict about what they are given, as vLLM users write them."""

import math
from typing import Any

import pytest

from dalsegno.errors import OptionError
from dalsegno.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.5),
        ("temperature", "0"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", "x"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", b"a"),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("stop_token_ids", "nine"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", "1"),
        ("frequency_penalty", 2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"1.5": 1.0}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {1: math.nan}),
        ("ignore_eos", 1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_the_parameter(name: str, bad: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name} must be "):
        SamplingParams(**{name: bad})


def test_equal_requests_are_equal_however_they_are_written() -> None:
    assert SamplingParams(stop="a", top_k=-1) == SamplingParams(stop=["a"], top_k=0)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams(stop=[], stop_token_ids=())
    assert SamplingParams(stop_token_ids=iter([3, 4])).stop_token_ids == (3, 4)  # type: ignore[arg-type]


def test_biases_are_cut_and_may_come_from_json() -> None:
    params = SamplingParams(logit_bias={"7": 500, "8": -math.inf, "0": 1})
    assert params.logit_bias == {7: 100.0, 8: -100.0, 0: 1.0}
    assert params == SamplingParams(logit_bias={7: 100, 8: -100, 0: 1})
    assert SamplingParams(logit_bias={}) == SamplingParams(logit_bias=None)
    assert len({params, SamplingParams()}) == 2, "parameters can be hashed"


def test_a_parameter_of_vllm_is_accepted_where_it_asks_for_nothing_and_refused_by_name_otherwise() -> None:
    off: dict[str, Any] = {
        "flat_logprobs": False,
        "extra_args": None,
        "bad_words": [],
    }
    assert SamplingParams(**off) == SamplingParams()
    asking: dict[str, Any] = {"flat_logprobs": True, "extra_args": {"a": 1}, "detokenize": False}
    for name, value in asking.items():
        with pytest.raises(OptionError, match=rf"SamplingParams does not support {name}="):
            SamplingParams(**{name: value})


def test_an_unknown_name_gets_the_nearest_of_ours_or_all_of_them() -> None:
    with pytest.raises(OptionError, match="no option 'tempreture'; did you mean temperature"):
        SamplingParams(tempreture=1)
    with pytest.raises(OptionError, match="no option 'custom_params'; valid names: frequency_penalty, ignore_eos"):
        SamplingParams(custom_params=None)
