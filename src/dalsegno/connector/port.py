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
        self._woken = threading.Event()
        self.connector.on_progress(self.wake)
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
        self._woken.clear()
        return collect_output(self.connector)

    def wait(self, timeout_s: float) -> bool:
        """Return when there may be something new since the last `output`, at the latest after `timeout_s` seconds.

        Whether there may be.
        """
        return self._woken.wait(timeout_s)

    def wake(self) -> None:
        """End a wait; from any thread."""
        self._woken.set()

    def stats(self) -> dict[str, int | float]:
        """Counters of the worker side."""
        return dict(self.connector.stats())

    def close(self) -> None:
        """Shut the worker side down; what it has not reported it never will."""
        self.connector.shutdown()
