"""A worker's end of the connector: steps go in, reports come out, and whoever waits is woken."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dalsegno.connector.base import BlockMemory, ConnectorOutput, WorkerConnector, collect_output
from dalsegno.types import StepPlan

__all__ = ["ConnectorPort"]


class ConnectorPort:
    """Drives the worker sides of all ranks, in the order a step has. Used on the engine thread only, but for `wake`.

    Attributes:
        connectors: the worker sides, by rank; none without a connector.
    """

    def __init__(self, connectors: Sequence[WorkerConnector] = (), memories: Sequence[BlockMemory] = ()) -> None:
        """Register each rank's memory, which outlives the port."""
        self.connectors = tuple(connectors)
        self._changed = threading.Condition()
        self._has_news = False
        self._is_called = False
        for connector, memory in zip(self.connectors, memories, strict=True):
            connector.on_progress(self._note_news)
            connector.register_kv_caches(memory)

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Begin the plan's loads, and behind the step its saves.

        A step that raises begins its saves too: what they name was written by steps that did not.
        """
        if plan.connector_meta is None:
            yield
            return
        try:
            for connector in self.connectors:
                connector.start_load_kv(plan.connector_meta)
            yield
        finally:
            for connector in self.connectors:
                connector.wait_for_save(plan.connector_meta)

    def outputs(self) -> list[ConnectorOutput]:
        """Return what there is to report, at most once per rank."""
        self._has_news = False
        found = [collect_output(connector, rank) for rank, connector in enumerate(self.connectors)]
        return [output for output in found if output is not None]

    def wait(self, timeout_s: float) -> bool:
        """Return when there may be something new since the last `outputs`, at the latest after `timeout_s` seconds.

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
        """Counters of the worker sides, summed over the ranks."""
        total: Counter[str] = Counter()
        for connector in self.connectors:
            total.update(dict(connector.stats()))
        return dict(total)

    def close(self) -> None:
        """Shut the worker sides down; what they have not reported they never will."""
        for connector in self.connectors:
            connector.shutdown()
