"""Options of other engines: accepted at the value that switches them off, refused by name otherwise."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from dalsegno.errors import OptionError

__all__ = ["check_foreign_options", "check_integer", "check_seconds", "nearest_name"]

# Half of all letters in common is seen between names that have nothing to do with each other.
_LIKENESS = 0.6


def check_foreign_options(
    given: Mapping[str, Any],
    off_values: Mapping[str, tuple[Any, ...]],
    valid: Iterable[str],
    owner: str,
    instead: Mapping[str, str] | None = None,
) -> None:
    """Raise `OptionError` unless every given option is a known foreign one at a value that switches it off.

    Args:
        given: options that are not ours, by name.
        off_values: for each foreign option we know, the values that ask for nothing.
        valid: our own option names, for the nearest-name hint.
        owner: what the options belong to, for the message.
        instead: which of our options does what a foreign one is for, where there is one.
    """
    names = list(valid)
    for name, value in given.items():
        if name in off_values:
            # `1 == True`, so the type is compared too; an int is fine where a float switches the option off.
            if any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in off_values[name]):
                continue
            allowed = " or ".join(repr(off) for off in off_values[name])
            hint = f"; use {instead[name]}" if instead and name in instead else ""
            raise OptionError(f"{owner} does not support {name}={value!r}; only {name}={allowed} is accepted{hint}")
        nearest = nearest_name(name, names) or nearest_name(name, off_values)
        hint = f"did you mean {nearest}?" if nearest else f"valid names: {', '.join(sorted(names))}"
        raise OptionError(f"{owner} has no option {name!r}; {hint}")


def nearest_name(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that `name` looks most like, None where it looks like none of them."""
    nearest = difflib.get_close_matches(name, list(valid), n=1, cutoff=_LIKENESS)
    return nearest[0] if nearest else None


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return `value` if it is an integer in `[minimum, maximum]`, else raise `OptionError` naming the range."""
    allowed = f"an integer of at least {minimum}" + (f" and at most {maximum}" if maximum is not None else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} must be {allowed}, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        raise OptionError(f"{name} must be {allowed}, got {value}")
    return value


def check_seconds(name: str, value: Any) -> float:
    """Return `value` if it is a positive, finite number of seconds, else raise `OptionError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise OptionError(f"{name} must be a number of seconds above 0, got {value!r}")
    return float(value)
