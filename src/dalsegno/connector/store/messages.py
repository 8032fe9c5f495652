"""What the two sides of the store connector tell each other: objects, load jobs, store jobs, reports."""

from dataclasses import dataclass

from dalsegno.types import BlockHash

__all__ = ["JobReport", "LoadJob", "ObjectRef", "StepMeta", "StoreJob", "StoredObject", "WorkerMeta"]

ObjectRef = tuple[int, BlockHash]
"""(group, hash at the object's boundary): names an object within one engine and salt."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of the store, and the blocks its bytes come from or go to.

    Attributes:
        group_id: the group.
        first_token: its first token; 0 for a state.
        boundary: the boundary under whose hash it is stored; for attention and window also where its tokens end.
        block_hash: hash of the boundary.
        blocks: the blocks that cover `[first_token, boundary)`, in order, or the state's block; the null block stands
            for bytes that nobody wants of a load. Empty where the object is only named.
    """

    group_id: int
    first_token: int
    boundary: int
    block_hash: BlockHash
    blocks: tuple[int, ...] = ()

    @property
    def ref(self) -> ObjectRef:
        """The object's name within the engine."""
        return self.group_id, self.block_hash


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Read objects into blocks; reported once, as received, with what failed."""

    load_id: int
    salt: str
    objects: tuple[StoredObject, ...]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Put objects that restore one boundary; reported once.

    Attributes:
        job_id: never used again.
        epoch: the cache epoch it belongs to; a job of an older one puts nothing.
        salt: tag of the key domain.
        boundary: what is restored.
        objects: what is to be put, states last; none where it is only asked whether everything is there.
        requires: everything else that restores the boundary, said to be stored or put by earlier jobs.
    """

    job_id: int
    epoch: int
    salt: str
    boundary: int
    objects: tuple[StoredObject, ...]
    requires: tuple[StoredObject, ...] = ()


@dataclass(frozen=True, slots=True)
class StepMeta:
    """What the worker side begins with a step.

    Attributes:
        epoch: the cache epoch from now on.
        loads, jobs: to be done.
        clear: empty the engine's part of the store, before the jobs.
        removals: (salt, objects) to be removed, behind the jobs.
    """

    epoch: int
    loads: tuple[LoadJob, ...] = ()
    jobs: tuple[StoreJob, ...] = ()
    clear: bool = False
    removals: tuple[tuple[str, tuple[StoredObject, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class JobReport:
    """How a store job ended.

    Attributes:
        job_id: the job.
        stored: objects the store now holds, put or found there; of those that another rank puts, all.
        complete: whether the boundary can be restored from the store, as far as this rank knows.
        missing: objects that were said to be stored and are not, such as those that were evicted.
    """

    job_id: int
    stored: tuple[ObjectRef, ...] = ()
    complete: bool = False
    missing: tuple[ObjectRef, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerMeta:
    """What one rank has to report.

    Attributes:
        reports: jobs that have ended.
        cleared: the last epoch before whose jobs the store was emptied.
        num_clears: clearings that have ended, the failed ones included.
    """

    reports: tuple[JobReport, ...]
    cleared: int
    num_clears: int
