"""The sender: a thread that takes store jobs in order and puts what the store lacks.

A job's attention and window go first; its states are put only when everything below them is stored, what earlier jobs
put included. Every job is reported exactly once, whatever raises. The epoch is checked before each put, so that nothing
of before a reset enters the store behind it.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from dalsegno.connector.base import BlockMemory
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.messages import JobReport, ObjectRef, StepMeta, StoredObject, StoreJob
from dalsegno.connector.store.pressure import PressureGate
from dalsegno.connector.store.task_thread import TaskThread
from dalsegno.connector.store.transfer import buffers_of, num_tokens_of
from dalsegno.kv.layout import MemoryLayout
from dalsegno.store.base import Status, Store
from dalsegno.store.keys import StoreKey
from dalsegno.store.objects import StoreObject, put_objects

__all__ = ["SENDER_COUNTERS", "Sender"]

logger = logging.getLogger(__name__)

_BATCH_BYTES = 32 * 2**20

SENDER_COUNTERS = (
    "kv_offload_store_bytes",
    "kv_offload_store_objects",
    "kv_offload_stores_skipped",
    "kv_offload_allocation_failure",
    "kv_offload_store_errors",
    "kv_offload_clear_failures",
)
"""Names of what a sender counts."""


class Sender:
    """Owns the thread. `push`, `touch`, `take` and `close` are called on the engine thread.

    Attributes:
        cleared: last epoch before whose jobs the store was emptied.
        num_clears: clearings that have ended, the failed ones included.
        counters: written by the thread alone.
    """

    def __init__(
        self,
        store: Store,
        keys: KeyMaker,
        layout: MemoryLayout,
        memory: BlockMemory,
        gate: PressureGate,
        on_progress: Callable[[], None],
        cleared: int = 0,
    ) -> None:
        """Start the thread; the store has been emptied for epoch `cleared` before."""
        self._store = store
        self._keys = keys
        self._layout = layout
        self._memory = memory
        self._gate = gate
        self._on_progress = on_progress
        self._epoch = cleared
        self.cleared = cleared
        self.num_clears = 0
        self.counters: Counter[str] = Counter(dict.fromkeys(SENDER_COUNTERS, 0))
        self._reports: deque[JobReport] = deque()
        self._thread = TaskThread("dalsegno-sender")

    def push(self, step_meta: StepMeta) -> None:
        """Queue the jobs of a step, before them the clearing it asks for and behind them the removals."""
        self._epoch = step_meta.epoch
        if step_meta.clear:
            self._thread.put(partial(self._clear, step_meta.epoch))
        for job in step_meta.jobs:
            self._thread.put(partial(self._report, job))
        for salt, objects in step_meta.removals:
            keys = [self._keys.key(salt, item) for item in objects]
            self._thread.put(partial(self._attempt, self._store.remove, keys))

    def touch(self, salt: str, objects: Sequence[StoredObject]) -> None:
        """Queue the note that these objects were used."""
        keys = [self._keys.key(salt, item) for item in objects]
        self._thread.put(partial(self._attempt, self._store.touch, keys))

    def take(self) -> tuple[JobReport, ...]:
        """Return and forget the reports that have come in."""
        return tuple(self._reports.popleft() for _ in range(len(self._reports)))

    def close(self) -> None:
        """End the thread behind the put it is at; what is queued is not done."""
        self._epoch = -1
        self._thread.end()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still uses the store, which may hang."""
        return self._thread.is_alive

    def _attempt(self, call: Callable[[Sequence[StoreKey]], object], keys: Sequence[StoreKey]) -> None:
        """Make a call whose outcome nobody waits for."""
        try:
            call(keys)
        except Exception:
            self.counters["kv_offload_store_errors"] += 1
            logger.exception("a call of the store failed")

    def _clear(self, epoch: int) -> None:
        try:
            for namespace in self._keys.namespaces:
                self._store.clear(namespace=namespace)
            self.cleared = epoch
        except Exception:
            self.counters["kv_offload_clear_failures"] += 1
            logger.exception("the store could not be emptied; it is not used until it can")
        self.num_clears += 1
        self._on_progress()

    def _report(self, job: StoreJob) -> None:
        stored: dict[StoreKey, StoredObject] = {}
        missing: list[ObjectRef] = []
        complete = False
        try:
            complete = self._do(job, stored, missing)
        except Exception:
            self.counters["kv_offload_store_errors"] += 1
            logger.exception("store job %d failed", job.job_id)
        refs = [item.ref for item in stored.values()]
        refs += (item.ref for item in job.objects if not self._keys.puts(item))
        self._reports.append(JobReport(job.job_id, tuple(refs), complete, tuple(missing)))
        self._on_progress()

    def _do(self, job: StoreJob, stored: dict[StoreKey, StoredObject], missing: list[ObjectRef]) -> bool:
        """Put a job's objects, adding those the store holds to `stored` and what it lacks of the others to `missing`.

        Whether its boundary is complete.
        """
        if not job.epoch == self._epoch == self.cleared:
            return False
        if job.objects and not self._gate.admits():
            self.counters["kv_offload_stores_skipped"] += len(job.objects)
            return False
        states = [item for item in job.objects if self._layout.groups[item.group_id].is_state]
        below = [item for item in job.objects if not self._layout.groups[item.group_id].is_state]
        required = {self._keys.key(job.salt, item): item for item in job.requires if self._keys.puts(item)}
        done = self._put(job, below, stored) and self._has_all(required, missing) and self._put(job, states, stored)
        self._store.touch([*stored, *required])
        return done

    def _has_all(self, required: Mapping[StoreKey, StoredObject], missing: list[ObjectRef]) -> bool:
        """Whether what earlier jobs put is still there; what is not goes to `missing`."""
        if not required:
            return True
        found = self._store.exists(list(required))
        lacks = zip(required.values(), found, strict=True)
        missing += (item.ref for item, status in lacks if status is Status.MISS)
        return all(status is Status.OK for status in found)

    def _put(self, job: StoreJob, items: Sequence[StoredObject], stored: dict[StoreKey, StoredObject]) -> bool:
        """Put what is not there yet; whether all of `items` is there now, but for what other ranks put."""
        by_key = {self._keys.key(job.salt, item): item for item in items if self._keys.puts(item)}
        if not by_key:
            return True
        found = self._store.exists(list(by_key))
        stored.update((key, by_key[key]) for key, status in zip(by_key, found, strict=True) if status is Status.OK)
        for batch in self._batches([(key, item) for key, item in by_key.items() if key not in stored]):
            if job.epoch != self._epoch:
                return False
            objects = [self._object(key, item) for key, item in batch]
            statuses = put_objects(self._store, objects)
            for (key, item), made, status in zip(batch, objects, statuses, strict=True):
                self._count(status, sum(part.nbytes for part in made.parts))
                if status in (Status.OK, Status.EXISTS):
                    stored[key] = item
            if Status.NO_ROOM in statuses:
                self._gate.note(has_room=False)
                return False
            self._gate.note(has_room=True)
        return len(by_key.keys() & stored.keys()) == len(by_key)

    def _object(self, key: StoreKey, item: StoredObject) -> StoreObject:
        parts = [part.toreadonly() for part in buffers_of(self._memory, self._layout, item)]
        return StoreObject(key, num_tokens_of(self._layout, item), parts)

    def _batches(
        self, entries: Sequence[tuple[StoreKey, StoredObject]]
    ) -> Iterator[list[tuple[StoreKey, StoredObject]]]:
        batch: list[tuple[StoreKey, StoredObject]] = []
        size = 0
        for key, item in entries:
            size += self._layout.groups[item.group_id].block_bytes * len(item.blocks)
            batch.append((key, item))
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _count(self, status: Status, num_bytes: int) -> None:
        if status is Status.OK:
            self.counters["kv_offload_store_objects"] += 1
            self.counters["kv_offload_store_bytes"] += num_bytes
        elif status is Status.NO_ROOM:
            self.counters["kv_offload_allocation_failure"] += 1
        elif status is not Status.EXISTS:
            self.counters["kv_offload_store_errors"] += 1
