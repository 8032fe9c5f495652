"""Sampling options a checkpoint asks for in generation_config.json, used where the caller gives no `SamplingParams`.

As in vLLM: temperature, top_p, top_k and max_new_tokens (as max_tokens) are taken over, `do_sample` is not; everything
else keeps the default of `SamplingParams`.
"""

from collections.abc import Mapping
from typing import Any

from dalsegno.errors import CheckpointError, OptionError
from dalsegno.sampling_params import SamplingParams

__all__ = ["sampling_defaults"]

_TAKEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `SamplingParams` from a generation_config.json.

    Raises:
        CheckpointError: a value is out of range.
    """
    found = {ours: generation_config[name] for name, ours in _TAKEN.items() if generation_config.get(name) is not None}
    try:
        SamplingParams(**found)
    except OptionError as error:
        raise CheckpointError(f"generation_config.json: {error}") from error
    return found
