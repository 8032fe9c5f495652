"""What the scheduler promises holds while it retries, too."""

import pytest

from dalsegno.errors import RequestError
from dalsegno.request import FinishReason
from dalsegno.testing.builders import make_core, make_request, run_all
from dalsegno.testing.fake_worker import FakeWorker, expected_tokens
from dalsegno.types import StepPlan

PROMPTS = [list(range(first, first + 20)) for first in (0, 100)]


def test_no_step_has_more_requests_than_allowed_while_failed_ones_are_retried() -> None:
    core = make_core(max_num_seqs=2)
    worker = core.worker
    assert isinstance(worker, FakeWorker)
    sizes: list[int] = []

    def fail_once(plan: StepPlan) -> None:
        sizes.append(len(plan.requests))
        if len(sizes) == 1:
            raise ValueError("once")

    worker.before_step = fail_once
    requests = [make_request(f"{i}", prompt, 30, n=2 - i) for i, prompt in enumerate(PROMPTS)]
    samples = [sample for request in requests for sample in (request, *request.siblings)]
    run_all(core, requests)
    assert max(sizes) <= 2
    for sample in samples:
        prompt = sample.token_ids[: sample.num_prompt_tokens].tolist()
        assert sample.output_token_ids == expected_tokens(worker.layout, prompt, 30, 997, sample.sample_index)


def test_a_sample_can_be_aborted_while_it_waits_for_its_prefill() -> None:
    core = make_core(budget=16)
    request = make_request("a", range(60), 5, n=3)
    first, second = request.siblings
    core.add_request(request)
    core.step()
    core.abort("a#1")
    (update,) = [update for update in core.step() if update.finished]
    assert update.request is first
    assert first.finish_reason is FinishReason.ABORT
    run_all(core)
    assert first.num_output_tokens == 0
    for sample in (request, second):
        assert isinstance(core.worker, FakeWorker)
        assert sample.output_token_ids == expected_tokens(core.layout, range(60), 5, 997, sample.sample_index)
    core.verify()


def test_an_id_is_used_again_only_when_its_request_has_ended() -> None:
    core = make_core(budget=16)
    core.add_request(make_request("a", range(60), 5, n=2))
    for _ in range(6):
        for taken in ("a", "a#1"):
            with pytest.raises(RequestError, match="unique"):
                core.add_request(make_request(taken, range(5), 1))
        core.step()
    core.abort("a#1")
    core.step()
    again = make_request("a#1", range(5), 1)
    run_all(core, [again])
    assert again.output_token_ids == expected_tokens(core.layout, range(5), 1, 997)
    core.verify()
