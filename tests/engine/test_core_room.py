"""Room: what is advertised is exactly enough, one slab less is refused at once, and nothing waits for ever (R9)."""

import itertools
import random
from typing import Any

import pytest

from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore
from dalsegno.errors import OptionError, RequestError
from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.tables import ComputedBlocks, RequestBlocks
from dalsegno.request import Request
from dalsegno.testing.builders import layout_alone, make_core, make_cut, make_layout, make_request, run_all, steps
from dalsegno.testing.fake_worker import FakeWorker, expected_tokens

MAX_MODEL_LEN = 300
CUTS = [(1, 1, 1), (4, 2, 1), (1, 3, 8), (3, 6, 1), (6, 4, 2)]
KINDS = ["a", "s", "as", "aw", "ws", "aws"]


def exact(
    kinds: str,
    cut: tuple[int, ...],
    config: CacheConfig,
    *,
    budget: int,
    window: int = 100,
    max_model_len: int = MAX_MODEL_LEN,
) -> MemoryLayout:
    """A layout of just the slabs that one request of `max_model_len` tokens needs."""
    layout = make_cut(kinds, cut[: len(kinds)], block_size=config.block_size, window=window)
    return layout.with_slabs(layout_alone(layout, config, max_model_len=max_model_len, budget=budget))


def assert_right(core: EngineCore, *requests: Request) -> None:
    assert isinstance(core.worker, FakeWorker)
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        assert request.num_output_tokens == request.max_tokens
        assert request.output_token_ids == expected_tokens(
            core.layout, prompt, request.max_tokens, core.worker.vocab_size, request.sample_index
        )
    core.verify()


@pytest.mark.parametrize("budget", [7, 24, 1000])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kinds", KINDS)
def test_exactly_the_advertised_need_is_enough(kinds: str, cut: tuple[int, ...], budget: int) -> None:
    """SCENARIOS 23: the copy target and the second state are in it, for every shape, cold and with every hit."""
    config = CacheConfig(block_size=32, decode_checkpoint_interval=32, prefix_cache_retention_interval=64)
    core = make_core(exact(kinds, cut, config, budget=budget), config, max_model_len=MAX_MODEL_LEN, budget=budget)
    prompt = list(range(MAX_MODEL_LEN - 1))
    for n in (299, 299, 40, 200, 299, 17, 265):
        request = make_request("r", [*prompt[: n - n % 7], *[500 + n] * (n % 7)], MAX_MODEL_LEN - n)
        run_all(core, [request])
        assert_right(core, request)
        # At most one start over: a request that found itself alone without room cannot run out of it again.
        assert request.num_preemptions <= 1


@pytest.mark.parametrize("budget", [7, 24, 1000])
@pytest.mark.parametrize("kinds", KINDS)
def test_with_one_block_per_slab_a_request_alone_is_never_preempted(kinds: str, budget: int) -> None:
    """The classic uniform pool: no slab can be held for the sake of half of it."""
    config = CacheConfig(block_size=32)
    core = make_core(exact(kinds, (1, 1, 1), config, budget=budget), config, max_model_len=MAX_MODEL_LEN, budget=budget)
    for n in (299, 40, 299, 200, 150, 299):
        request = make_request("r", range(n), MAX_MODEL_LEN - n)
        run_all(core, [request])
        assert_right(core, request)
    assert core.stats()["num_preemptions"] == 0


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kinds", KINDS)
def test_one_slab_less_is_refused_at_once_with_the_values_to_change(kinds: str, cut: tuple[int, ...]) -> None:
    config = CacheConfig(block_size=32)
    layout = exact(kinds, cut, config, budget=64)
    less = layout.with_slabs(layout.num_slabs - 1)
    with pytest.raises(OptionError) as caught:
        make_core(less, config, max_model_len=MAX_MODEL_LEN, budget=64)
    for value in (
        f"max_model_len={MAX_MODEL_LEN}",
        f"needs {layout.num_slabs} slabs",
        f"holds {less.num_slabs}",
        f"kv_cache_memory_bytes to at least {layout.total_bytes}",
    ):
        assert value in str(caught.value)


@pytest.mark.parametrize("window", [20, 40, 100])
@pytest.mark.parametrize("budget", [16, 24])
@pytest.mark.parametrize("cut", list(itertools.product([3, 4], [4, 6])))
def test_a_window_that_straddles_slabs_does_not_stop_its_request(
    cut: tuple[int, int], budget: int, window: int
) -> None:
    """A window's blocks slide over slab ends and can hold one slab more than they fill."""
    config = CacheConfig(block_size=32)
    layout = exact("aw", cut, config, budget=budget, window=window)
    core = make_core(layout, config, max_model_len=MAX_MODEL_LEN, budget=budget)
    run_all(core, [request := make_request("r", range(299), 1)])
    assert_right(core, request)


