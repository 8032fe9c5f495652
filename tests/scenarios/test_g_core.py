"""SCENARIOS, section G: pressure and eviction."""

import random

import pytest

from dalsegno.config import CacheConfig
from dalsegno.request import FinishReason, Request
from dalsegno.testing.builders import layout_alone, make_cut, run_all, steps
from tests.kv.driver import snapshot
from tests.scenarios.toy import B, Toy, random_prompt


@pytest.mark.parametrize("refusing", ["fits", "allocate"])
def test_an_admission_that_fails_takes_nothing_with_it(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """77: a slot leaked when admission failed after a copy was made. Here the hit is pinned and its copy is due."""
    toy = Toy(num_slabs=60)
    prompt = random_prompt(200)
    toy.send(prompt, checkpoint_at=(90,))
    manager = toy.core.manager
    request = toy.request([*prompt[:150], 1, 2, 3], 3)
    manager.start_request(request)
    computed, boundary, _ = manager.get_computed_blocks(request)
    assert boundary % B == 16, "the hit ends inside a block"
    before = snapshot(manager)
    with monkeypatch.context() as patch:
        patch.setattr(manager.pool, refusing, lambda *_: None)
        for _ in range(3):
            assert manager.allocate_slots(request, 9, computed) is None
            assert snapshot(manager) == before
    toy.send_all(request)


@pytest.mark.parametrize("held", ["attention", "state"])
def test_eviction_around_blocks_that_one_group_alone_holds_keeps_every_count(held: str) -> None:
    """77: eviction met a node that was locked for one group only."""
    toy = Toy(layout=make_cut("as", [2, 2], block_size=B, num_slabs=14), max_model_len=300)
    prompt = random_prompt(200)
    toy.send(prompt)
    manager = toy.core.manager
    probe = toy.request(prompt)
    manager.start_request(probe)
    group = 0 if held == "attention" else 1
    block = manager.index.find(group, probe.root_hash, probe.block_hashes, 12 * 16)
    manager.pins.pin(group, block)
    for seed in range(6):
        run_unchecked(toy, toy.request(random_prompt(250, seed), 20))
        manager.verify()
        assert manager.index.is_published(group, block)
    manager.pins.unpin([(group, block)])
    manager.verify()
    toy.send(prompt, 5)


def run_unchecked(toy: Toy, request: Request) -> None:
    """Serve a request while somebody holds a block from outside, so that the engine is never idle."""
    toy.core._debug = False
    toy.core.add_request(request)
    for _ in steps(toy.core):
        toy.core.manager.verify()
    toy.core._debug = True
    assert request.output_token_ids == toy.cold(request)
    toy.learn(request)


@pytest.mark.parametrize("cut", [(1, 1), (4, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_fifty_requests_through_a_pool_of_hardly_more_than_one_all_end_right(seed: int, cut: tuple[int, int]) -> None:
    """30 and 77: many requests, few blocks, the counts checked after every step."""
    config = CacheConfig(block_size=B)
    layout = make_cut("as", cut, block_size=B)
    need = layout_alone(layout, config, max_model_len=260, budget=100)
    toy = Toy(layout=layout.with_slabs(need + seed), config=config, max_model_len=260, budget=100)
    rng = random.Random(seed)
    base = random_prompt(230, seed)
    requests = []
    for _ in range(50):
        prompt = base[: rng.randrange(1, 200)] + random_prompt(rng.randrange(30), rng.randrange(10**6))
        requests.append(toy.request(prompt, rng.randrange(1, 30)))
        toy.core.add_request(requests[-1])
        for _ in range(rng.randrange(6)):
            toy.core.step()
    run_all(toy.core)
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
    toy.check(*requests)
