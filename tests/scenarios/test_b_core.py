"""SCENARIOS, section B: wrong output on a local hit."""

import itertools

import pytest

from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore
from dalsegno.request import FinishReason
from dalsegno.testing.builders import layout_alone, make_cut, run_all, steps
from dalsegno.types import ScheduledRequest, StepPlan, StepResult
from tests.engine.core_workload import quiet_log
from tests.scenarios.toy import B, H, Toy, random_prompt


@pytest.mark.parametrize("budget", [1, 7, 15, 16, 17, 33, 40, 50, 63, 64])
def test_states_at_odd_chunk_ends_are_filed_under_no_boundary_but_their_own(budget: int) -> None:
    """15: two prompts compete for the budget, so chunks end anywhere; a chunk ended at 364 became "state at 1600"."""
    toy = Toy(budget=budget)
    prompts = [random_prompt(int(1.3 * B), seed) for seed in (1, 2)]
    toy.send_all(*(toy.request(prompt, 5) for prompt in prompts))
    for prompt in prompts:
        resend = toy.send(prompt, 5)
        assert resend.num_cached_tokens == (len(prompt) - 1) // H * H
        assert len(set(resend.hit_report.boundary_by_group.values())) == 1


@pytest.mark.parametrize("at", range(1, 7))
def test_an_abort_before_the_worker_ran_leaves_nothing_to_hit(at: int) -> None:
    """16: hashes published at schedule time, the step that writes them never ran, and the retry read garbage."""
    toy = Toy(budget=32)
    prompt = random_prompt(170)
    toy.core.add_request(toy.request(prompt, request_id="producer"))
    for _ in range(at - 1):
        toy.core.step()
    written = 32 * (at - 1)
    plan = toy.core.scheduler.schedule()
    assert plan is not None
    toy.core.scheduler.fail(plan, None, 0.0)
    toy.core.scheduler.finish("producer", FinishReason.ABORT, 0.0)
    assert toy.hit(prompt) <= written
    retry = toy.send(prompt, 10)
    assert retry.num_cached_tokens is not None
    assert retry.num_cached_tokens <= written


@pytest.mark.parametrize("order", list(itertools.permutations([37, 64, 91])))
def test_requests_of_one_batch_each_keep_their_own_state(order: tuple[int, ...]) -> None:
    """19: the state was picked at the wrong row when several prompts shared a prefill batch."""
    toy = Toy()
    requests = toy.send_all(*(toy.request(random_prompt(n), 4) for n in order))
    assert {request.first_token_time for request in requests} == {1.0}
    for n in order:
        assert toy.send(random_prompt(n), 4).num_cached_tokens == (n - 1) // H * H


def test_a_tails_boundary_stays_valid_while_its_block_fills() -> None:
    """21: the key of a tail was registered again and again after its block had grown full."""
    toy = Toy()
    prompt = random_prompt(40)
    request = toy.request(prompt, 60)
    toy.core.add_request(request)
    for _ in steps(toy.core):
        assert toy.hit(prompt) == 32
        assert toy.hit([*prompt[:33], 1, 2, 3]) == 32
        tail = toy.core.manager.index.find(0, request.root_hash, request.block_hashes, 2 * H)
        assert [boundary for boundary, _ in toy.core.manager.index.vouched(0, tail)] == [
            p for p in range(H, B + 1, H) if p <= request.num_computed_tokens
        ]
    toy.check(request)


@pytest.mark.parametrize("n", [63, 64, 65, 130])
def test_the_advertised_need_includes_the_copy_a_hit_takes(n: int) -> None:
    """23a: admission forgot the block a partial snapshot takes, and failed in the middle of a step."""
    config = CacheConfig(block_size=B)
    layout = make_cut("as", [1, 1], block_size=B)
    need = layout_alone(layout, config, max_model_len=150, budget=2048)
    toy = Toy(layout=layout.with_slabs(need), config=config, max_model_len=150)
    prompt = random_prompt(n)
    toy.send(prompt, 150 - n)
    for _ in range(3):
        assert toy.send(prompt, 150 - n).num_preemptions == 0


