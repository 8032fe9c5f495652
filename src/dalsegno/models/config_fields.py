"""Reading config.json field by field: every value is checked for type and range where it is read.

A field that is absent or null takes its default; a required one that is absent is an error. What is read here is what
changes the model's mathematics; fields that do not (dropout, initialisation, cache flags) are never looked at.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dalsegno.errors import CheckpointError

__all__ = ["ConfigFields"]


class ConfigFields:
    """A JSON object of a model's configuration, with checked access.

    Attributes:
        values: the object itself.
        owner: what it is called in messages, such as "config.json".
    """

    def __init__(self, values: Mapping[str, Any], owner: str = "config.json") -> None:
        self.values = values
        self.owner = owner

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def require(self, name: str) -> Any:
        """Return a field as it is, or raise `CheckpointError` when it is absent or null."""
        value = self.values.get(name)
        if value is None:
            raise CheckpointError(f"{self.owner} has no {name!r}, which this model needs")
        return value

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`; without a default the field is required."""
        value = self.require(name) if default is None else self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, value, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """Return a finite number greater than `minimum`; without a default the field is required."""
        value = self.require(name) if default is None else self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum < value < float("inf"):
            raise self.error(name, value, f"a finite number greater than {minimum:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: Iterable[str], default: str) -> str:
        """Return a string that is one of `allowed`."""
        names = tuple(allowed)
        value = self._get(name, default)
        if value not in names:
            raise self.error(name, value, " or ".join(repr(item) for item in names) + " (others are not supported)")
        return str(value)

    def strings(self, name: str, allowed: Iterable[str], length: int) -> list[str]:
        """Return a list of exactly `length` strings, each one of `allowed`."""
        names = tuple(allowed)
        value = self.require(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, value, f"a list of {length} entries")
        for item in value:
            if item not in names:
                raise self.error(name, item, "made of " + " and ".join(repr(known) for known in names))
        return [str(item) for item in value]

    def indices(self, name: str, stop: int) -> frozenset[int]:
        """Return a possibly empty list of integers in `[0, stop)` as a set."""
        value = self._get(name, [])
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise self.error(name, value, "a list of integers")
        if any(not 0 <= item < stop for item in value):
            raise self.error(name, value, f"a list of integers from 0 to {stop - 1}")
        return frozenset(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Return a list of exactly `length` finite numbers above 0; absent is all ones."""
        value = self._get(name, [1.0] * length)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, value, f"a list of {length} numbers")
        if any(isinstance(i, bool) or not isinstance(i, int | float) or not 0 < i < float("inf") for i in value):
            raise self.error(name, value, "a list of finite numbers greater than 0")
        return tuple(float(item) for item in value)

    def section(self, name: str) -> "ConfigFields":
        """Return a nested object; an absent one is empty."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return ConfigFields(value, f"{self.owner}: {name}")

    def refuse(self, name: str, reason: str) -> None:
        """Raise `CheckpointError` with `reason` when the field is there and not null, false, 0 or empty."""
        if self.values.get(name):
            raise CheckpointError(f"{self.owner}: {name} is not supported: {reason}")

    def error(self, name: str, value: Any, allowed: str) -> CheckpointError:
        """Make the error for a field whose value is not `allowed`."""
        return CheckpointError(f"{self.owner}: {name} must be {allowed}, got {value!r}")

    def check_multiple(self, name: str, value: int, of_name: str, of_value: int) -> None:
        """Raise `CheckpointError` unless `value` is a multiple of `of_value`."""
        if value % of_value:
            raise CheckpointError(
                f"{self.owner}: {name} must be a multiple of {of_name}, got {name}={value} and {of_name}={of_value}"
            )

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value
