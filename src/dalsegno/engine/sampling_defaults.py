"""Sampling options a checkpoint asks for in generation_config.json, used where the caller gives no `SamplingParams`.

As in vLLM: temperature, top_p, top_k and max_new_tokens (as max_tokens) are taken over, `do_sample` is not; everything
else keeps the default of `SamplingParams`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from dalsegno.errors import CheckpointError, OptionError
from dalsegno.sampling_params import SamplingParams

__all__ = ["sampling_defaults"]

_log = logging.getLogger(__name__)

_TAKEN = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_tokens"}
_NOT_SUPPORTED = {"repetition_penalty": 1, "min_p": 0}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `SamplingParams` from a generation_config.json.

    Values we cannot follow are logged as a warning that names them.

    Raises:
        CheckpointError: a value is out of range.
    """
    found = {ours: generation_config[name] for name, ours in _TAKEN.items() if generation_config.get(name) is not None}
    try:
        SamplingParams(**found)
    except OptionError as error:
        raise CheckpointError(f"generation_config.json: {error}") from error
    for name, neutral in _NOT_SUPPORTED.items():
        value = generation_config.get(name)
        if value is not None and value != neutral:
            _log.warning("generation_config.json asks for %s=%s, which is not supported and left out", name, value)
    return found
