"""Answers of requests that asked with `do_remote_decode` to be told what is stored: held until it is.

All other answers pass at once.
"""

from collections.abc import Iterable

from dalsegno.connector.base import SchedulerConnector
from dalsegno.request import RequestUpdate
from dalsegno.types import Clock

__all__ = ["HeldAnswers"]


class HeldAnswers:
    """Last updates on their way out. Used on the engine thread only."""

    def __init__(self, connector: SchedulerConnector, clock: Clock, timeout_s: float) -> None:
        """Hold an answer as long as `connector` says, at most `timeout_s` seconds."""
        self._connector = connector
        self._clock = clock
        self._timeout_s = timeout_s
        self._held: list[tuple[RequestUpdate, float]] = []

    def __len__(self) -> int:
        """Answers held."""
        return len(self._held)

    def deadline(self) -> float | None:
        """When the first of them is let go whatever the connector says."""
        return min((deadline for _, deadline in self._held), default=None)

    def is_due(self) -> bool:
        """Whether `release` has something to return."""
        now = self._clock.now()
        return any(self._is_due(update, deadline, now) for update, deadline in self._held)

    def add(self, updates: Iterable[RequestUpdate]) -> list[RequestUpdate]:
        """Return the updates that pass; the others are held."""
        passed = []
        for update in updates:
            asks = (update.request.kv_transfer_params or {}).get("do_remote_decode") if update.finished else None
            if asks:
                self._held.append((update, self._clock.now() + self._timeout_s))
            else:
                passed.append(update)
        return passed

    def release(self) -> list[RequestUpdate]:
        """Return those whose time has come, with the connector's answer."""
        now = self._clock.now()
        held, self._held = self._held, []
        released = []
        for update, deadline in held:
            if not self._is_due(update, deadline, now):
                self._held.append((update, deadline))
                continue
            known = self._connector.take_transfer_params(update.request) or update.request.kv_transfer_answer
            # Where nobody stores anything, that is what the caller is told.
            update.request.kv_transfer_answer = known or {"stored_boundary": 0}
            released.append(update)
        return released

    def _is_due(self, update: RequestUpdate, deadline: float, now: float) -> bool:
        return deadline <= now or not self._connector.is_answer_held(update.request)
