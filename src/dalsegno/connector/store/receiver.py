"""The receiver: a thread that reads the objects of loads into blocks, each verified before the load is reported."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from dalsegno.connector.base import BlockMemory
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.messages import LoadJob, StoredObject
from dalsegno.connector.store.task_thread import TaskThread
from dalsegno.connector.store.transfer import buffers_of, num_tokens_of
from dalsegno.kv.layout import MemoryLayout
from dalsegno.store.base import Status, Store
from dalsegno.store.objects import StoreObject, get_objects
from dalsegno.types import LoadFailure

__all__ = ["Receiver"]

logger = logging.getLogger(__name__)

_BATCH = 16

_COUNTERS = (
    "kv_offload_load_bytes",
    "kv_offload_load_objects",
    "kv_offload_load_misses",
    "kv_offload_load_errors",
    "kv_integrity_failures",
)


class Receiver:
    """Owns the thread. `push`, `take` and `close` are called on the engine thread."""

    def __init__(
        self,
        store: Store,
        keys: KeyMaker,
        layout: MemoryLayout,
        memory: BlockMemory,
        on_loaded: Callable[[str, list[StoredObject]], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Start the thread; `on_loaded(salt, objects)` is called on it with what was read."""
        self._store = store
        self._keys = keys
        self._layout = layout
        self._memory = memory
        self._on_loaded = on_loaded
        self._on_progress = on_progress
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._done: deque[tuple[int, list[LoadFailure]]] = deque()
        self._closed = False
        self._thread = TaskThread("dalsegno-receiver")

    def push(self, job: LoadJob) -> None:
        """Queue a load."""
        self._thread.put(partial(self._run, job))

    def take(self) -> list[tuple[int, list[LoadFailure]]]:
        """Return and forget the loads that have ended, each with what failed."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """End the thread behind the read it is at; what is queued is not done."""
        self._closed = True
        self._thread.end()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still uses the store, which may hang."""
        return self._thread.is_alive

    def _run(self, job: LoadJob) -> None:
        failed = self._load(job)
        failures = [LoadFailure(job.load_id, f.group_id, f.first_token, f.boundary) for f in failed]
        self._done.append((job.load_id, failures))
        self._on_progress()

    def _load(self, job: LoadJob) -> list[StoredObject]:
        """Read a load's objects; return those that are not there or not right."""
        failed: list[StoredObject] = []
        read: list[StoredObject] = []
        for start in range(0, len(job.objects), _BATCH):
            items = job.objects[start : start + _BATCH]
            there: list[StoredObject] = []
            try:
                there = [] if self._closed else self._read(job.salt, items)
            except Exception:
                self.counters["kv_offload_load_errors"] += 1
                logger.exception("load %d failed", job.load_id)
            read += there
            failed += (item for item in items if item not in there)
        if read:
            self._on_loaded(job.salt, read)
        return failed

    def _read(self, salt: str, items: Sequence[StoredObject]) -> list[StoredObject]:
        """Read a batch; return what is there and right."""
        wanted = [
            StoreObject(
                self._keys.key(salt, item),
                num_tokens_of(self._layout, item),
                buffers_of(self._memory, self._layout, item),
            )
            for item in items
        ]
        statuses = get_objects(self._store, wanted)
        for target, status in zip(wanted, statuses, strict=True):
            self._count(status, sum(part.nbytes for part in target.parts))
        return [item for item, status in zip(items, statuses, strict=True) if status is Status.OK]

    def _count(self, status: Status, num_bytes: int) -> None:
        if status is Status.OK:
            self.counters["kv_offload_load_objects"] += 1
            self.counters["kv_offload_load_bytes"] += num_bytes
        elif status is Status.MISS:
            self.counters["kv_offload_load_misses"] += 1
        elif status is Status.CORRUPT:
            self.counters["kv_integrity_failures"] += 1
        else:
            self.counters["kv_offload_load_errors"] += 1
