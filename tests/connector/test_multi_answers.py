"""What a MultiConnector answers for all of its children: to lookups, to who asks what is stored, and in counters."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from dalsegno.connector.base import ExternalMatch, MatchStatus, SchedulerConnector, WorkerConnector
from dalsegno.connector.multi.scheduler import MultiScheduler
from dalsegno.request import Request
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.latency import LatencyStore
from dalsegno.testing.builders import make_request
from tests.connector.children import (
    HITS,
    NULL,
    PROMPTS,
    Hooked,
    MultiEngine,
    Unruly,
    contents,
    filled,
    store_child,
)
from tests.connector.engines import VOCABULARY, StoreEngine

# Looking up.


class Answers(SchedulerConnector):
    """Answers lookups with what it is given, in turn; the last one stays."""

    def __init__(self, *answers: ExternalMatch | Exception) -> None:
        self.answers = list(answers)
        self.num_asked = 0
        self.num_loads = 0

    def get_num_new_matched_tokens(self, request: Request, local: Any) -> ExternalMatch:
        self.num_asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def update_state_after_alloc(self, request: Request, load: Any) -> None:
        self.num_loads += 1


def match(status: str, num_tokens: int = 0, shared: int = 0) -> ExternalMatch:
    return ExternalMatch(MatchStatus[status], num_tokens, shared_tokens=shared)


NONE, MISS, PENDING, ERROR = match("NONE"), match("MISS"), match("PENDING"), RuntimeError("planted")


@pytest.mark.parametrize(
    ("answers", "expected", "chosen"),
    [
        ([NONE], NONE, None),
        ([NONE, NONE], NONE, None),
        ([NONE, MISS], MISS, None),
        ([MISS, NONE], MISS, None),
        ([ERROR, NONE], NONE, None),
        ([ERROR, MISS], MISS, None),
        ([PENDING, MISS], PENDING, None),
        ([match("HIT", 64), PENDING], PENDING, None),
        ([PENDING, match("HIT", 64), ERROR], PENDING, None),
        ([match("HIT", 32), match("HIT", 64)], match("HIT", 64), 1),
        ([match("HIT", 64), match("HIT", 32)], match("HIT", 64), 0),
        ([MISS, match("HIT", 64), match("HIT", 64)], match("HIT", 64), 1),
        ([ERROR, NONE, match("HIT", 16)], match("HIT", 16), 2),
        ([match("HIT", 0), NONE], MISS, None),
        ([match("MISS", 0, 96), match("HIT", 32, 48)], match("HIT", 32, 96), 1),
        ([match("MISS", 0, 96), match("MISS", 0, 112), NONE], match("MISS", 0, 112), None),
        ([match("MISS", 400), match("HIT", 16)], match("HIT", 16), 1),
    ],
    ids=str,
)
def test_the_longest_hit_is_taken_when_no_child_is_pending(
    answers: Sequence[Any], expected: ExternalMatch, chosen: int | None
) -> None:
    children = [Answers(answer) for answer in answers]
    multi = MultiScheduler(children, 1)
    request = make_request("r", range(100))
    assert multi.get_num_new_matched_tokens(request, None) == expected  # type: ignore[arg-type]
    assert [child.num_asked for child in children] == [1] * len(children)
    assert multi._chosen == ({} if chosen is None else {request: chosen})


@pytest.mark.parametrize("slow", ["first", "second", "both"])
@pytest.mark.parametrize("hit", [0, 1])
def test_lookups_that_take_longer_than_a_step_end(slow: str, hit: int) -> None:
    """One child's answer is not thrown away because the other's is not there yet."""
    stores = [MemoryStore(), MemoryStore()]
    stores[hit] = filled()
    children = []
    for index, store in enumerate(stores):
        is_slow = slow in ("both", ("first", "second")[index])
        inner: Any = LatencyStore(store, 0.003) if is_slow else store
        children.append(store_child(inner, lookup_async=is_slow, lookup_timeout_s=1000.0))
    with MultiEngine(*children) as engine:
        for prompt, expected in zip(PROMPTS, HITS, strict=True):
            assert engine.send(prompt, 5).num_cached_tokens == expected
        engine.settle()
        lookups = engine.core.stats()
        for index in range(2):
            assert lookups[f"kv_connector_{index}_external_prefix_cache_lookups"] <= 2 * len(PROMPTS) + 2


def test_an_open_load_is_waited_for_although_its_child_does_not_say_so() -> None:
    class Worker(WorkerConnector):
        def __init__(self) -> None:
            self.loads: set[int] = set()

        def get_finished(self) -> tuple[set[str], set[int], list[Any]]:
            found, self.loads = self.loads, set()
            return set(), found, []

    worker = Worker()
    third_party = Hooked(NULL)
    third_party.create = lambda *_: (Answers(match("HIT", 64)), [worker])  # type: ignore[method-assign]
    with MultiEngine(third_party.child(), NULL) as engine:
        request = engine.request(PROMPTS[1], 5)
        engine.core.add_request(request)
        engine.core.step()
        engine.core.abort(request.request_id)
        engine.core.step()
        assert engine.core.has_background_work
        worker.loads = {0}
        engine.settle()


@pytest.mark.parametrize("extra", [0, 1, 3, 8])
def test_while_no_job_of_any_child_ever_ends_the_largest_request_still_runs(extra: int) -> None:
    """R6, R9: the room for what is held is one for all children."""
    longest = 300
    with StoreEngine(MemoryStore(), max_model_len=longest, budget=64) as probe:
        need = probe.core.manager.slabs_alone(longest) + 1
    stores = [Unruly(MemoryStore()), Unruly(MemoryStore())]
    children = [store.child() for store in stores]
    with MultiEngine(*children, max_model_len=longest, num_slabs=need + extra, budget=64) as engine:
        for store in stores:
            store.ranks[0].holds_all = True
        for seed in range(12):
            engine.send(random.Random(seed).choices(range(VOCABULARY), k=30 + 20 * seed), 20)
            assert engine.core.manager.pins.num_slabs <= extra
        engine.send(PROMPTS[2][:250], longest - 250)
        assert engine.core.stats()["kv_offload_jobs_dropped"] > 0
        for store in stores:
            store.ranks[0].holds_all = False
        engine.settle()


# What is told.


@pytest.mark.parametrize("order", [1, -1])
def test_an_answer_names_the_longest_boundary_and_what_each_child_says(order: int) -> None:
    children = [NULL, store_child(MemoryStore()), store_child(MemoryStore(), max_store_backlog_bytes=1)][::order]
    with MultiEngine(*children) as engine:
        request = engine.send(PROMPTS[1], 5, kv_transfer_params={"do_remote_decode": True})
        assert request.kv_transfer_answer == {
            "do_remote_prefill": True,
            "stored_boundary": 96,
            "connectors": [
                None,
                {"do_remote_prefill": True, "stored_boundary": 96},
                {"do_remote_prefill": True, "stored_boundary": 0},
            ][::order],
        }
        engine.settle()
    with MultiEngine(NULL) as engine:
        assert engine.send(PROMPTS[1], 5, kv_transfer_params={"do_remote_decode": True}).kv_transfer_answer == {
            "stored_boundary": 0
        }


def test_an_answer_waits_for_the_last_child_that_holds_it() -> None:
    slow = Unruly(MemoryStore())
    with MultiEngine(store_child(MemoryStore()), slow.child(), setup={"job_timeout_s": 1000}) as engine:
        slow.ranks[0].holds_all = True
        request = engine.request(PROMPTS[1], 3, kv_transfer_params={"do_remote_decode": True})
        engine.core.add_request(request)
        for _ in range(20):
            assert not any(update.finished for update in engine.core.step())
        slow.ranks[0].holds_all = False
        assert [update.request for update in engine.run() if update.finished] == [request]
        assert request.kv_transfer_answer is not None
        assert [said["stored_boundary"] for said in request.kv_transfer_answer["connectors"]] == [96, 96]
        engine.settle()


def test_counters_say_what_all_children_did_and_what_each_of_them() -> None:
    nested = {"connectors": [NULL, store_child(MemoryStore()), NULL]}
    inner = {"kv_connector": "MultiConnector", "kv_connector_extra_config": nested}
    with MultiEngine(store_child(MemoryStore()), inner, world_size=2) as engine:
        for prompt in PROMPTS:
            engine.send(prompt, 5)
        engine.settle()
        stats = engine.core.stats()
        for name in ("kv_offload_jobs", "kv_offload_store_bytes", "kv_offload_store_objects", "kv_store_objects"):
            parts = [stats[f"kv_connector_{index}_{name}"] for index in range(2)]
            assert parts[0] == parts[1] == stats[f"kv_connector_1_kv_connector_1_{name}"] > 0
            assert stats[name] == sum(parts)
        assert stats["kv_connector_errors"] == stats["kv_connector_worker_errors"] == 0
        assert not any(name.startswith("kv_connector_1_kv_connector_0_kv_o") for name in stats)
        assert not any(name.startswith("kv_connector_2") for name in stats)


def test_a_reset_empties_every_store_and_says_whether_it_could() -> None:
    stores = [MemoryStore(), MemoryStore()]
    with MultiEngine(*map(store_child, stores)) as engine:
        engine.send(PROMPTS[2], 5)
        engine.settle()
        assert engine.core.reset_prefix_cache(reset_external=True)
        engine.settle()
        assert not any(map(contents, stores))
        assert engine.send(PROMPTS[2], 5).num_cached_tokens == 0
        engine.settle()
        assert engine.core.reset_prefix_cache()
        assert engine.send(PROMPTS[2], 5).num_cached_tokens == 256
        engine.settle()
