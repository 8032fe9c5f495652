"""Lookups in a store that may be slow: on a thread of their own, with the engine coming back for the answer."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from dalsegno.connector.store.lookup import StoreMatch
from dalsegno.connector.store.task_thread import TaskThread
from dalsegno.request import Request
from dalsegno.types import Clock

__all__ = ["LookupThread"]


class LookupThread:
    """One lookup after the other. Used on the engine thread; only the lookup itself runs elsewhere.

    While a lookup is overdue every new one is a miss at once: whatever hangs there hangs for all.
    """

    def __init__(self, clock: Clock, timeout_s: float, on_progress: Callable[[], None]) -> None:
        """Give a lookup `timeout_s` seconds; `on_progress` is called from the thread when one has ended."""
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._thread = TaskThread("dalsegno-lookup")
        self._asked: dict[Request, tuple[Future[StoreMatch | None], float]] = {}
        self._overdue: set[Future[StoreMatch | None]] = set()
        self.num_timeouts = 0

    def poll(self, request: Request, find: Callable[[], StoreMatch | None]) -> tuple[bool, StoreMatch | None]:
        """Begin a lookup, or return (True, its answer) once there is one; (False, None) while it runs."""
        self._overdue = {future for future in self._overdue if not future.done()}
        if request not in self._asked:
            if self._overdue:
                return True, None
            future: Future[StoreMatch | None] = Future()
            future.add_done_callback(lambda _: self._on_progress())
            self._thread.put(partial(_run, future, find))
            self._asked[request] = future, self._clock.now() + self._timeout_s
            return False, None
        future, deadline = self._asked[request]
        if future.done():
            del self._asked[request]
            return True, None if future.cancelled() or future.exception() is not None else future.result()
        if self._clock.now() < deadline:
            return False, None
        self.forget(request)
        self.num_timeouts += 1
        return True, None

    def is_running(self, request: Request) -> bool:
        """Whether a lookup for the request has no answer yet."""
        return request in self._asked

    def deadline(self) -> float | None:
        """When the next lookup is overdue, on the engine's clock; None without one."""
        return min((deadline for _, deadline in self._asked.values()), default=None)

    def forget(self, request: Request) -> None:
        """Nobody wants the answer any more."""
        future, _ = self._asked.pop(request, (None, 0.0))
        if future is not None and not future.cancel():
            self._overdue.add(future)

    def shutdown(self) -> None:
        """End the thread behind the lookup it is at, but do not wait for ever."""
        for future, _ in self._asked.values():
            future.cancel()
        self._thread.end()

    @property
    def is_alive(self) -> bool:
        """Whether a lookup is still at the store, which may hang."""
        return self._thread.is_alive


def _run(future: Future[StoreMatch | None], find: Callable[[], StoreMatch | None]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(find())
    except Exception as error:
        future.set_exception(error)
