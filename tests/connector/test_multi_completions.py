"""Whatever a MultiConnector's children do, the engine sees one completion per load and per kept table."""

import itertools
from typing import Any

import pytest

from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.request import FinishReason, Request
from dalsegno.store.memory import MemoryStore
from dalsegno.testing.builders import make_request
from tests.connector.children import (
    HITS,
    NULL,
    PROMPTS,
    START,
    Gossip,
    Hooked,
    Keeper,
    MultiEngine,
    Unruly,
    contents,
    filled,
    of_ranks,
    received,
    store_child,
)
from tests.connector.engines import StoreEngine

# Loads.


@pytest.mark.parametrize("others", ["null", "store", "gossip", "failing gossip"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("behaviour", ["good", "late", "twice", "silent", "all at once"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_load_is_completed_once_by_each_rank(world_size: int, behaviour: str, place: int, others: str) -> None:
    """61, 62: a rank of the child that loads is late, repeats itself or is silent; others report what is not theirs."""
    loader = Unruly(filled(world_size))
    beside: dict[str, Any] = {"null": NULL, "store": store_child(MemoryStore())}
    beside |= {"gossip": Gossip().child(), "failing gossip": Gossip(failed=True).child()}
    children = [loader.child(), beside[others]]
    setup = {"load_timeout_s": 20 if behaviour == "silent" else 100_000, "job_timeout_s": 20}
    with MultiEngine(*(children if place == 0 else children[::-1]), world_size=world_size, setup=setup) as engine:
        reports = received(engine)
        unruly = loader.ranks if behaviour == "all at once" else loader.ranks[-1:]
        for rank in unruly:
            rank.hold = 0.8 if behaviour in ("late", "all at once") else 0.0
            rank.repeat = 0.7 if behaviour in ("twice", "all at once") else 0.0
            rank.holds_all = behaviour == "silent"
        hits = [engine.send(prompt, 5).num_cached_tokens for prompt in PROMPTS]
        assert hits == (HITS if behaviour != "silent" else [0, 0, 0])
        for rank in loader.ranks:
            rank.hold, rank.repeat, rank.holds_all = 0.0, 0.0, False
        engine.settle()
        assert of_ranks(reports, world_size)
        assert len(reports) == world_size * engine.core.stats()["kv_loads"] > 0
        assert engine.core.reset_prefix_cache()
        assert [engine.send(prompt, 5).num_cached_tokens for prompt in PROMPTS] == HITS
        engine.settle()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_load_the_child_does_not_take_fails_at_once(world_size: int, place: int) -> None:
    """R7: it is a miss, and not a request that waits for what nobody has begun."""
    refusing = Hooked(store_child(filled(world_size)), raise_in("update_state_after_alloc"))
    children = [refusing.child(), store_child(MemoryStore())]
    with MultiEngine(*(children if place == 0 else children[::-1]), world_size=world_size) as engine:
        reports = received(engine)
        requests = [engine.request(prompt, 5) for prompt in PROMPTS]
        for request in requests:
            engine.core.add_request(request)
        before = engine.clock.now()
        engine.run()
        assert engine.clock.now() - before < 30
        for request, prompt in zip(requests, PROMPTS, strict=True):
            assert request.output_token_ids == engine.expected(prompt, 5)
            assert request.num_cached_tokens == 0
            assert request.hit_report.lost["load_failed"] > 0
        engine.settle()
        stats = engine.core.stats()
        assert of_ranks(reports, world_size)
        assert stats["kv_load_failures"] == stats["kv_loads"] == stats[f"kv_connector_{place}_errors"] > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_abort_while_a_load_is_open_frees_its_blocks_once_every_rank_has_reported(world_size: int) -> None:
    """48: whichever child reports what, in whichever order."""
    loader = Unruly(filled(world_size))
    with MultiEngine(Gossip().child(), loader.child(), world_size=world_size) as engine:
        for rank in loader.ranks:
            rank.holds_all = True
        for number, prompt in enumerate(PROMPTS):
            engine.core.add_request(make_request(f"r{number}", prompt, 5))
        for _ in range(3):
            engine.core.step()
        for number in range(3):
            engine.core.abort(f"r{number}")
        for rank in reversed(loader.ranks):
            engine.core.step()
            assert engine.core.manager.pins.counts
            assert engine.core.has_background_work
            rank.holds_all = False
        engine.run()
        engine.settle()
        assert not engine.core.manager.loads.active


# Tables.


@pytest.mark.parametrize("call", ["register_finished_partial_tail", "request_finished"])
@pytest.mark.parametrize("keepers", [1, 2])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_table_is_freed_once_when_every_child_that_asked_is_done_on_every_rank(
    world_size: int, place: int, keepers: int, call: str
) -> None:
    """62: in any order, with repetitions, and with a child that asked for nothing saying so too."""
    for seed, events in enumerate(itertools.permutations(itertools.product(range(keepers), range(world_size)))):
        asking = [Keeper(call if index == 0 else "request_finished") for index in range(keepers)]
        other = Keeper(wants=lambda request: False)
        children = [*(keeper.child() for keeper in asking), other.child(), store_child(MemoryStore())]
        order = children if place == 0 else children[::-1]
        with MultiEngine(*order, world_size=world_size) as engine:
            request = engine.send(PROMPTS[1], 5)
            engine.core.wait_for_connector(10_000)
            freed = freed_by(engine)
            for rank in range(world_size):
                other.sent[rank].append(request.request_id)
            for number, (keeper, rank) in enumerate(events):
                engine.core.step()
                engine.core.step()
                assert engine.core.connection.keeps(request.request_id)
                asking[keeper].sent[rank].append(request.request_id)
                if seed % 2:
                    again, its_rank = events[seed % (number + 1)]
                    asking[again].sent[its_rank].append(request.request_id)
            engine.core.step()
            assert freed == [request]
            assert not engine.core.connection.keeps_tables
            for late in asking:
                late.sent = {rank: [request.request_id] for rank in range(world_size)}
            engine.settle()
            assert freed == [request]


def freed_by(engine: MultiEngine) -> list[Request]:
    """A list that will have each request whose table is freed."""
    freed: list[Request] = []
    manager = engine.core.manager
    free = manager.free

    def noted(request: Request) -> None:
        freed.append(request)
        free(request)

    setattr(manager, "free", noted)  # noqa: B010
    return freed


@pytest.mark.parametrize("call", ["register_finished_partial_tail", "request_finished"])
def test_of_a_request_that_ends_without_blocks_nothing_is_kept(call: str) -> None:
    keeper = Keeper(call)
    with MultiEngine(keeper.child(), store_child(filled())) as engine:
        for number, prompt in enumerate(PROMPTS):
            engine.core.add_request(make_request(f"r{number}", prompt, 5))
            engine.core.abort(f"r{number}")
        engine.run()
        assert not engine.core.connection.keeps_tables
        engine.settle()


def test_what_children_never_let_go_ends_with_the_engine() -> None:
    engine = MultiEngine(Keeper().child(), NULL, Keeper("request_finished").child(), world_size=2)
    engine.send(PROMPTS[1], 5)
    assert engine.core.connection.keeps_tables
    engine.close()
    assert not engine.core.connection.keeps_tables


# Children that raise.


def raise_in(*names: str, rank: int | None = None) -> Any:
    def hook(of_rank: int | None, name: str) -> None:
        if name in names and (rank is None or of_rank == rank):
            raise RuntimeError(f"planted in {name}")

    return hook


CALLS = [name for base in (SchedulerConnector,) for name in vars(base) if not name.startswith("_") and name != "pool"]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", [*(name for name in CALLS if name not in START), "everything"])
def test_a_child_that_raises_costs_the_others_nothing(name: str, place: int) -> None:
    """Their stores hold what they would alone, answers are cold, nothing stays pinned, and the calls are counted."""
    names = [call for call in CALLS if call not in START] if name == "everything" else [name]
    keeps_jobs = name in ("update_connector_output", "build_connector_meta")
    raising = Hooked(NULL if keeps_jobs else store_child(MemoryStore()), raise_in(*names))
    store, expected = MemoryStore(), MemoryStore()
    children = [raising.child(), store_child(store)]
    if keeps_jobs:
        children.append(Gossip().child())
    if place:
        children[:2] = children[1::-1]

    def work(engine: StoreEngine) -> None:
        for prompt in PROMPTS:
            engine.send(prompt, 1)
            turn = engine.send([*prompt, 1, 2], 40, kv_transfer_params={"do_remote_decode": True})
            assert turn.finish_reason is FinishReason.LENGTH
        for fields in ({}, {"no_store": True}):
            engine.core.add_request(engine.request([*PROMPTS[2], *PROMPTS[2]], 5, **fields))
        engine.core.step()
        engine.core.abort(f"r{engine._count}")
        engine.run()
        engine.settle()
        assert engine.core.reset_prefix_cache()
        for prompt in PROMPTS:
            engine.send(prompt, 5)
        engine.settle()
        forgotten = engine.send(PROMPTS[0], 3)
        engine.core.manager.forget_chain(forgotten)
        engine.settle()
        # What is stored next is so behind what was to be removed.
        engine.send(PROMPTS[1][1:], 3)
        engine.settle()

    with StoreEngine(expected) as engine:
        work(engine)
    with MultiEngine(*children, setup={"load_timeout_s": 30}) as multi:
        work(multi)
        assert contents(store) == contents(expected)
        list(multi.multi.take_events())
        assert not multi.core.reset_prefix_cache(reset_external=True) or "reset_cache" not in names
        multi.settle()
        assert not contents(store)
        multi.core.stats()
        stats = multi.core.stats()
    # The last one comes later; a child without a worker side's report, or behind one with the same hit, is not called.
    spared = {"shutdown", "update_connector_output", *(["update_state_after_alloc"] if place else [])}
    assert (stats[f"kv_connector_{place}_errors"] > 0) == (name not in spared)
    assert stats["kv_connector_errors"] == stats[f"kv_connector_{place}_errors"]
    assert (None, "shutdown") in raising.calls


def test_a_child_that_cannot_say_what_is_to_be_done_keeps_nobody_busy_until_it_can() -> None:
    raising = Hooked(store_child(MemoryStore()), raise_in("build_connector_meta"))
    with MultiEngine(raising.child(), store_child(MemoryStore())) as engine:
        for prompt in PROMPTS:
            engine.send(prompt, 5)
        engine.core.wait_for_connector(5)
        assert not engine.core.connection.has_push_work
        assert engine.core.manager.pins.counts
        raising.hook = lambda rank, name: None
        engine.send(PROMPTS[0], 5)
        engine.settle()
        assert not engine.multi._mute
        stats = engine.core.stats()
        assert stats["kv_connector_0_kv_offload_store_objects"] == stats["kv_connector_1_kv_offload_store_objects"]


def test_what_a_child_has_pinned_is_waited_for_although_it_cannot_say_so() -> None:
    late = Unruly(MemoryStore())
    raising = Hooked(late.child(), raise_in("has_pending_jobs"))
    with MultiEngine(raising.child(), NULL) as engine:
        late.ranks[0].holds_all = True
        engine.send(PROMPTS[1], 5)
        assert engine.core.has_background_work
        assert engine.core.manager.pins.counts
        late.ranks[0].holds_all = False
        engine.settle()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name", ["start_load_kv", "wait_for_save", "get_finished", "build_connector_worker_meta", "stats", "shutdown"]
)
def test_a_worker_side_that_raises_on_one_rank_costs_the_others_nothing(name: str, rank: int, place: int) -> None:
    """62: loads that are never reported are left behind, jobs keep what is theirs, and all else goes on."""
    raising = Hooked(store_child(filled(2)), raise_in(name, rank=rank))
    store, expected = MemoryStore(), MemoryStore()
    children = [raising.child(), store_child(store)]
    setup = {"load_timeout_s": 5, "job_timeout_s": 5, "close_timeout_s": 0.1}
    with MultiEngine(*(children if place == 0 else children[::-1]), world_size=2, setup=setup) as engine:
        for prompt in PROMPTS:
            engine.send(prompt, 5)
        for prompt in PROMPTS:
            engine.send([*prompt, 1, 2, 3], 30)
        engine.core.wait_for_connector(20)
        with StoreEngine(expected, world_size=2) as alone:
            for prompt in PROMPTS:
                alone.send(prompt, 5)
            for prompt in PROMPTS:
                alone.send([*prompt, 1, 2, 3], 30)
            alone.settle()
        assert contents(store) == contents(expected)
        engine.core.stats()
        errors = engine.core.stats()[f"kv_connector_{place}_worker_errors"]
        assert (errors > 0) == (name != "shutdown")
    assert {(side, "shutdown") for side in (None, 0, 1)} <= set(raising.calls)


@pytest.mark.parametrize("call", ["register_partial_tail", "register_finished_partial_tail"])
@pytest.mark.parametrize("taken", ["none", "some", "all", "too much"])
def test_pins_of_what_a_child_did_not_take_over_come_back_exactly_once(call: str, taken: str) -> None:
    """Those it has given back before it raised are not given back again; those of other hand-offs stay its own."""

    class Clumsy(SchedulerConnector):
        def __init__(self) -> None:
            self.kept: list[tuple[int, int]] = []

        def saves(self, request: Request, boundary: int) -> bool:
            return True

        def has_pending_jobs(self) -> bool:
            return bool(self.kept)

        def register_partial_tail(self, request: Request, block_ids: Any, offloads: Any) -> None:
            blocks = [entry for hand_off in offloads for entry in hand_off.blocks()]
            if request.request_id == "keeps":
                self.kept += blocks
                return
            given = {"none": [], "some": blocks[:1], "all": blocks, "too much": [*blocks, *blocks]}[taken]
            self.pool.pins.unpin(given)
            raise RuntimeError("planted")

    clumsy = Clumsy()
    third_party = Hooked(NULL)
    third_party.create = lambda *_: (clumsy, [WorkerConnector()])  # type: ignore[method-assign]
    with MultiEngine(store_child(MemoryStore()), third_party.child()) as engine:
        if taken != "too much":
            engine.core.add_request(make_request("keeps", PROMPTS[1], 1))
            engine.run()
            engine.core.wait_for_connector(5)
            assert clumsy.kept
        held = dict(engine.core.manager.pins.counts)
        request = engine.request(PROMPTS[1], 1 if call.startswith("register_finished") else 20)
        engine.core.add_request(request)
        engine.run()
        engine.core.wait_for_connector(5)
        assert engine.core.manager.pins.counts == held
        assert request.output_token_ids == engine.expected(PROMPTS[1], request.max_tokens)
        clumsy.pool.pins.unpin(clumsy.kept)
        clumsy.kept = []
        engine.settle()
