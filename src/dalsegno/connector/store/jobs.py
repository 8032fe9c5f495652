"""From hand-offs to store jobs: what of a boundary is put, by whom it is owned, and what a report means."""

from collections import Counter
from collections.abc import Sequence

from dalsegno.connector.base import BoundPool
from dalsegno.connector.store.ledger import JobLedger, KnownStored
from dalsegno.connector.store.messages import JobReport, ObjectRef, StoredObject, StoreJob
from dalsegno.connector.store.objects import ObjectMap
from dalsegno.kv.hand_off import HandOff, HandOffs
from dalsegno.request import Request
from dalsegno.store.keys import salt_tag
from dalsegno.types import NULL_BLOCK

__all__ = ["StoreJobs"]

_COUNTERS = (
    "kv_offload_jobs",
    "kv_offload_jobs_dropped",
    "kv_offload_jobs_incomplete",
    "kv_offload_lost_objects",
)


class StoreJobs:
    """All store jobs of an engine. Used on the engine thread only.

    Attributes:
        epoch: raised by a reset; jobs of an older one put nothing.
        outbox: registered and not yet told to the worker side.
    """

    def __init__(
        self, pool: BoundPool, hand_offs: HandOffs, objects: ObjectMap, max_backlog_bytes: int, world_size: int
    ) -> None:
        """Register jobs for hand-offs of `pool`, and make `hand_offs` anew of what the store has lost.

        Each job is reported by `world_size` ranks.
        """
        self._pool = pool
        self._hand_offs = hand_offs
        self._objects = objects
        self.known = KnownStored()
        self._ledger = JobLedger(max_backlog_bytes, world_size)
        # Of requests that are to be told what is stored: the boundaries at which the store has said so meanwhile.
        self._confirmed: dict[Request, set[int]] = {}
        self.epoch = 0
        self.outbox: list[StoreJob] = []
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))

    def __len__(self) -> int:
        """Jobs that have not been reported."""
        return len(self._ledger)

    @property
    def backlog_bytes(self) -> int:
        """Bytes of the blocks that jobs hold."""
        return self._ledger.backlog_bytes

    def first_needed(self, request: Request, group_id: int, boundary: int, listed: int) -> int:
        """See `HandOffSink.first_needed`: objects that are stored, or that a job is going to put, are not needed."""
        group = self._pool.layout.groups[group_id]
        for first, end in self._objects.needed(group, boundary):
            if end > listed and not self._is_cared_for(self._named(request, group_id, first, end).ref):
                return first
        return boundary

    def register(self, request: Request, hand_off: HandOff, *, is_retry: bool = False) -> None:
        """Make a job of a hand-off and take over its pins, or drop it, count it and give them back.

        Where nothing is to be put there is a job only for who wants to be told what is stored.
        """
        asks = (request.kv_transfer_params or {}).get("do_remote_decode")
        if not hand_off.entries and not asks:
            return
        if asks and not is_retry:
            self._confirmed.setdefault(request, set())
        puts, requires = self._sort_out(request, hand_off)
        used = {(item.group_id, block) for item in puts for block in item.blocks}
        num_bytes = sum(self._pool.layout.groups[group].block_bytes for group, _ in used)
        is_whole = used <= set(hand_off.blocks())
        if not is_whole or not self._ledger.has_room(num_bytes) or not self._pool.pins.has_room():
            self._pool.pins.unpin(hand_off.blocks())
            self.counters["kv_offload_jobs_dropped"] += 1
            return
        kept = [entry for entry in hand_off.blocks() if entry in used]
        self._pool.pins.unpin(entry for entry in hand_off.blocks() if entry not in used)
        if not puts and not asks:
            return
        self._add(request, hand_off.boundary, puts, requires, kept, is_retry=is_retry)

    def finish(self, rank: int, report: JobReport) -> None:
        """A rank has reported a job; it ends with the last one. Reports of unknown jobs are ignored.

        What the store has lost is handed off again, once, as far as the device still has it. A job that was only to
        confirm what is stored, and could not, leaves nothing known of it.
        """
        ended = self._ledger.finish(rank, report, self._pool.pins)
        if ended is None:
            return
        if not ended.complete:
            self.counters["kv_offload_jobs_incomplete"] += 1
        if ended.job.epoch != self.epoch:
            return
        if ended.complete and ended.request in self._confirmed:
            self._confirmed[ended.request].add(ended.job.boundary)
        for ref in ended.stored:
            self.known.add(ref)
        unconfirmed = () if ended.complete or ended.job.objects else (item.ref for item in ended.job.requires)
        for ref in (*ended.missing, *unconfirmed):
            self.known.discard(ref)
        self.counters["kv_offload_lost_objects"] += len(ended.missing)
        if ended.missing and not ended.is_retry:
            hand_off = self._hand_offs.make(ended.request, ended.job.boundary, 0)
            if hand_off is not None:
                self.register(ended.request, hand_off, is_retry=True)

    def is_pending(self, request: Request) -> bool:
        """Whether some job of this or another request puts objects of the request's prefixes, or asks for them."""
        ledger, groups = self._ledger, self._objects.groups
        return any(
            ledger.is_asked(block_hash) or any(ledger.is_pending((group.group_id, block_hash)) for group in groups)
            for block_hash in reversed(request.block_hashes)
        )

    def is_held(self, request: Request) -> bool:
        """Whether it is not yet sure what of the request is stored: jobs are under way, or the store has to be asked.

        What is known from earlier alone is asked for, the longest boundary first.
        """
        if self.is_pending(request):
            return True
        boundaries = range(len(request.block_hashes) * self._pool.index.unit, 0, -self._pool.index.unit)
        longest = next((boundary for boundary in boundaries if self._is_known(request, boundary)), 0)
        if not longest or longest in self._confirmed.get(request, ()):
            return False
        self._confirmed.setdefault(request, set())
        # As if for the second time: what is missing is not put for a request that perhaps stores nothing.
        self._add(request, longest, (), self._needed(request, longest), (), is_retry=True)
        return True

    def take_stored_boundary(self, request: Request) -> int:
        """The longest boundary of the request that is stored as a whole, as the store has confirmed; 0 for none."""
        confirmed = self._confirmed.pop(request, set())
        return max((boundary for boundary in confirmed if self._is_known(request, boundary)), default=0)

    def reset(self) -> None:
        """Begin a new epoch: nothing is known to be stored any more."""
        self.epoch += 1
        self.known.clear()
        self._ledger.give_up()

    def _sort_out(self, request: Request, hand_off: HandOff) -> tuple[list[StoredObject], list[StoredObject]]:
        """What of the boundary is to be put, and what is cared for; the null block stands for one not handed off."""
        puts: list[StoredObject] = []
        requires: list[StoredObject] = []
        by_end = {(group, end): block for group, block, end in hand_off.entries}
        for group in sorted(self._objects.groups, key=lambda group: group.is_state):
            for first, end in self._objects.needed(group, hand_off.boundary):
                named = self._named(request, group.group_id, first, end)
                if self._is_cared_for(named.ref):
                    requires.append(named)
                    continue
                size = group.block_size
                ends = [end] if group.is_state else [min(e + size, end) for e in range(first, end, size)]
                blocks = tuple(by_end.get((group.group_id, e), NULL_BLOCK) for e in ends)
                puts.append(StoredObject(group.group_id, first, end, named.block_hash, blocks))
        return puts, requires

    def _add(
        self,
        request: Request,
        boundary: int,
        puts: Sequence[StoredObject],
        requires: Sequence[StoredObject],
        pins: Sequence[tuple[int, int]],
        *,
        is_retry: bool = False,
    ) -> None:
        """Begin a job, which takes over `pins`."""
        tag = salt_tag(request.cache_salt)
        job = StoreJob(self._ledger.next_id(), self.epoch, tag, boundary, tuple(puts), tuple(requires))
        num_bytes = sum(self._pool.layout.groups[group].block_bytes for group, _ in set(pins))
        self._ledger.register(job, request, list(pins), num_bytes, is_retry=is_retry)
        self.outbox.append(job)
        self.counters["kv_offload_jobs"] += 1

    def _needed(self, request: Request, boundary: int) -> list[StoredObject]:
        """Everything that restores the boundary."""
        groups = self._objects.groups
        return [
            self._named(request, group.group_id, first, end)
            for group in groups
            for first, end in self._objects.needed(group, boundary)
        ]

    def _is_known(self, request: Request, boundary: int) -> bool:
        """Whether the boundary is known to be in the store as a whole."""
        # Every group's last object ends at the boundary; at most boundaries it is not there.
        last = (self._named(request, group.group_id, 0, boundary) for group in self._objects.groups)
        return all(item.ref in self.known for item in last) and all(
            item.ref in self.known for item in self._needed(request, boundary)
        )

    def _is_cared_for(self, ref: ObjectRef) -> bool:
        return ref in self.known or self._ledger.is_pending(ref)

    def _named(self, request: Request, group_id: int, first: int, end: int) -> StoredObject:
        return StoredObject(group_id, first, end, request.block_hashes[end // self._pool.index.unit - 1])
