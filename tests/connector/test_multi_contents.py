"""What a MultiConnector's children hold: each the keys and bytes that a store connector alone would have stored."""

import random
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest

from dalsegno.request import FinishReason
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from dalsegno.store.wrappers.latency import LatencyStore
from dalsegno.testing.auditing_store import AuditingStore, CellAuditor
from tests.connector.children import NULL, Hooked, MultiEngine, contents, store_child
from tests.connector.engines import VOCABULARY, StoreEngine

H, B = 16, 32
LENGTHS = (10, H, H + 1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 100, 257)
THIRD_PARTY = {"kv_connector": "ClassConnector", "kv_connector_module_path": "tests.connector.third_party"}


def prompt_of(length: int, seed: object = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(VOCABULARY), k=length)


def work(engine: StoreEngine) -> None:
    """Prompts that end in their very step, answers, samples, an abort, and all of it again with the device flushed."""
    for round_ in range(2):
        for length in LENGTHS:
            engine.send(prompt_of(length), 1)
        turn = engine.send(prompt_of(70), 75)
        engine.settle()
        engine.send([*turn.token_ids.tolist(), 1, 2, 3], 20)
        for request in (engine.request(prompt_of(90), 20, n=3), engine.request(prompt_of(200), 5, no_store=True)):
            engine.core.add_request(request)
        engine.run()
        aborted = engine.request(prompt_of(1200, round_))
        engine.core.add_request(aborted)
        for _ in range(2):
            engine.core.step()
        engine.core.abort(aborted.request_id)
        engine.run()
        assert aborted.finish_reason is FinishReason.ABORT
        engine.settle()
        assert engine.core.reset_prefix_cache()


@cache
def alone(kinds: str, role: str, budget: int, world_size: int) -> dict[Any, bytes]:
    """What a store connector stores without others beside it."""
    store = MemoryStore()
    with StoreEngine(store, kinds, role=role, budget=budget, world_size=world_size) as engine:
        work(engine)
    found = contents(store)
    assert len(found) > 15
    return found


ORDERS = ["NS", "SN", "SS", "TS", "ST", "NSN", "SSS", "(NS)S", "S(SN)"]


def children_of(order: str, stores: list[MemoryStore]) -> list[Mapping[str, Any]]:
    """N is the null connector, T a third party's, S a store connector; brackets are MultiConnectors of their own."""
    if "(" in order:
        before, _, rest = order.partition("(")
        inner, _, after = rest.partition(")")
        nested = {"connectors": children_of(inner, stores)}
        multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": nested}
        return [*children_of(before, stores), multi, *children_of(after, stores)]
    made: list[Mapping[str, Any]] = []
    for letter in order:
        if letter == "S":
            stores.append(MemoryStore())
        made.append({"N": NULL, "T": THIRD_PARTY, "S": store_child(stores[-1]) if stores else {}}[letter])
    return made


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kinds", "role", "budget", "world_size"),
    [
        ("as", "kv_both", 500, 1),
        ("aws", "kv_both", 24, 1),
        ("s", "kv_both", 500, 1),
        ("a", "kv_producer", 40, 1),
        ("as", "kv_producer", 500, 2),
    ],
)
def test_every_store_holds_the_keys_and_bytes_of_a_store_connector_alone(
    order: str, kinds: str, role: str, budget: int, world_size: int
) -> None:
    """64: tails of requests that end in the step that made them too, whatever stands before or behind."""
    stores: list[MemoryStore] = []
    children = children_of(order, stores)
    with MultiEngine(*children, kinds=kinds, role=role, budget=budget, world_size=world_size) as engine:
        work(engine)
    for store in stores:
        assert contents(store) == alone(kinds, role, budget, world_size)


@pytest.mark.parametrize("order", ["prompts first", "answers first"])
def test_children_with_roles_of_their_own_hold_what_they_would_alone(order: str) -> None:
    """Also where prompt and answer are computed in one step, and one child needs what only the other was given."""
    roles = {"prompts": ("kv_producer", False), "answers": ("kv_consumer", True)}

    def resume(engine: StoreEngine) -> None:
        request = engine.request(prompt_of(100), 75, checkpoint_at=(48, 80))
        engine.core.add_request(request)
        for _ in range(40):
            engine.core.step()
        assert engine.core.wait_for_connector(10_000)
        assert engine.core.reset_prefix_cache(reset_running_requests=True, reset_external=True)
        engine.run()
        engine.settle()

    expected = {}
    for name, (role, saves) in roles.items():
        store = MemoryStore()
        with StoreEngine(store, role=role, save_decode_cache=saves) as engine:
            resume(engine)
        expected[name] = contents(store)
        assert expected[name]
    stores = {name: MemoryStore() for name in roles}
    children = [
        {**store_child(stores[name], save_decode_cache=saves), "kv_role": role} for name, (role, saves) in roles.items()
    ]
    with MultiEngine(*(children if order == "prompts first" else children[::-1])) as engine:
        resume(engine)
    assert {name: contents(store) for name, store in stores.items()} == expected


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_child_has_the_role_of_all_unless_it_has_its_own(role: str) -> None:
    store, other = MemoryStore(), MemoryStore()
    with MultiEngine(store_child(store), {**store_child(other), "kv_role": "kv_consumer"}, role=role) as engine:
        engine.send(prompt_of(100), 20)
        engine.settle()
    assert bool(contents(store)) == (role != "kv_consumer")
    assert not contents(other)


# Near and far.


