"""Several ranks: stored, loaded and ended is what every one of them has stored, loaded and ended."""

import hashlib
import random
from collections.abc import Sequence

import pytest

from dalsegno.config import CacheConfig
from dalsegno.connector.base import BoundPool, MatchStatus
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, create_connector
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.messages import StoredObject
from dalsegno.kv.manager import KVCacheManager
from dalsegno.store.base import Buffers, Status, Store
from dalsegno.store.keys import StoreKey, salt_tag
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.counting import CountingStore
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from dalsegno.store.wrappers.latency import LatencyStore
from dalsegno.store.wrappers.wrapped import WrappedStore
from dalsegno.testing.builders import make_layout, make_request
from dalsegno.testing.fake_worker import FakeClock
from dalsegno.types import BlockHash
from tests.connector.engines import VOCABULARY, StoreEngine

H, B = 16, 32
BOUNDARIES = (32, 64, 96)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_hit_stops_where_one_rank_lacks_one_object(world_size: int) -> None:
    """44: whichever rank, group and boundary it is."""
    config = CacheConfig(B, H)
    layout = make_layout("as", config)
    clock = FakeClock()
    context = ConnectorContext(layout, config, {"weights": "w"}, clock, range(world_size), world_size)
    store = MemoryStore()
    extra = {"store": store, "store_block_size": B}
    scheduler, _ = create_connector(KVTransferConfig("StoreConnector", kv_connector_extra_config=extra), context)
    manager = KVCacheManager(layout, config, max_step_tokens=100)
    scheduler.bind_block_pool(BoundPool(manager.layout, manager.index, manager.pins))
    request = make_request("r", range(100))
    manager.start_request(request)

    def key(rank: int, group: int, boundary: int) -> StoreKey:
        maker = KeyMaker(context, rank, B, "")
        item = StoredObject(group, 0, boundary, request.block_hashes[boundary // H - 1])
        return maker.key(salt_tag(None), item)

    def hit() -> int:
        clock.time += 10  # An answer is good for a while.
        computed, _, _ = manager.get_computed_blocks(request)
        match = scheduler.get_num_new_matched_tokens(request, computed)
        assert (match.status is MatchStatus.HIT) == (match.num_tokens > 0)
        return match.num_tokens

    every = [(rank, group, end) for rank in range(world_size) for group in range(2) for end in BOUNDARIES]
    store.put([key(*place) for place in every], [[memoryview(b"x")]] * len(every))
    assert hit() == 96
    for rank, group, end in every:
        store.remove([key(rank, group, end)])
        # An absent state costs its own boundary; an absent attention object all from its beginning.
        others = {b for b in BOUNDARIES if (b != end if group else b < end)}
        assert hit() == max(others, default=0), (rank, group, end)
        store.put([key(rank, group, end)], [[memoryview(b"x")]])
    assert hit() == 96


# Engines of several ranks, each with memory of its own in which the cells of another rank read as other numbers.

SPLITS: list[tuple[int, dict[int, int]]] = [(1, {}), (2, {}), (4, {}), (2, {0: 2}), (4, {0: 2}), (4, {0: 4, 1: 2})]
"""World sizes, and how many ranks share the bytes of a group."""

PROMPTS = [random.Random(seed).choices(range(VOCABULARY), k=length) for seed, length in enumerate((40, 100, 257, 300))]


class OneRank(WrappedStore):
    """Puts and gets of one rank go to another store; lookups see all."""

    def __init__(self, inner: Store, namespaces: Sequence[str], theirs: Store) -> None:
        super().__init__(inner)
        self.namespaces = namespaces
        self.theirs = theirs

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        return self._of(keys).put(keys, buffers)

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        return self._of(keys).get(keys, buffers)

    def _of(self, keys: Sequence[StoreKey]) -> Store:
        return self.theirs if keys[0].namespace in self.namespaces else self.inner


def namespaces_of(rank: int, world_size: int, put_step: dict[int, int] | None = None) -> list[str]:
    with StoreEngine(MemoryStore(), world_size=world_size, put_step=put_step) as engine:
        return KeyMaker(engine.context, rank, 64, "").namespaces


def stored(world_size: int, put_step: dict[int, int] | None = None, prompts: list[list[int]] = PROMPTS) -> MemoryStore:
    store = MemoryStore()
    with StoreEngine(store, world_size=world_size, put_step=put_step) as engine:
        for prompt in prompts:
            engine.send(prompt, 5)
        engine.settle()
    return store


def reports_of(engine: StoreEngine, rank: int, count: int) -> None:
    """Wait until a rank that is held back has `count` jobs to report."""
    while len(engine.ranks[rank].jobs) < count:
        engine.ranks[rank].collect()


@pytest.mark.parametrize(("world_size", "put_step"), SPLITS)
def test_every_prompt_is_resumed_at_its_last_boundary_by_another_engine(
    world_size: int, put_step: dict[int, int]
) -> None:
    store = stored(world_size, put_step)
    with StoreEngine(store, world_size=world_size, put_step=put_step) as engine:
        for prompt in PROMPTS:
            assert engine.send(prompt, 5).num_cached_tokens == (len(prompt) - 1) // H * H
        engine.settle()
    with StoreEngine(store, world_size=world_size + 1) as engine:
        assert engine.send(PROMPTS[2], 5).num_cached_tokens == 0


def test_the_cells_of_a_rank_are_read_as_other_numbers_by_another_unless_they_share_them() -> None:
    """Else the tests here could not fail."""
    with StoreEngine(MemoryStore(), world_size=4, put_step={0: 2}) as engine:
        engine.send(PROMPTS[0], 1)
        ranks = engine.worker.memories
        masked = [{bytes(rank.memory[at : at + n]) for at, n in rank.spans(0, 1, B)} for rank in ranks]
        assert masked[0] == masked[1] != masked[2] == masked[3]
        assert len({rank.read(0, 1) for rank in ranks}) == 1


@pytest.mark.parametrize(("world_size", "put_step"), SPLITS)
def test_each_object_is_put_once_for_every_rank_that_has_bytes_of_its_own(
    world_size: int, put_step: dict[int, int]
) -> None:
    store = CountingStore(MemoryStore())
    with StoreEngine(store, world_size=world_size, put_step=put_step) as engine:
        for prompt in PROMPTS:
            engine.send(prompt, 5)
        engine.settle()
        keys = list(store.inner._entries)  # type: ignore[attr-defined]
        groups = {group.group_id: group.name for group in engine.layout.groups}
        counts = {group: sum(key.part == name for key in keys) for group, name in groups.items()}
        assert store.counts["put_keys"] == store.counts["put_ok"] == sum(counts.values())
    alone = stored(1)
    for group, name in groups.items():
        single = sum(key.part == name for key in alone._entries)
        assert counts[group] == single * world_size // put_step.get(group, 1)


def test_ranks_with_the_same_bytes_share_the_work() -> None:
    with StoreEngine(MemoryStore(), world_size=4, put_step={0: 4, 1: 4}) as engine:
        makers = [KeyMaker(engine.context, rank, 64, "") for rank in range(4)]
    hashes = [BlockHash(hashlib.sha256(bytes([n])).digest()) for n in range(200)]
    turns = [[maker.puts(StoredObject(0, 0, 64, block_hash)) for maker in makers] for block_hash in hashes]
    assert all(sum(turn) == 1 for turn in turns)
    assert all(sum(rank) > 20 for rank in zip(*turns, strict=True))


@pytest.mark.parametrize("late", range(4))
def test_a_job_owns_its_blocks_until_the_last_rank_has_reported(late: int) -> None:
    """37: whichever rank it is, and although the others report it twice."""
    with StoreEngine(MemoryStore(), world_size=4, setup={"job_timeout_s": 1e9}) as engine:
        engine.ranks[late].holds_all = True
        for rank in engine.ranks:
            rank.repeat = 1.0
        request = engine.request(PROMPTS[2], 3, kv_transfer_params={"do_remote_decode": True})
        engine.core.add_request(request)
        for _ in range(40):
            engine.core.step()
            engine.worker.port.wait(0.001)
        jobs = engine.core.stats()["kv_offload_pending_jobs"]
        assert jobs > 0
        assert engine.core.manager.pins.counts
        assert request.kv_transfer_answer is None
        reports_of(engine, late, int(jobs))
        engine.ranks[late].holds_all = False
        for rank in engine.ranks:
            rank.repeat = 0.0
        engine.run()
        assert request.kv_transfer_answer is not None
        assert request.kv_transfer_answer["stored_boundary"] == 256
        engine.settle()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("fault", [Fault.PUT_ERROR, Fault.PUT_NO_ROOM, Fault.PUT_LAST_NO_ROOM, Fault.PUT_RAISES])
def test_what_one_rank_could_not_store_is_stored_by_none_until_it_can(world_size: int, fault: Fault) -> None:
    memory = MemoryStore()
    failing = FaultyStore(memory, rates={fault: 1.0})
    last = world_size - 1
    store = OneRank(memory, namespaces_of(last, world_size), failing)
    with StoreEngine(store, world_size=world_size, pressure_pause_s=0.001) as engine:
        request = engine.send(PROMPTS[2], 5, kv_transfer_params={"do_remote_decode": True})
        assert request.kv_transfer_answer is not None
        assert request.kv_transfer_answer["stored_boundary"] == 0
        engine.settle()
        assert engine.core.stats()["kv_offload_jobs_incomplete"] > 0
        assert engine.core.reset_prefix_cache()
        assert engine.send(PROMPTS[2], 5).num_cached_tokens == 0
        engine.settle()
        store.theirs = memory
        engine.send(PROMPTS[2], 5)
        engine.settle()
        assert engine.core.reset_prefix_cache()
        assert engine.send(PROMPTS[2], 5).num_cached_tokens == 256


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "fault", [Fault.GET_MISS, Fault.GET_ERROR, Fault.GET_CORRUPT, Fault.GET_SHORT, Fault.GET_RAISES]
)
def test_what_one_rank_could_not_load_is_loaded_by_none(world_size: int, fault: Fault) -> None:
    """The others' blocks are not published under its hashes."""
    memory = stored(world_size)
    for rank in range(world_size):
        failing = FaultyStore(memory, rates={fault: 1.0})
        store = OneRank(memory, namespaces_of(rank, world_size), failing)
        with StoreEngine(store, world_size=world_size) as engine:
            request = engine.send(PROMPTS[2], 5)
            assert request.num_cached_tokens == 0
            assert engine.core.stats()["kv_load_failures"] >= 1
            engine.settle()
            assert engine.send(PROMPTS[2], 5).num_cached_tokens == 256


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_key_that_one_rank_misses_costs_what_lies_behind_it(world_size: int) -> None:
    memory = stored(world_size)
    of_last = [key for key in memory._entries if key.namespace in namespaces_of(world_size - 1, world_size)]
    for lost in of_last:
        payload = memory._entries[lost].payload
        memory.remove([lost])
        with StoreEngine(memory, world_size=world_size, role="kv_consumer", save_decode_cache=False) as engine:
            hits = [engine.send(prompt, 5).num_cached_tokens for prompt in PROMPTS]
            engine.settle()
        full = [(len(prompt) - 1) // H * H for prompt in PROMPTS]
        assert all(hit is not None and hit <= most for hit, most in zip(hits, full, strict=True))
        memory.put([lost], [[memoryview(payload)]])
    with StoreEngine(memory, world_size=world_size) as engine:
        assert [engine.send(prompt, 5).num_cached_tokens for prompt in PROMPTS] == full


@pytest.mark.parametrize(("world_size", "put_step"), [split for split in SPLITS if split[0] > 1])
def test_a_dead_rank_costs_hits_and_no_answer(world_size: int, put_step: dict[int, int]) -> None:
    """It reports nothing any more, from the first step or from the middle: requests go on, what is held is bounded."""
    store = stored(world_size, put_step)
    longest = 400
    with StoreEngine(MemoryStore(), max_model_len=longest) as probe:
        need = probe.core.manager.slabs_alone(longest) + 8
    setup = {"load_timeout_s": 5, "job_timeout_s": 5, "close_timeout_s": 0.1}
    with StoreEngine(
        store, world_size=world_size, put_step=put_step, num_slabs=need, max_model_len=longest, setup=setup
    ) as engine:
        assert engine.send(PROMPTS[1], 5).num_cached_tokens == 96
        engine.ranks[-1].holds_all = True
        for round_ in range(3):
            for prompt in PROMPTS:
                engine.send([*prompt, round_], 5)
                engine.core.verify()
        request = engine.send(PROMPTS[2][::-1], 5, kv_transfer_params={"do_remote_decode": True})
        assert request.kv_transfer_answer is not None
        assert request.kv_transfer_answer["stored_boundary"] == 0
        stats = engine.core.stats()
        assert stats["kv_load_timeouts"] >= 1
        assert stats["kv_offload_pending_jobs"] > 0
        # It comes back: everything it owed is given back.
        engine.ranks[-1].holds_all = False
        engine.settle()
        assert not engine.core.manager.pins.counts


@pytest.mark.parametrize("slow", range(2))
def test_a_slow_rank_is_waited_for(slow: int) -> None:
    memory = MemoryStore()
    store = OneRank(memory, namespaces_of(slow, 2), LatencyStore(memory, 0.02))
    with StoreEngine(store, world_size=2, setup={"load_timeout_s": 10_000, "job_timeout_s": 10_000}) as engine:
        for prompt in PROMPTS:
            engine.send(prompt, 5)
        engine.settle()
        assert engine.core.reset_prefix_cache()
        for prompt in PROMPTS:
            assert engine.send(prompt, 5).num_cached_tokens == (len(prompt) - 1) // H * H
        engine.settle()


@pytest.mark.parametrize(("world_size", "put_step"), SPLITS)
def test_a_reset_empties_the_part_of_every_rank(world_size: int, put_step: dict[int, int]) -> None:
    store = stored(world_size, put_step)
    other = stored(world_size + 1)
    keys = list(other._entries)
    store.put(keys, [[memoryview(other._entries[key].payload)] for key in keys])
    with StoreEngine(store, world_size=world_size, put_step=put_step) as engine:
        engine.send(PROMPTS[2], 5)
        engine.settle()
        assert engine.core.reset_prefix_cache(reset_external=True)
        engine.settle()
        assert set(store._entries) == set(keys)
        assert engine.send(PROMPTS[2], 5).num_cached_tokens == 0
        engine.settle()
        assert engine.core.reset_prefix_cache()
        assert engine.send(PROMPTS[2], 5).num_cached_tokens == 256
