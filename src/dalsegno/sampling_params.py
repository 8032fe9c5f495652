"""What a caller asks of sampling, under the names vLLM users know."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dalsegno.errors import OptionError
from dalsegno.options import check_foreign_options, check_integer

__all__ = ["SamplingParams"]

_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "detokenize": (True,),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "include_stop_str_in_output": (False,),
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "repetition_detection": (None,),
    "skip_reading_prefix_cache": (None, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
}

_MAX_BIAS = 100.0
_MAX_LOGPROBS = 20


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How to sample from one prompt.

    Attributes:
        n: samples per prompt; the prompt is prefilled once.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probabilities add up to this, in (0, 1].
        top_k: keep this many tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this share as likely as the likeliest, in [0, 1]; 0 keeps all.
        presence_penalty: taken off the logit of every token the answer has so far, in [-2, 2].
        frequency_penalty: taken off once for each time the answer has it, in [-2, 2].
        repetition_penalty: divides a positive logit, and multiplies another, of every token that prompt or answer
            have, greater than 0; 1 changes nothing.
        logit_bias: token id -> added to its logit, cut to [-100, 100]; None or {} adds nothing.
        seed: fixes the random streams of this request; None takes the engine's.
        stop: strings that end the answer; the string itself is not part of the text.
        stop_token_ids: ids that end the answer, besides the model's end tokens.
        ignore_eos: go on after the model's end tokens.
        max_tokens: most tokens to generate; None is up to the model's length.
        min_tokens: no end token before this many.
        logprobs: report the log-probabilities of this many likeliest tokens, and of the sampled one, from the model's
            own logits; at most 20, 0 reports the sampled one only, None nothing.
        prompt_logprobs: the same for the tokens of the prompt, all of which are then computed: nothing is a hit.

    Raises:
        OptionError: an option is out of range, unknown, or one we do not support.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float] | None = field(hash=False)
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None

    def __init__(
        self,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **foreign: Any,
    ) -> None:
        check_foreign_options(foreign, _OFF_VALUES, [f.name for f in fields(self)], "SamplingParams")
        values = {
            "n": check_integer("n", n, 1, 1024),
            "temperature": _number("temperature", temperature, 0.0, None),
            "top_p": _number("top_p", top_p, 0.0, 1.0, open_minimum=True),
            "top_k": max(0, check_integer("top_k", top_k, -1)),
            "min_p": _number("min_p", min_p, 0.0, 1.0),
            "presence_penalty": _number("presence_penalty", presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _number("repetition_penalty", repetition_penalty, 0.0, None, open_minimum=True),
            "logit_bias": _logit_bias(logit_bias),
            "seed": None if seed is None else check_integer("seed", seed, -(2**63), 2**63 - 1),
            "stop": _stop_strings(stop),
            "stop_token_ids": _stop_token_ids(stop_token_ids),
            "ignore_eos": _flag("ignore_eos", ignore_eos),
            "max_tokens": None if max_tokens is None else check_integer("max_tokens", max_tokens, 1),
            "min_tokens": check_integer("min_tokens", min_tokens, 0, max_tokens),
            "logprobs": _logprobs("logprobs", logprobs),
            "prompt_logprobs": _logprobs("prompt_logprobs", prompt_logprobs),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on which tokens there were before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def _number(name: str, value: Any, minimum: float, maximum: float | None, *, open_minimum: bool = False) -> float:
    low = f"greater than {minimum:g}" if open_minimum else f"at least {minimum:g}"
    allowed = f"a finite number {low}" + (f" and at most {maximum:g}" if maximum is not None else "")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{name} must be {allowed}, got {value!r}")
    if value < minimum or (open_minimum and value == minimum) or (maximum is not None and value > maximum):
        raise OptionError(f"{name} must be {allowed}, got {value!r}")
    return float(value)


def _logprobs(name: str, count: int | None) -> int | None:
    return None if count is None else check_integer(name, count, 0, _MAX_LOGPROBS)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {value!r}")
    return value


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    given = (stop,) if isinstance(stop, str) else _items(stop)
    if given is None or not all(isinstance(string, str) and string for string in given):
        raise OptionError(f"stop must be a non-empty string or a list of them, got {stop!r}")
    return given


def _stop_token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    given = _items(ids)
    if given is None:
        raise OptionError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    return tuple(check_integer("stop_token_ids", token_id, 0) for token_id in given)


def _logit_bias(bias: Mapping[int, float] | Mapping[str, float] | None) -> dict[int, float] | None:
    """Biases by id; ids may be strings of digits, as in JSON."""
    if bias is None:
        return None
    allowed = "a dict of token ids to numbers"
    if not isinstance(bias, Mapping):
        raise OptionError(f"logit_bias must be {allowed}, got {bias!r}")
    found: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0 or not is_number:
            raise OptionError(f"logit_bias must be {allowed}, got {key!r}: {value!r}")
        found[token_id] = min(_MAX_BIAS, max(-_MAX_BIAS, float(value)))
    return found or None


def _items(given: Any) -> tuple[Any, ...] | None:
    """What a list holds (None is an empty one), or None where `given` is no list."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable | None):
        return None
    return tuple(given or ())
