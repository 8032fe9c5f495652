"""Where no sampling parameters are given, the checkpoint's own are used, as in vLLM."""

import pytest

from dalsegno.engine.sampling_defaults import sampling_defaults
from dalsegno.errors import CheckpointError


def test_the_known_ones_are_taken_over_and_nothing_else() -> None:
    config = {
        "do_sample": True,
        "eos_token_id": [1, 2],
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 64,
    }
    assert sampling_defaults(config) == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_tokens": 64,
    }
    assert sampling_defaults({"temperature": None, "do_sample": False}) == {}


def test_a_bad_value_names_the_file_and_the_option() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: temperature must be .* got -1"):
        sampling_defaults({"temperature": -1})
