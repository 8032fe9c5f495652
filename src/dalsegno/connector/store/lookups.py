"""Lookups of requests: what is asked, here or on a thread of its own, and what the answers are worth later.

An answer is good for the same question for a while, so that who asks again soon, because another connector was not yet
done, need not wait again. What it counted on being on the device is checked whenever it is used.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dalsegno.connector.registry import ConnectorContext
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.lookup import LookupQuery, StoreMatch, find_in_store
from dalsegno.connector.store.lookup_thread import LookupThread
from dalsegno.connector.store.messages import ObjectRef, StoredObject
from dalsegno.connector.store.objects import ObjectMap
from dalsegno.connector.store.settings import StoreSettings
from dalsegno.kv.hand_off import block_ends
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.request import Request
from dalsegno.store.base import Status, Store
from dalsegno.store.keys import salt_tag
from dalsegno.types import NULL_BLOCK, GroupKind

__all__ = ["Lookups"]

_COUNTERS = ("external_prefix_cache_lookups", "kv_offload_lookup_errors")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a lookup found, None if it did not come back in time.

    The question is (local boundary, number of hashes, epoch).
    """

    question: tuple[int, int, int]
    expires: float
    match: StoreMatch | None


class Lookups:
    """The lookups of one engine. Used on the engine thread only; the store is asked on another one if so set.

    Attributes:
        counters: by metric name.
    """

    def __init__(
        self,
        settings: StoreSettings,
        context: ConnectorContext,
        objects: ObjectMap,
        index: PrefixIndex,
        store: Store,
        keys: Sequence[KeyMaker],
    ) -> None:
        """Ask `store` for the objects of every rank, whose `keys` these are."""
        self._settings = settings
        self._layout = context.layout
        self._unit = context.cache_config.hash_block_size
        self._clock = context.clock
        self._objects = objects
        self._index = index
        self._store = store
        self._keys = keys
        self._thread: LookupThread | None = None
        self._answers: dict[Request, _Answer] = {}
        self._excluded: dict[Request, set[ObjectRef]] = {}
        # Objects that are stored no more; a lookup appends from its thread.
        self._gone: deque[ObjectRef] = deque()
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))

    @property
    def num_timeouts(self) -> int:
        """Lookups that did not come back in time."""
        return 0 if self._thread is None else self._thread.num_timeouts

    def start(self, on_progress: Callable[[], None]) -> None:
        """Start the thread, if there is to be one; it calls `on_progress` when a lookup has ended."""
        if self._settings.lookup_async:
            self._thread = LookupThread(self._clock, self._settings.lookup_timeout_s, on_progress)

    def poll(self, request: Request, local: ComputedBlocks, epoch: int) -> tuple[bool, StoreMatch | None]:
        """Whether the lookup is done, and what it has found; None for one that did not come back in time."""
        question = local.boundary, len(request.block_hashes), epoch
        answer = self._answers.get(request)
        now = self._clock.now()
        if answer is None or now > answer.expires or question != answer.question:
            done, match = self._look_up(request, local)
            if not done:
                return False, None
            answer = self._answers[request] = _Answer(question, now + self._settings.lookup_timeout_s, match)
        return True, answer.match

    def still_holds(self, match: StoreMatch, request: Request) -> bool:
        """Whether what the lookup counted as being on the device still is; other requests may have evicted it."""
        local = self._index.match(request.root_hash, request.block_hashes, match.boundary)
        for group in self._objects.groups:
            there = [(item.first_token, item.boundary) for item in match.objects if item.group_id == group.group_id]
            for end in block_ends(group, 0, match.boundary):
                is_local = self._index.vouching(local, group.group_id, end) != NULL_BLOCK
                if not is_local and not any(first < end <= boundary for first, boundary in there):
                    return False
        return True

    def use(self, request: Request) -> None:
        """The answer is acted upon: the next question is a new one."""
        self._answers.pop(request, None)

    def exclude(self, request: Request, ref: ObjectRef) -> None:
        """The object could not be loaded: the request does not ask for it again."""
        self._excluded.setdefault(request, set()).add(ref)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._excluded.pop(request, None)
        self._answers.pop(request, None)
        if self._thread is not None:
            self._thread.forget(request)

    def take_gone(self) -> list[ObjectRef]:
        """Return and forget objects that lookups have missed: they are not known to be stored any more."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    def shutdown(self) -> bool:
        """End the thread; whether a lookup hangs in the store nevertheless."""
        if self._thread is None:
            return False
        self._thread.shutdown()
        return self._thread.is_alive

    def _look_up(self, request: Request, local: ComputedBlocks) -> tuple[bool, StoreMatch | None]:
        if self._thread is not None and self._thread.is_running(request):
            return self._thread.poll(request, lambda: None)
        query = self._query(request, local)
        if self._thread is not None:
            return self._thread.poll(request, lambda: self._find(query))
        return True, self._find(query)

    def _query(self, request: Request, local: ComputedBlocks) -> LookupQuery:
        hashes = request.block_hashes
        match = self._index.match(request.root_hash, hashes, len(hashes) * self._unit)
        reach = {
            group.group_id: local.boundary_by_group[group.name]
            for group in self._objects.groups
            if group.kind is GroupKind.ATTENTION
        }
        held = {
            group.group_id: frozenset(self._index.boundaries(match, group.group_id))
            for group in self._objects.groups
            if group.kind is not GroupKind.ATTENTION
        }
        return LookupQuery(
            hashes=list(hashes),
            salt=salt_tag(request.cache_salt),
            limit=request.num_tokens - 1,
            local_boundary=local.boundary,
            local_reach=reach,
            held=held,
            predicted=(*request.checkpoint_at, request.num_tokens - 1),
            excluded=frozenset(self._excluded.get(request, ())),
        )

    def _find(self, query: LookupQuery) -> StoreMatch:
        """One lookup; there is never more than one at a time."""
        self.counters["external_prefix_cache_lookups"] += 1
        before = self.counters["kv_offload_lookup_errors"]
        match = find_in_store(
            self._layout, self._unit, self._objects, query, self._exists, self._settings.max_state_probes
        )
        return replace(match, unsure=self.counters["kv_offload_lookup_errors"] != before)

    def _exists(self, salt: str, objects: Sequence[StoredObject]) -> list[bool]:
        """Whether every rank's part of each object is stored."""
        by_rank = [[maker.key(salt, item) for item in objects] for maker in self._keys]
        keys = list(dict.fromkeys(key for keys_of_rank in by_rank for key in keys_of_rank))
        try:
            found = self._store.exists(keys)
        except Exception:
            found = []
        if len(found) != len(keys):
            self.counters["kv_offload_lookup_errors"] += 1
            return [False] * len(objects)
        self.counters["kv_offload_lookup_errors"] += sum(status is Status.ERROR for status in found)
        said = dict(zip(keys, found, strict=True))
        by_object = [{said[key] for key in keys_of_object} for keys_of_object in zip(*by_rank, strict=True)]
        self._gone += (item.ref for item, has in zip(objects, by_object, strict=True) if Status.MISS in has)
        return [statuses == {Status.OK} for statuses in by_object]
