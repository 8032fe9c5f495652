"""SCENARIOS, sections C, D, F and H: what goes to a store and what comes back from it."""

import pytest

from dalsegno.request import FinishReason
from dalsegno.sampling_params import SamplingParams
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from dalsegno.testing.fake_worker import expected_prompt_logprobs
from tests.connector.engines import VOCABULARY, StoreEngine
from tests.scenarios.toy import B, H
from tests.scenarios.toy import random_prompt as wide_prompt


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return [token % VOCABULARY for token in wide_prompt(n, seed)]


def boundaries(store: MemoryStore, part: str) -> set[int]:
    return {key.boundary for key in store._entries if key.part == part}


def engine_on(store: object, **options: object) -> StoreEngine:
    return StoreEngine(store, **{"block_size": B, "hash_block_size": H, **options})  # type: ignore[arg-type]


def test_a_boundary_without_a_state_is_not_put_and_a_later_lookup_stops_earlier() -> None:
    """29: 5 blocks in chunks of 2; states are put only where one was kept, and none is all zeros."""
    store, prompt = MemoryStore(), prompt_of(5 * B)
    with engine_on(store, budget=2 * B) as engine:
        request = engine.send(prompt)
        engine.settle()
    states = boundaries(store, "state")
    assert states == {5 * B - H, 5 * B}
    assert request.num_states_kept == len(states)
    assert all(any(entry.payload[-8:]) for entry in store._entries.values())
    with engine_on(store) as engine:
        assert engine.send([*prompt[: 4 * B], *prompt_of(40, 1)]).num_cached_tokens == 0


@pytest.mark.parametrize("total", [2 * B, 2 * B + H, 3 * B])
@pytest.mark.parametrize("max_tokens", [1, 2, 30])
def test_the_last_sampled_token_is_never_stored(total: int, max_tokens: int) -> None:
    """31: n + k is a multiple of B or H; nothing past n + k - 1 was computed."""
    store = MemoryStore()
    with engine_on(store) as engine:
        request = engine.send(prompt_of(total - max_tokens), max_tokens)
        engine.settle()
    assert max(boundaries(store, "attention") | boundaries(store, "state")) == (total - 1) // H * H
    with engine_on(store) as engine:
        turn = [*request.token_ids.tolist(), 5, 6]
        assert engine.send(turn, 20).num_cached_tokens == (total - 1) // H * H
        engine.settle()


@pytest.mark.parametrize("num_steps", range(7))
def test_an_abort_at_every_step_of_a_prefill_stores_nothing_that_was_not_computed(num_steps: int) -> None:
    """34"""
    store, prompt = MemoryStore(), prompt_of(5 * B - 3)
    with engine_on(store, budget=B) as engine:
        request = engine.request(prompt, 3)
        engine.core.add_request(request)
        for _ in range(num_steps):
            engine.core.step()
        computed = request.num_computed_tokens
        engine.core.abort(request.request_id)
        engine.run()
        engine.settle()
    assert max(boundaries(store, "attention") | boundaries(store, "state") | {0}) <= computed
    with engine_on(store) as engine:
        engine.send(prompt, 5)
        engine.settle()


@pytest.mark.parametrize("fault", [None, Fault.GET_SHORT])
def test_a_hit_inside_a_block_reads_nothing_behind_it(fault: Fault | None) -> None:
    """38: 48 of 64 tokens come from the store; freed memory is poisoned, so what is behind them would show."""
    store, prompt = MemoryStore(), prompt_of(50)
    with engine_on(store) as engine:
        engine.send(prompt)
        engine.settle()
    with engine_on(FaultyStore(store, rates={fault: 1.0} if fault else {})) as engine:
        engine.send(prompt_of(300, 1), 3)
        engine.core.reset_prefix_cache()
        assert engine.send([*prompt, 1], 20).num_cached_tokens == (0 if fault else 48)
        engine.settle()


@pytest.mark.parametrize("extra", [0, 1])
def test_a_state_at_the_prompts_end_serves_an_extension_and_no_resend(extra: int) -> None:
    """42, 45: each token is applied to a state once; loads never fail."""
    store, prompt = MemoryStore(), prompt_of(B)
    with engine_on(store) as engine:
        engine.send(prompt)
        engine.settle()
    with engine_on(store) as engine:
        request = engine.send([*prompt, *[1] * extra], 5)
        hit = B if extra else B - H
        assert request.num_cached_tokens == hit
        assert engine.worker.num_computed[request.request_id] == B + extra - hit + 4
        assert engine.core.stats()["kv_load_failures"] == 0
        engine.settle()


