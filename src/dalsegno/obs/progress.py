"""A progress line on a terminal for work that takes longer than a moment."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["Progress"]

_PATIENCE_SECONDS = 1.0
_PERIOD_SECONDS = 0.1


class Progress:
    """Shows how much of some work is done, on stderr, if that is a terminal and the work takes over a second.

    Args:
        noun: what is counted.
        total: how many there are.
        enabled: False shows nothing.
    """

    def __init__(self, noun: str, total: int, *, enabled: bool = True) -> None:
        self._noun = noun
        self._total = total
        self._enabled = enabled and sys.stderr.isatty()
        self._start = time.monotonic()
        self._next = self._start + _PATIENCE_SECONDS
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def is_due(self) -> bool:
        """Whether it is time for the next `show`, so that counting is done only when it is seen."""
        return self._enabled and time.monotonic() >= self._next

    def show(self, done: int, num_tokens: int | None = None) -> None:
        """Tell that `done` of all are finished and, where that is what is worked at, how many tokens there are."""
        now = time.monotonic()
        self._next = now + _PERIOD_SECONDS
        if self._bar is None or self._task is None:
            self._bar, self._task = self._begin()
        speed = "" if num_tokens is None else f"{num_tokens / max(now - self._start, 1e-3):.0f} tokens/s"
        self._bar.update(self._task, completed=done, speed=speed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _begin(self) -> "tuple[RichProgress, TaskID]":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            TextColumn(self._noun),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        task = bar.add_task(self._noun, total=self._total, speed="")
        bar.start()
        return bar, task