def test_a_request_that_starts_over_packed_has_the_engine_to_itself() -> None:
    config = CacheConfig(block_size=32)
    layout = exact("aw", (3, 6), config, budget=16)
    core = make_core(layout, config, max_model_len=MAX_MODEL_LEN, budget=16)
    requests = [make_request("long", range(299), 1), make_request("short", range(500, 520), 5, n=2)]
    for request in requests:
        core.add_request(request)
    beside = set()
    for _ in steps(core):
        running = core.scheduler.running
        if any(request.packed for request in running):
            beside.add(len(running))
    assert beside == {1}
    assert requests[0].num_preemptions == 1
    assert_right(core, *requests)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("times", [1, 2])
def test_many_requests_that_each_fit_alone_all_finish(times: int, cut: tuple[int, ...], policy: str) -> None:
    config = CacheConfig(block_size=32)
    layout = exact("aws", cut, config, budget=48, window=40)
    core = make_core(
        layout.with_slabs(1 + times * (layout.num_slabs - 1)),
        config,
        max_model_len=MAX_MODEL_LEN,
        budget=48,
        policy=policy,
    )
    rng = random.Random(times)
    shared = [rng.randrange(50) for _ in range(200)]
    requests = []
    for number in range(12):
        n = rng.randrange(1, 250)
        prompt = shared[: rng.randrange(n)] + [rng.randrange(50) for _ in range(n)]
        prompt = prompt[:n]
        requests.append(
            make_request(
                f"r{number}", prompt, min(rng.choice([1, 20, 300]), MAX_MODEL_LEN - n), priority=rng.randrange(3)
            )
        )
    run_all(core, requests)
    assert_right(core, *requests)


@pytest.mark.parametrize("longest", [0, 16, 40, 63])
def test_a_hit_that_is_in_the_way_is_shortened_and_charged_to_room(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit is never a reason to wait: alone, the next shorter boundaries are tried, and at last none."""
    core = make_core(max_model_len=MAX_MODEL_LEN)
    run_all(core, [make_request("first", range(100), checkpoint_at=(20, 35, 70))])
    allocate = core.manager.allocate_slots

    def no_room_behind_long_hits(
        request: Request, new_tokens: int, computed: ComputedBlocks | None = None, **options: Any
    ) -> RequestBlocks | None:
        if computed is not None and computed.boundary > longest:
            return None
        return allocate(request, new_tokens, computed, **options)

    monkeypatch.setattr(core.manager, "allocate_slots", no_room_behind_long_hits)
    run_all(core, [resend := make_request("resend", range(100), 5)])
    boundary = max(kept for kept in (0, 16, 32, 64, 96) if kept <= longest)
    assert resend.num_cached_tokens == boundary
    assert resend.hit_report.lost == {"no_room": 96 - boundary, "sub_unit": 4}
    assert core.stats()["prefix_cache_lost_tokens_no_room"] == 96 - boundary
    assert_right(core, resend)


def test_a_hit_is_not_shortened_while_others_run_and_will_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(max_model_len=MAX_MODEL_LEN)
    run_all(core, [make_request("first", range(100))])
    allocate = core.manager.allocate_slots
    busy = make_request("busy", range(500, 520), 20)

    def no_room_beside_the_busy_one(
        request: Request, new_tokens: int, computed: ComputedBlocks | None = None, **options: Any
    ) -> RequestBlocks | None:
        if request is not busy and busy in core.scheduler.running:
            return None
        return allocate(request, new_tokens, computed, **options)

    monkeypatch.setattr(core.manager, "allocate_slots", no_room_beside_the_busy_one)
    run_all(core, [busy, resend := make_request("resend", range(100), 5)])
    assert resend.num_cached_tokens == 96


@pytest.mark.parametrize("n", [0, 300, 301, 5000])
def test_a_prompt_that_can_never_fit_is_refused_at_once_and_costs_nothing(n: int) -> None:
    core = make_core(max_model_len=300)
    with pytest.raises(RequestError, match="empty" if n == 0 else f"{n} tokens; at most 299"):
        core.add_request(make_request("bad", range(n), 1))
    assert not core.has_unfinished_requests
    run_all(core, [good := make_request("good", range(299), 1)])
    assert_right(core, good)


@pytest.mark.parametrize("block_size", [16, 64, 1024])
def test_large_blocks_over_a_small_unit_hit_as_small_ones_do(block_size: int) -> None:
    """SCENARIOS 8: a block longer than any request still serves hits."""
    config = CacheConfig(block_size=block_size)
    core = make_core(make_layout("as", config, num_slabs=300), config, max_model_len=300)
    for n in (40, 100, 250):
        prompt = [*range(n - 20), *[n] * 20]
        run_all(core, [make_request("r", prompt)])
        run_all(core, [again := make_request("again", prompt)])
        assert again.num_cached_tokens == (n - 1) // 16 * 16
        assert_right(core, again)
