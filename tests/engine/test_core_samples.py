"""Several samples of one prompt: one prefill, shared blocks, answers that do not depend on each other."""

import pytest

from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore
from dalsegno.request import FinishReason, Request
from dalsegno.sampling_params import SamplingParams
from dalsegno.testing.builders import layout_alone, make_core, make_cut, make_request, run_all, steps
from dalsegno.testing.fake_worker import FakeWorker, expected_tokens

UNIT = 16


def engine(
    kinds: str = "as",
    *,
    block_size: int = 2 * UNIT,
    num_slabs: int = 200,
    max_model_len: int = 300,
    max_num_seqs: int = 64,
) -> EngineCore:
    config = CacheConfig(block_size=block_size)
    layout = make_cut(kinds, [1] * len(kinds), block_size=block_size, num_slabs=num_slabs)
    return make_core(layout, config, max_model_len=max_model_len, max_num_seqs=max_num_seqs)


def samples_of(request: Request) -> list[Request]:
    return [request, *request.siblings]


def assert_right(core: EngineCore, samples: list[Request]) -> None:
    assert isinstance(core.worker, FakeWorker)
    for sample in samples:
        prompt = sample.token_ids[: sample.num_prompt_tokens].tolist()
        assert sample.output_token_ids == expected_tokens(
            core.layout, prompt, sample.num_output_tokens, core.worker.vocab_size, sample.sample_index
        )
    core.verify()


@pytest.mark.parametrize("n", [2, 3, 9])
@pytest.mark.parametrize("num_prompt", [5, 31, 32, 33, 64, 77])
@pytest.mark.parametrize("kinds", ["a", "s", "as", "aws"])
def test_a_prompt_is_prefilled_once_for_all_its_samples(kinds: str, num_prompt: int, n: int) -> None:
    core = engine(kinds)
    samples = samples_of(request := make_request("r", range(num_prompt), 40, n=n))
    run_all(core, [request])
    assert [sample.num_prefilled_tokens for sample in samples] == [num_prompt] + [0] * (n - 1)
    assert core.stats()["num_prefilled_tokens"] == core.stats()["prompt_tokens"] == num_prompt
    assert {sample.num_output_tokens for sample in samples} == {40}
    assert len({tuple(sample.output_token_ids) for sample in samples}) == n, "samples answer alike"
    assert_right(core, samples)


def test_samples_share_full_blocks_and_the_state_and_own_their_tails() -> None:
    core = engine()
    request = make_request("r", range(70), 10, n=3)
    samples = samples_of(request)
    core.add_request(request)
    core.step()
    tables = [core.manager.block_tables(sample)[0] for sample in samples]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    states = [core.manager.requests[sample.request_id].state for sample in samples]
    assert len({state.current for state in states if state is not None}) == 1
    core.step()
    assert len({state.current for state in states if state is not None}) == 3
    run_all(core)
    assert_right(core, samples)


def test_the_state_all_samples_read_is_written_by_none() -> None:
    """A prompt of whole units leaves its state published: it must outlive all of its samples unchanged."""
    core = engine()
    samples = samples_of(request := make_request("r", range(64), 30, n=4))
    run_all(core, [request])
    assert_right(core, samples)
    after = make_request("after", [*range(64), 1, 2], 20)
    run_all(core, [after])
    assert after.num_cached_tokens == 64
    assert_right(core, [after])


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_samples_beyond_the_limit_wait_and_find_the_prompt_cached(max_num_seqs: int) -> None:
    core = engine(max_num_seqs=max_num_seqs)
    samples = samples_of(request := make_request("r", range(70), 12, n=5))
    core.add_request(request)
    for _ in steps(core):
        assert len(core.scheduler.running) <= max_num_seqs
    assert_right(core, samples)
    # Who could not start beside the first resumes behind the prompt's last boundary.
    assert [sample.num_prefilled_tokens for sample in samples[max_num_seqs:]] == [70 + 1 - 64] * (5 - max_num_seqs)


@pytest.mark.parametrize("extra", range(8))
def test_samples_without_room_to_fork_wait_their_turn(extra: int) -> None:
    config = CacheConfig(block_size=32)
    layout = make_cut("as", [1, 1], block_size=32)
    need = layout_alone(layout, config, max_model_len=120, budget=64)
    core = make_core(layout.with_slabs(need + extra), config, max_model_len=120, budget=64)
    samples = samples_of(request := make_request("r", range(70), 50, n=4))
    run_all(core, [request])
    assert {sample.finish_reason for sample in samples} == {FinishReason.LENGTH}
    assert_right(core, samples)


def test_samples_are_counted_as_hits_once_and_report_the_hit_of_the_first() -> None:
    core = engine()
    run_all(core, [make_request("before", range(70))])
    before = core.stats()
    samples = samples_of(request := make_request("r", range(70), 5, n=4))
    run_all(core, [request])
    assert [sample.num_cached_tokens for sample in samples] == [64] * 4
    assert core.stats()["prefix_cache_hits"] - before.get("prefix_cache_hits", 0) == 64
    assert core.stats()["prompt_tokens"] - before["prompt_tokens"] == 70


def test_samples_that_end_with_their_first_token_leave_nothing_behind() -> None:
    core = engine()
    samples = samples_of(request := make_request("r", range(70), 1, n=5))
    updates = run_all(core, [request])
    assert sorted(update.request.request_id for update in updates if update.finished) == sorted(
        sample.request_id for sample in samples
    )
    assert_right(core, samples)


def test_one_sample_may_end_long_before_the_others() -> None:
    core = engine()
    first = expected_tokens(core.layout, range(70), 3, 997, sample=1)
    params = SamplingParams(temperature=0, max_tokens=30, n=3, stop_token_ids=[first[2]])
    samples = samples_of(request := make_request("r", range(70), 30, n=3, params=params))
    run_all(core, [request])
    assert samples[1].finish_reason is FinishReason.STOP
    assert samples[1].stop_reason == first[2]
    assert samples[1].output_token_ids == first
    assert_right(core, samples)


def test_a_sample_that_waits_for_the_prefill_can_be_aborted_alone() -> None:
    core = make_core(max_model_len=300, budget=16)
    samples = samples_of(request := make_request("r", range(70), 5, n=3))
    core.add_request(request)
    core.step()
    core.abort("r#1")
    run_all(core)
    assert [sample.finish_reason for sample in samples] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]
    assert samples[1].output_token_ids == []
    assert_right(core, samples)


def test_all_samples_of_a_prompt_that_is_aborted_before_its_prefill_end() -> None:
    core = make_core(max_model_len=300, budget=16)
    samples = samples_of(request := make_request("r", range(70), 5, n=3))
    core.add_request(request)
    core.step()
    core.abort("r")
    updates = core.step()
    assert {update.request.request_id for update in updates} == {"r", "r#1", "r#2"}
    assert {sample.finish_reason for sample in samples} == {FinishReason.ABORT}
    assert not core.has_unfinished_requests
    core.verify()
