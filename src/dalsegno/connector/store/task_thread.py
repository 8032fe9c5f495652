"""A thread that does tasks one after the other, in the order they came."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["TaskThread"]

_END_TIMEOUT_S = 5.0


class TaskThread:
    """Owns the thread; its methods are called on another one. A task must not raise."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Queue a task."""
        self._tasks.put(task)

    def end(self) -> None:
        """End the thread behind what is queued; wait for it, but not for ever."""
        self._tasks.put(None)
        self._thread.join(_END_TIMEOUT_S)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is still at a task, which may hang."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