@pytest.mark.parametrize("number", range(4))
def test_one_failed_read_costs_its_request_only_what_was_lost(number: int) -> None:
    """51, 53, 55: the others go on, and with no other traffic the engine does not sleep."""
    store, shared = MemoryStore(), prompt_of(20 * B)
    with engine_on(store) as engine:
        engine.send(shared)
        engine.settle()
    faulty = FaultyStore(store, at={number: Fault.GET_MISS})
    with engine_on(faulty) as engine:
        requests = [engine.request([*shared, n], 10) for n in (1, 2)] + [engine.request(prompt_of(100, 9), 10)]
        for request in requests:
            engine.core.add_request(request)
        engine.run()
        for request in requests:
            assert request.finish_reason is FinishReason.LENGTH
            prompt = request.token_ids[: request.num_prompt_tokens].tolist()
            assert request.output_token_ids == engine.expected(prompt, 10)
        engine.settle()
        assert engine.core.stats()["kv_load_failures"] <= 1


def test_a_request_that_needs_every_prompt_token_takes_no_hit_and_is_stored() -> None:
    """58"""
    store, prompt = MemoryStore(), prompt_of(100)
    with engine_on(store) as engine:
        engine.send(prompt, 1)
        engine.settle()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
        asked = engine.send([*prompt, *prompt_of(60, 1)], params=params)
        assert (asked.num_cached_tokens, len(asked.prompt_logprobs)) == (0, 159)
        known = [*prompt, *prompt_of(60, 1)]
        assert asked.prompt_logprobs == expected_prompt_logprobs(engine.layout, known, 2, VOCABULARY)
        engine.settle()
    with engine_on(store) as engine:
        assert engine.send([*known, 1]).num_cached_tokens == 160


def test_two_engines_that_store_one_prompt_at_once_are_both_right() -> None:
    """67: what exists already counts as stored."""
    store, prompt = MemoryStore(), prompt_of(200)
    with engine_on(store) as one, engine_on(store) as other:
        for engine in (one, other):
            engine.core.add_request(engine.request(prompt, 20))
        while one.core.has_unfinished_requests or other.core.has_unfinished_requests:
            for engine in (one, other):
                if engine.core.has_unfinished_requests:
                    engine.core.step()
        for engine in (one, other):
            engine.settle()
            assert engine.core.stats()["kv_offload_jobs_incomplete"] == 0
    with engine_on(store) as engine:
        assert engine.send(prompt, 20).num_cached_tokens == 192


def test_a_hole_left_by_a_rejected_put_is_filled_by_a_later_turn() -> None:
    """68: the others of its batch are stored, the hit stops at the hole until then."""
    prompt = prompt_of(10 * B + 5)
    faulty = FaultyStore(MemoryStore(), at={0: Fault.PUT_LAST_NO_ROOM})
    with engine_on(faulty, role="kv_producer", store_block_size=B, pressure_pause_s=1e-6) as engine:
        engine.send(prompt)
        engine.settle()
        assert engine.core.stats()["kv_offload_allocation_failure"] == 1
        engine.send([*prompt, 1, 2, *prompt_of(50, 3)])
        engine.settle()
    with engine_on(faulty.inner, store_block_size=B) as engine:
        assert engine.send([*prompt, 1, 2, *prompt_of(50, 3), 7]).num_cached_tokens == 10 * B + 3 * H


def test_a_store_that_lost_everything_costs_clean_misses_and_takes_puts_again() -> None:
    """69"""
    store, prompt = MemoryStore(), prompt_of(200)
    with engine_on(store) as engine:
        engine.send(prompt, 5)
        engine.settle()
        store.clear()
        engine.core.reset_prefix_cache()
        assert engine.send(prompt, 5).num_cached_tokens == 0
        engine.settle()


def test_a_reset_with_the_store_misses_both_and_leaves_another_namespace_alone() -> None:
    """80"""
    store, prompt = MemoryStore(), prompt_of(200)
    with engine_on(store, cache_prefix="other") as engine:
        engine.send(prompt, 5)
        engine.settle()
    with engine_on(store) as engine:
        running = engine.send(prompt, 5)
        engine.core.add_request(engine.request([*prompt, 1], 30))
        engine.core.step()
        assert not engine.core.reset_prefix_cache(reset_external=True)
        engine.run()
        assert engine.core.reset_prefix_cache(reset_external=True)
        engine.settle()
        assert engine.send(running.token_ids.tolist(), 5).num_cached_tokens == 0
        engine.settle()
    with engine_on(store, cache_prefix="other") as engine:
        assert engine.send(prompt, 5).num_cached_tokens == 192
