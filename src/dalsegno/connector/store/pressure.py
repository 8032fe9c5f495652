"""The pressure gate: when the store had no room, saves are skipped until one succeeds again."""

from collections.abc import Callable

__all__ = ["PressureGate"]


class PressureGate:
    """Open, or closed with one save let through after each pause to see whether there is room again."""

    def __init__(self, now: Callable[[], float], pause_s: float) -> None:
        """Start open; let a save through `pause_s` seconds after each refusal, as `now` tells time."""
        self._now = now
        self._pause_s = pause_s
        self._closed_until: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether saves are skipped."""
        return self._closed_until is not None

    def admits(self) -> bool:
        """Whether a save may be tried now."""
        return self._closed_until is None or self._now() >= self._closed_until

    def note(self, has_room: bool) -> None:
        """A save was tried."""
        self._closed_until = None if has_room else self._now() + self._pause_s
