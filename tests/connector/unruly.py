"""A worker side whose reports come late, out of order, twice, for ids that do not exist, or not until let go."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dalsegno.connector.base import BlockMemory, WorkerConnector
from dalsegno.connector.store.messages import JobReport, WorkerMeta
from dalsegno.types import LoadFailure

__all__ = ["UnrulyWorker"]

_Report = TypeVar("_Report")


@dataclass
class UnrulyWorker(WorkerConnector):
    """Passes a store connector's worker side on, and its reports as it likes.

    Attributes:
        inner: does the work.
        rng: decides.
        hold: how likely a report stays for another poll.
        repeat: how likely a report is made again later, or one for an id that does not exist.
        holds_all: while set, nothing is reported at all.
    """

    inner: WorkerConnector
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    hold: float = 0.0
    repeat: float = 0.0
    holds_all: bool = False
    loads: list[tuple[int, tuple[LoadFailure, ...]]] = field(default_factory=list)
    jobs: list[JobReport] = field(default_factory=list)
    cleared: int = 0
    num_clears: int = 0
    told_clears: int = 0

    @property
    def needs_shared_memory(self) -> bool:  # type: ignore[override]
        return self.inner.needs_shared_memory

    def register_kv_caches(self, memory: BlockMemory) -> None:
        self.inner.register_kv_caches(memory)

    def start_load_kv(self, step_meta: object) -> None:
        self.inner.start_load_kv(step_meta)

    def wait_for_save(self, step_meta: object) -> None:
        self.inner.wait_for_save(step_meta)

    def get_finished(self) -> tuple[set[str], set[int], list[LoadFailure]]:
        self.collect()
        reported = dict(self._choose(self.loads))
        if reported and self.rng.random() < self.repeat:
            reported[10**6 + self.rng.randrange(100)] = (LoadFailure(10**6, 0, 0, 16),)
        return set(), set(reported), [failure for failures in reported.values() for failure in failures]

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        self.collect()
        reports = self._choose(self.jobs)
        if reports and self.rng.random() < self.repeat:
            reports.append(JobReport(10**6 + self.rng.randrange(100), complete=True))
        if (not reports and self.num_clears == self.told_clears) or self.holds_all:
            return None
        self.told_clears = self.num_clears
        return WorkerMeta(tuple(reports), self.cleared, self.num_clears)

    def collect(self) -> None:
        """Take over what the inner side has to report."""
        _, received, failed = self.inner.get_finished()
        self.loads += ((i, tuple(f for f in failed if f.load_id == i)) for i in received)
        worker_meta = self.inner.build_connector_worker_meta()
        if isinstance(worker_meta, WorkerMeta):
            self.jobs += worker_meta.reports
            self.cleared, self.num_clears = worker_meta.cleared, worker_meta.num_clears

    def on_progress(self, callback: Callable[[], None]) -> None:
        self.inner.on_progress(callback)

    def stats(self) -> Mapping[str, int | float]:
        return self.inner.stats()

    def shutdown(self) -> None:
        self.inner.shutdown()

    def _choose(self, waiting: list[_Report]) -> list[_Report]:
        """Take some of what waits, in any order; some of it stays although it is taken."""
        if self.holds_all:
            return []
        chosen = [item for item in waiting if self.rng.random() >= self.hold]
        again = [item for item in chosen if self.rng.random() < self.repeat]
        waiting[:] = [item for item in waiting if item not in chosen] + again
        self.rng.shuffle(chosen)
        return chosen
