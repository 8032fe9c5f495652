"""A worker's end of the connector: steps go in, reports come out, and whoever waits is woken."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dalsegno.connector.base import BlockMemory, ConnectorOutput, WorkerConnector, collect_output
from dalsegno.types import StepPlan

__all__ = ["ConnectorPort"]


class ConnectorPort:
    """Drives a worker side, in the order a step has. Used on the engine thread only, but for `wake`.

    Attributes:
        connector: the worker side.
    """

    def __init__(self, connector: WorkerConnector | None = None, memory: BlockMemory | None = None) -> None:
        """Register `memory`, which outlives the port; None is no connector."""
        self.connector = connector or WorkerConnector()
        self._changed = threading.Condition()
        self._has_news = False
        self._is_called = False
        self.connector.on_progress(self._note_news)
        if memory is not None:
            self.connector.register_kv_caches(memory)

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Begin the plan's loads, and behind the step its saves.

        A step that raises begins its saves too: what they name was written by steps that did not.
        """
        if plan.connector_meta is None:
            yield
            return
        self.connector.start_load_kv(plan.connector_meta)
        try:
            yield
        finally:
            self.connector.wait_for_save(plan.connector_meta)

    def output(self) -> ConnectorOutput | None:
        """Return what there is to report, if anything."""
        self._has_news = False
        return collect_output(self.connector)

    def wait(self, timeout_s: float) -> bool:
        """Return when there may be something new since the last `output`, at the latest after `timeout_s` seconds.

        Whether there may be, or `wake` was called since the last wait.
        """
        with self._changed:
            woken = self._changed.wait_for(lambda: self._has_news or self._is_called, timeout_s)
            self._is_called = False
            return woken

    def wake(self) -> None:
        """End this wait, or the next one; from any thread."""
        with self._changed:
            self._is_called = True
            self._changed.notify_all()

    def _note_news(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def stats(self) -> dict[str, int | float]:
        """Counters of the worker side."""
        return dict(self.connector.stats())

    def close(self) -> None:
        """Shut the worker side down; what it has not reported it never will."""
        self.connector.shutdown()
