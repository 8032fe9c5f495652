"""Store jobs and what is known to be stored. A job owns its blocks from registration to its report.

Nothing but a report of every rank ends a job: no timeout, no preemption, no abort. What jobs hold is bounded, in bytes
here and in slabs by `BlockPins`; what does not fit is refused before it is registered.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from dalsegno.connector.store.messages import JobReport, ObjectRef, StoreJob
from dalsegno.kv.pins import BlockPins
from dalsegno.kv.ranks import RankReports
from dalsegno.request import Request
from dalsegno.types import BlockHash

__all__ = ["JobLedger", "KnownStored", "OwnedJob"]

_Counted = TypeVar("_Counted")


class KnownStored:
    """Objects a store has answered OK or EXISTS for; the longest unused are forgotten, which costs a question."""

    def __init__(self, capacity: int = 262_144) -> None:
        """Remember up to `capacity` objects."""
        self._capacity = capacity
        self._refs: OrderedDict[ObjectRef, None] = OrderedDict()

    def __contains__(self, ref: ObjectRef) -> bool:
        """Whether the object is known to be stored."""
        if ref not in self._refs:
            return False
        self._refs.move_to_end(ref)
        return True

    def add(self, ref: ObjectRef) -> None:
        """The store holds the object."""
        self._refs[ref] = None
        self._refs.move_to_end(ref)
        if len(self._refs) > self._capacity:
            self._refs.popitem(last=False)

    def discard(self, ref: ObjectRef) -> None:
        """The store did not have the object when it was asked for."""
        self._refs.pop(ref, None)

    def clear(self) -> None:
        """The store was emptied."""
        self._refs.clear()


@dataclass(slots=True)
class OwnedJob:
    """A job, whose it is, and what the ranks have said together.

    Attributes:
        job: as it was told to the worker sides.
        request: its hashes name the objects.
        pins: (group, block) of what the job owns.
        num_bytes: of those blocks.
        is_retry: whether it puts what another job was told is missing.
        reports: the ranks that have reported.
        stored, complete, missing: see `JobReport`.
    """

    job: StoreJob
    request: Request
    pins: list[tuple[int, int]]
    num_bytes: int
    is_retry: bool
    reports: RankReports
    stored: set[ObjectRef]
    complete: bool = True
    missing: set[ObjectRef] = field(default_factory=set)


class JobLedger:
    """The jobs that have not been reported. Used on the engine thread only."""

    def __init__(self, max_bytes: int, world_size: int) -> None:
        """Let jobs hold up to `max_bytes` bytes of blocks, until `world_size` ranks have reported them."""
        self._world_size = world_size
        self._max_bytes = max_bytes
        self._jobs: dict[int, OwnedJob] = {}
        self._pending: Counter[ObjectRef] = Counter()
        # By the hash they end at: jobs that put nothing and find out whether everything is still stored.
        self._asked: Counter[BlockHash] = Counter()
        self._count = 0
        self._given_up = 0
        self.backlog_bytes = 0

    def __len__(self) -> int:
        """Jobs that have not been reported."""
        return len(self._jobs)

    def is_pending(self, ref: ObjectRef) -> bool:
        """Whether some job is going to put the object."""
        return ref in self._pending

    def is_asked(self, block_hash: BlockHash) -> bool:
        """Whether some job only finds out if what restores the boundary of this hash is still stored."""
        return block_hash in self._asked

    def next_id(self) -> int:
        """A job id that was never used."""
        self._count += 1
        return self._count

    def has_room(self, num_bytes: int) -> bool:
        """Whether a job that holds `num_bytes` more may be registered."""
        return self.backlog_bytes + num_bytes <= self._max_bytes

    def register(
        self, job: StoreJob, request: Request, pins: list[tuple[int, int]], num_bytes: int, *, is_retry: bool
    ) -> None:
        """A job begins; it takes over `pins`. Its objects are pending until it is finished or given up."""
        stored = {item.ref for item in job.objects}
        reports = RankReports(self._world_size)
        self._jobs[job.job_id] = OwnedJob(job, request, pins, num_bytes, is_retry, reports, stored)
        self._pending.update(item.ref for item in job.objects)
        if not job.objects:
            self._asked.update(_hashes(job))
        self.backlog_bytes += num_bytes

    def finish(self, rank: int, report: JobReport, pins: BlockPins) -> OwnedJob | None:
        """Take a rank's report; behind the last one give the job's pins back.

        Returns:
            The job that has ended; None while some rank has not reported, and for an id that is not pending.
        """
        owned = self._jobs.get(report.job_id)
        if owned is None or owned.reports.has(rank):
            return None
        owned.stored.intersection_update(report.stored)
        owned.complete = owned.complete and report.complete
        owned.missing.update(report.missing)
        if not owned.reports.add(rank):
            return None
        job_id = report.job_id
        del self._jobs[job_id]
        if job_id > self._given_up:
            for item in owned.job.objects:
                _take_one(self._pending, item.ref)
            if not owned.job.objects:
                for block_hash in _hashes(owned.job):
                    _take_one(self._asked, block_hash)
        self.backlog_bytes -= owned.num_bytes
        pins.unpin(owned.pins)
        return owned

    def give_up(self) -> None:
        """What the jobs so far were to put is put no more; they still own their blocks until they are reported."""
        self._given_up = self._count
        self._pending.clear()
        self._asked.clear()


def _hashes(job: StoreJob) -> set[BlockHash]:
    return {item.block_hash for item in job.requires if item.boundary == job.boundary}


def _take_one(counts: Counter[_Counted], key: _Counted) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