def filled(*prompts: Iterable[int]) -> MemoryStore:
    store = MemoryStore()
    with StoreEngine(store) as engine:
        for prompt in prompts:
            engine.send(list(prompt), 1)
        engine.settle()
    return store


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("flushed", ["near", "far"])
@pytest.mark.parametrize("kinds", ["as", "aws"])
def test_what_one_store_has_lost_comes_from_the_other_and_is_put_there_again(
    kinds: str, flushed: str, world_size: int
) -> None:
    stores = {"near": MemoryStore(), "far": MemoryStore()}
    prompt = prompt_of(257)
    with MultiEngine(*map(store_child, stores.values()), kinds=kinds, world_size=world_size) as engine:
        engine.send(prompt, 5)
        engine.settle()
        before = contents(stores[flushed])
        stores[flushed].clear()
        assert engine.core.reset_prefix_cache()
        assert engine.send(prompt, 5).num_cached_tokens == 256
        engine.settle()
        stats = engine.core.stats()
        assert stats["kv_connector_1_kv_offload_load_objects" if flushed == "near" else LOADED_NEAR] > 0
    with StoreEngine(stores[flushed], kinds, world_size=world_size) as engine:
        assert engine.send(prompt, 5).num_cached_tokens == 256
        engine.settle()
    assert set(contents(stores[flushed]).items()) >= {item for item in before.items() if item[0] in before}


LOADED_NEAR = "kv_connector_0_kv_offload_load_objects"


@pytest.mark.parametrize(("near", "far"), [(64, 150), (150, 64), (100, 100), (0, 100), (100, 0)])
def test_the_longest_hit_is_loaded_and_the_first_childs_of_equal_ones(near: int, far: int) -> None:
    prompt = prompt_of(200)
    stores = [filled(prompt[:near]) if near else MemoryStore(), filled(prompt[:far]) if far else MemoryStore()]
    with MultiEngine(*map(store_child, stores)) as engine:
        request = engine.send(prompt, 5)
        assert request.num_cached_tokens == max(near, far) // H * H
        loaded = [engine.core.stats()[f"kv_connector_{n}_kv_offload_load_objects"] > 0 for n in range(2)]
        assert loaded == [near >= far, near < far]
        engine.settle()


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_store_that_fails_costs_its_own_hits_only(fault: Fault, faulty: int) -> None:
    """R7: the other one has everything, and gives it."""
    prompts = [prompt_of(length, "faults") for length in (40, 100, 257)]
    stores: list[Any] = [filled(*prompts), filled(*prompts)]
    stores[faulty] = FaultyStore(stores[faulty], rates={fault: 1.0})
    new = [prompt_of(length, "new") for length in (64, 150)]
    with MultiEngine(*(store_child(store, pressure_pause_s=0.001) for store in stores)) as engine:
        for prompt in prompts:
            assert engine.send(prompt, 5).num_cached_tokens == (len(prompt) - 1) // H * H
        for prompt in new:
            engine.send(prompt, 5)
        engine.settle()
        assert engine.core.reset_prefix_cache()
        for prompt in (*prompts, *new):
            assert engine.send(prompt, 5).num_cached_tokens == (len(prompt) - 1) // H * H
        engine.settle()


@pytest.mark.parametrize("order", [1, -1])
def test_nothing_is_put_before_its_load_is_complete(order: int) -> None:
    """35: one child's load is slow, and the other stores what it loads."""
    prompts = [prompt_of(257, seed) for seed in range(4)]
    slow = LatencyStore(filled(*prompts), 0.01)
    with StoreEngine(MemoryStore()) as engine:
        audit = AuditingStore(MemoryStore(), engine.layout, H, 2 * B, CellAuditor())
    for prompt in prompts:
        audit.book.learn([*prompt, *engine.expected(prompt, 30)])
    children = [store_child(slow), store_child(audit)][::order]
    with MultiEngine(*children, setup={"load_timeout_s": 10_000}) as engine:
        requests = [engine.request(prompt, 30) for prompt in prompts]
        for request in requests:
            engine.core.add_request(request)
        engine.run()
        engine.settle()
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.output_token_ids == engine.expected(prompt, 30)
            assert request.num_cached_tokens == 256
    audit.check()
    assert audit.num_audited > 4 * 5


@pytest.mark.parametrize("recorder", [0, 1])
def test_every_call_reaches_a_child_that_stores_nothing_too(recorder: int) -> None:
    """64: a wrapper that does not forward the call of a request's end loses the tail without a word."""
    watched = Hooked(NULL)
    children = [store_child(MemoryStore()), store_child(MemoryStore())]
    children.insert(recorder, watched.child())
    with MultiEngine(*children, world_size=2) as engine:
        request = engine.send(prompt_of(100), 20, kv_transfer_params={"do_remote_decode": True})
        engine.core.manager.forget_chain(request)
        engine.settle()
        assert engine.core.reset_prefix_cache(reset_external=True)
        engine.core.stats()
        list(engine.multi.take_events())
    called = {name for rank, name in watched.calls if rank is None}
    # Those are for a child that saves, loads, or has reported something.
    spared = {"first_needed", "update_state_after_alloc", "update_connector_output"}
    assert called >= {name for name in vars(type(engine.multi)) if not name.startswith("_")} - spared
    for rank in range(2):
        names = {name for side, name in watched.calls if side == rank}
        assert names == {
            "register_kv_caches",
            "on_progress",
            "get_finished",
            "build_connector_worker_meta",
            "stats",
            "shutdown",
        }