def test_an_id_used_a_thousand_times_leaves_nothing_behind_and_keeps_its_tail_each_time() -> None:
    """23b: bookkeeping of an earlier request of the same id made a later one skip its tail."""
    toy = Toy(num_slabs=60)
    for turn in range(1000):
        prompt = [turn, *range(36)]
        toy.send(prompt, 1 + turn % 3, request_id="the same")
        assert toy.hit(prompt) == 32
        assert not toy.core.manager.requests


@pytest.mark.parametrize("held_by", ["nobody", "its owner", "another hit"])
def test_a_published_block_is_copied_and_not_taken_over(held_by: str) -> None:
    """24: "take over instead of copy when nobody else holds it" forgets that the block is still registered."""
    toy = Toy()
    prompt = random_prompt(40)
    request = toy.request(prompt, 30)
    if held_by == "its owner":
        toy.core.add_request(request)
        toy.core.step()
    else:
        toy.send(prompt)
    first, second = (toy.request([*prompt, *random_prompt(9, seed)], 20) for seed in (1, 2))
    hits = [first, second] if held_by == "another hit" else [first]
    for hit in hits:
        toy.core.add_request(hit)
    plan = toy.core.scheduler.schedule()
    assert plan is not None
    source = toy.core.manager.index.find(0, first.root_hash, first.block_hashes, 2 * H)
    assert [(copy.source, copy.num_tokens) for copy in plan.copies] == [(source, 32)] * len(hits)
    assert source not in {copy.target for copy in plan.copies}
    toy.core.scheduler.commit(plan, toy.worker.execute(plan), 0.0)
    run_all(toy.core)
    toy.check(*hits, request)


class CopiesLast:
    """A worker that lets the forward run before the copies."""

    def __init__(self, core: EngineCore) -> None:
        self.execute_plan = core.worker.execute

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.execute_plan(StepPlan(plan.step_id, plan.requests, ()))
        self.execute_plan(StepPlan(plan.step_id, (), plan.copies))
        return result


def test_a_worker_that_copies_after_the_forward_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """25: the order inside a step is fixed, and the checks see it when it is not kept."""
    toy = Toy()
    prompt = random_prompt(40)
    toy.send(prompt)
    monkeypatch.setattr(toy.core.worker, "execute", CopiesLast(toy.core).execute)
    request = toy.request([*prompt, 5, 6], 3)
    toy.core.add_request(request)
    with quiet_log():
        for _ in steps(toy.core):
            pass
    assert "poisoned" in (request.error or "")


def test_a_copy_source_is_not_reused_before_its_copy_has_run() -> None:
    """25: a freed source was handed out again in the step that still copied from it."""
    layout = make_cut("as", [1, 1], block_size=B, num_slabs=7)
    toy = Toy(layout=layout, max_model_len=150)
    prompt = random_prompt(40)
    toy.send(prompt)
    extension, filler = toy.request([*prompt, *random_prompt(20, 1)], 3), toy.request(random_prompt(60, 2), 3)

    def sources_are_held(plan: StepPlan) -> None:
        written = {block for part in plan.requests for block in written_blocks(part)}
        for copy in plan.copies:
            assert toy.core.manager.pool.num_references(copy.group_id, copy.source) > 0
            assert (copy.group_id, copy.source) not in written

    toy.worker.before_step = sources_are_held
    toy.send_all(extension, filler)
    assert extension.num_cached_tokens == 32


def written_blocks(part: ScheduledRequest) -> list[tuple[int, int]]:
    """(group, block) of every attention block a request's part of a step writes tokens to."""
    return [(0, part.block_tables[0][token // B]) for token in range(part.start, part.end)]
