"""The Python API on the real engine core and a worker without a model."""

import itertools
import os
import signal
from typing import Any

import pytest

from dalsegno.engine.llm import LLM
from dalsegno.engine.outputs import RequestOutput
from dalsegno.errors import OptionError, RequestError
from dalsegno.sampling_params import SamplingParams
from dalsegno.testing.fake_worker import expected_tokens
from dalsegno.types import StepPlan
from tests.engine.stand_in import IM_END, TEXT, VOCAB_SIZE, make_llm, small_tokenizer, worker_of

PROMPTS: list[Any] = [TEXT[:40], [5, 6, 7, 8] * 10, {"prompt": "fox"}, {"prompt_token_ids": list(range(3, 60))}]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    return make_llm(monkeypatch)


def _params(**given: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | given))


def _ids(prompt: Any) -> list[int]:
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
    return small_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)


def _expected(llm: LLM, prompt: Any, count: int, sample: int = 0) -> list[int]:
    return expected_tokens(worker_of(llm).layout, _ids(prompt), count, VOCAB_SIZE, sample)


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def _census(llm: LLM) -> None:
    """The engine is idle and holds nothing, and neither does its front end."""
    assert llm._engine is not None
    assert not llm._engine.front_end.has_unfinished_requests
    assert not llm._engine.front_end._samples
    llm.verify()


def test_one_result_per_prompt_in_order(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, _params())
    assert [output.prompt_token_ids for output in outputs] == list(map(_ids, PROMPTS))
    assert [_tokens(output) for output in outputs] == [_expected(llm, prompt, 12) for prompt in PROMPTS]
    assert [output.prompt for output in outputs] == [TEXT[:40], None, "fox", None]
    assert len({output.request_id for output in outputs}) == len(PROMPTS)
    for output in outputs:
        answer = output.outputs[0]
        assert output.finished
        assert (answer.index, answer.finish_reason, answer.stop_reason, answer.error) == (0, "length", None, None)
        assert answer.text == small_tokenizer().decode(answer.token_ids)
    _census(llm)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_single_prompt_gives_a_list_of_one(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, _params())
    assert _tokens(output) == _expected(llm, prompt, 12)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_results_say_what_was_cached_and_what_was_computed(llm: LLM) -> None:
    prompt = list(range(3, 103))
    (cold,) = llm.generate(prompt, _params())
    (warm,) = llm.generate(prompt, _params())
    assert (cold.num_cached_tokens, cold.metrics.num_prefilled_tokens) == (0, 100)
    assert (warm.num_cached_tokens, warm.metrics.num_prefilled_tokens) == (96, 4)
    for output in (cold, warm):
        report = output.hit_report
        assert report is not None
        assert report.boundary == output.num_cached_tokens
        assert report.boundary + sum(report.lost.values()) == 100
    metrics = warm.metrics
    assert metrics.first_token_time is not None
    assert metrics.finish_time is not None
    assert metrics.arrival_time < metrics.first_token_time < metrics.finish_time
    assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time


def test_parameters_are_one_for_all_or_one_per_prompt(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, [_params(max_tokens=count) for count in (1, 2, 3, 4)])
    assert [len(_tokens(output)) for output in outputs] == [1, 2, 3, 4]
    with pytest.raises(RequestError, match=r"one per prompt \(4\), got 2"):
        llm.generate(PROMPTS, [_params()] * 2)
    for bad in ({"temperature": 0}, [None], 5):
        with pytest.raises(OptionError, match="must be a SamplingParams or a list of them"):
            llm.generate(PROMPTS, bad)  # type: ignore[arg-type]


def test_without_parameters_the_checkpoints_are_used(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(top_k=7)
    (output,) = llm.generate([9, 9, 9])
    assert len(_tokens(output)) <= SamplingParams().max_tokens  # type: ignore[operator]


def test_an_answer_never_exceeds_the_models_length(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(monkeypatch, max_model_len=50)
    outputs = llm.generate([[5] * 40, [6] * 49], _params(max_tokens=None))
    assert [len(_tokens(output)) for output in outputs] == [10, 1]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


def test_samples_of_one_prompt_come_by_index(llm: LLM) -> None:
    prompt = list(range(3, 40))
    (output,) = llm.generate(prompt, _params(n=3, max_tokens=1))
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert [answer.token_ids for answer in output.outputs] == [_expected(llm, prompt, 1, i) for i in range(3)]
    assert output.metrics.num_prefilled_tokens == len(prompt)
    _census(llm)


def test_one_sample_may_stop_while_the_others_go_on(llm: LLM) -> None:
    prompt = list(range(3, 40))
    (free,) = llm.generate(prompt, _params(n=3))
    stop = free.outputs[1].token_ids[4]
    (output,) = llm.generate(prompt, _params(n=3, stop_token_ids=[stop]))
    for before, after in zip(free.outputs, output.outputs, strict=True):
        ids = before.token_ids
        assert after.token_ids == (ids[: ids.index(stop) + 1] if stop in ids else ids)
    assert output.outputs[1].finish_reason == "stop"
    _census(llm)


@pytest.mark.parametrize("num_results", [1, 2, 5])
def test_all_samples_of_a_closed_stream_are_gone(llm: LLM, num_results: int) -> None:
    stream = llm.stream([list(range(3, 40)), [5] * 30], _params(n=3, max_tokens=50))
    for _ in range(num_results):
        next(stream)
    stream.close()
    _census(llm)


def test_an_end_token_ends_the_answer_and_has_no_text(llm: LLM) -> None:
    prompt, count = _prompt_that_samples(llm, IM_END)
    (ended,) = llm.generate(prompt, _params(max_tokens=60, ignore_eos=False))
    answer = ended.outputs[0]
    assert answer.token_ids == _expected(llm, prompt, count)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    (longer,) = llm.generate(prompt, _params(max_tokens=60, ignore_eos=False, min_tokens=count + 1))
    assert len(_tokens(longer)) > count


def _prompt_that_samples(llm: LLM, token_id: int) -> tuple[list[int], int]:
    """A prompt whose answer has `token_id` within 60 tokens, and at which count."""
    for first in range(3, VOCAB_SIZE):
        answer = _expected(llm, [first] * 5, 60)
        if token_id in answer:
            return [first] * 5, answer.index(token_id) + 1
    raise AssertionError("no such prompt")


def test_a_stop_token_is_the_reason_and_not_part_of_the_text(llm: LLM) -> None:
    prompt = [9, 8, 7]
    ids = _expected(llm, prompt, 12)
    stop = ids[4]
    count = ids.index(stop) + 1
    (output,) = llm.generate(prompt, _params(stop_token_ids=[stop]))
    answer = output.outputs[0]
    assert answer.token_ids == ids[:count]
    assert answer.text == small_tokenizer().decode(ids[: count - 1])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("max_tokens", [60, 8])
def test_a_stop_string_ends_the_answer_and_is_cut_off(llm: LLM, max_tokens: int) -> None:
    prompt = [9, 8, 7, 6]
    text = small_tokenizer().decode(_expected(llm, prompt, 8))
    # It ends with the text of the eighth token, so for max_tokens=8 the request has ended by itself as well.
    stop = text[-3:]
    assert "\ufffd" not in stop
    (output,) = llm.generate(prompt, _params(max_tokens=max_tokens, stop=[stop]))
    answer = output.outputs[0]
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == _expected(llm, prompt, len(answer.token_ids))
    assert len(answer.token_ids) <= 8
    _census(llm)


def test_requests_without_a_seed_differ_and_repeat_from_run_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    for engine_seed in (1, 1, 2):
        llm = make_llm(monkeypatch, seed=engine_seed)
        seeds: list[int] = []
        worker_of(llm).before_step = lambda plan, seeds=seeds: seeds.extend(
            request.sample.seed for request in plan.requests if request.sample
        )
        llm.generate([[5, 5], [5, 5]], _params(max_tokens=1))
        llm.generate([5, 5], _params(max_tokens=1, seed=77))
        seen.append(seeds)
    assert seen[0] == seen[1]
    assert seen[0][2] == 77
    assert len(set(seen[0])) == 3
    assert not set(seen[0][:2]) & set(seen[2][:2])


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ([[5, 6], []], {}),
        ([[5, 6], [VOCAB_SIZE]], {}),
        ([[5, 6], [5] * 600], {}),
        ([[5, 6], {"prompt_token_ids": [5], "checkpoint_at": [9]}], {}),
        ([[5, 6], [7]], {"stop_token_ids": [VOCAB_SIZE]}),
    ],
)
def test_a_batch_with_a_bad_prompt_queues_nothing(llm: LLM, prompts: Any, params: dict[str, Any]) -> None:
    (before,) = llm.generate([5, 6, 7], _params())
    steps = worker_of(llm).num_steps
    with pytest.raises(RequestError):
        llm.generate(prompts, _params(**params))
    assert worker_of(llm).num_steps == steps
    _census(llm)
    (after,) = llm.generate([5, 6, 7], _params())
    assert _tokens(after) == _tokens(before)


def test_a_request_the_core_refuses_takes_the_batch_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm._engine is not None
    core = llm._engine.core
    add, count = core.add_request, iter(range(99))

    def refuse_third(request: Any) -> None:
        if next(count) == 2:
            raise RequestError("too large")
        add(request)

    monkeypatch.setattr(core, "add_request", refuse_third)
    with pytest.raises(RequestError, match="too large"):
        llm.generate([[5], [6], [7]], _params())
    _census(llm)


def test_a_bad_prompt_is_named_by_its_place(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\] is empty"):
        llm.generate([[5], []])
    with pytest.raises(RequestError, match=r"^prompt is empty"):
        llm.generate([[]])


def test_an_interrupt_aborts_the_call_and_leaves_the_engine_usable(llm: LLM) -> None:
    worker = worker_of(llm)
    other = llm.stream([40, 41, 42], _params())
    first = next(other)

    def interrupt(_plan: StepPlan) -> None:
        if worker.num_steps == 5:
            os.kill(os.getpid(), signal.SIGINT)

    worker.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [8] * 50], _params(max_tokens=100))
    assert worker.num_steps < 10
    assert _tokens(list(other)[-1]) == _expected(llm, [40, 41, 42], 12)
    assert len(_tokens(first)) == 1
    _census(llm)
    assert _tokens(llm.generate([5, 6, 7], _params())[0]) == _expected(llm, [5, 6, 7], 12)


def test_an_interrupt_inside_the_worker_is_survived_too(llm: LLM) -> None:
    worker = worker_of(llm)

    def interrupt(_plan: StepPlan) -> None:
        if worker.num_steps == 5:
            worker.before_step = None
            raise KeyboardInterrupt

    worker.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [8] * 50], _params(max_tokens=100))
    _census(llm)
    assert _tokens(llm.generate([5, 6, 7], _params())[0]) == _expected(llm, [5, 6, 7], 12)


def test_a_failed_request_says_so_and_the_others_are_answered(llm: LLM) -> None:
    worker = worker_of(llm)

    def fail(plan: StepPlan) -> None:
        if any(request.token_ids[0] == 13 for request in plan.requests):
            raise ValueError("the worker broke")

    worker.before_step = fail
    bad, good = llm.generate([[13] * 5, [5, 6, 7]], _params())
    assert bad.outputs[0].finish_reason == "error"
    assert "the worker broke" in str(bad.outputs[0].error)
    assert bad.finished
    assert _tokens(good) == _expected(llm, [5, 6, 7], 12)
    _census(llm)


def test_a_stream_grows_token_by_token_to_the_result(llm: LLM) -> None:
    outputs = list(llm.stream(PROMPTS, _params()))
    for number, prompt in enumerate(PROMPTS):
        mine = [output for output in outputs if output.request_id == str(number)]
        assert [len(_tokens(output)) for output in mine] == list(range(1, 13))
        texts = [output.outputs[0].text for output in mine]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert [output.finished for output in mine] == [False] * 11 + [True]
        assert _tokens(mine[-1]) == _expected(llm, prompt, 12)
    _census(llm)


def test_a_stream_checks_at_the_call_and_queues_when_it_is_read(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.stream([[]])
    llm.stream([5, 6, 7], _params())
    _census(llm)


def test_closing_a_stream_aborts_what_is_unfinished(llm: LLM) -> None:
    stream = llm.stream([[5, 6, 7], [8, 9]], _params(max_tokens=100))
    next(stream)
    stream.close()
    _census(llm)


def test_a_stream_and_other_calls_share_the_engine(llm: LLM) -> None:
    stream = llm.stream([5, 6, 7], _params())
    next(stream)
    assert _tokens(llm.generate([8, 9], _params(max_tokens=30))[0]) == _expected(llm, [8, 9], 30)
    assert _tokens(list(stream)[-1]) == _expected(llm, [5, 6, 7], 12)


MESSAGES = [{"role": "system", "content": "You are a fox. " * 6}, {"role": "user", "content": "Where is the dog?"}]


def test_chat_answers_the_rendering_of_the_messages(llm: LLM) -> None:
    (output,) = llm.chat(MESSAGES, _params())
    assert output.prompt == small_tokenizer().render(MESSAGES)
    assert output.prompt_token_ids == small_tokenizer().encode_rendered(output.prompt).token_ids
    assert _tokens(output) == _expected(llm, output.prompt_token_ids, 12)
    tool = {"type": "function", "function": {"name": "lookup"}}
    (with_tools,) = llm.chat(MESSAGES, _params(), tools=[tool], add_generation_prompt=False)
    assert with_tools.prompt == small_tokenizer().render(MESSAGES, [tool], add_generation_prompt=False)


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    other = [{"role": "user", "content": "And the fox?"}]
    outputs = llm.chat([MESSAGES, other], [_params(max_tokens=3), _params(max_tokens=5)])
    assert [output.prompt for output in outputs] == [small_tokenizer().render(m) for m in (MESSAGES, other)]
    assert [len(_tokens(output)) for output in outputs] == [3, 5]


def test_a_new_session_resumes_behind_the_system_prompt_on_second_sighting(llm: LLM) -> None:
    llm.chat(MESSAGES, _params())
    (second,) = llm.chat([MESSAGES[0], {"role": "user", "content": "Viktor jagt quer."}], _params())
    end = len(
        small_tokenizer().encode_rendered(small_tokenizer().render(MESSAGES[:1], add_generation_prompt=False)).token_ids
    )
    assert second.num_cached_tokens == end // 16 * 16
    assert end > 16


def test_chat_errors_are_request_errors(llm: LLM) -> None:
    refused: list[Any] = [[], [[]], "hello", [{"content": "x"}]]
    for bad in refused:
        with pytest.raises(RequestError):
            llm.chat(bad)
    _census(llm)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"add_generation_prompt": "no"}, "add_generation_prompt must be True or False, got 'no'"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs cannot set 'tokenize'"),
        ({"chat_template_kwargs": {"padding": True}}, "chat_template_kwargs cannot set 'padding'"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs must be a dict"),
        ({"tools": "get"}, "tools must be a list"),
    ],
)
def test_an_option_of_chat_that_would_do_nothing_or_harm_is_refused(
    llm: LLM, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        llm.chat([{"role": "user", "content": "hi"}], **options)


def test_a_chat_can_be_streamed(llm: LLM) -> None:
    outputs = list(llm.stream_chat(MESSAGES, _params()))
    assert _tokens(outputs[-1]) == _expected(llm, outputs[-1].prompt_token_ids, 12)


def test_salts_do_not_share(llm: LLM) -> None:
    prompt = list(range(3, 103))
    llm.generate({"prompt_token_ids": prompt, "cache_salt": "a"}, _params())
    (other,) = llm.generate({"prompt_token_ids": prompt, "cache_salt": "b"}, _params())
    (same,) = llm.generate({"prompt_token_ids": prompt, "cache_salt": "a"}, _params())
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 96)


def test_a_reset_forgets_everything_and_is_refused_while_requests_run(llm: LLM) -> None:
    prompt = list(range(3, 103))
    stream = llm.stream(prompt, _params())
    next(stream)
    assert llm.reset_prefix_cache() is False
    stream.close()
    assert llm.reset_prefix_cache() is True
    (output,) = llm.generate(prompt, _params())
    assert output.num_cached_tokens == 0


def test_the_start_up_plan_names_the_shortest_prompt_that_can_hit(llm: LLM) -> None:
    assert "the shortest prompt that can hit has 17 tokens" in llm.start_up_plan


def test_stats_are_numbers_by_name(llm: LLM) -> None:
    llm.generate([5, 6, 7], _params())
    stats = llm.stats()
    assert stats
    assert all(isinstance(name, str) and isinstance(value, int | float) for name, value in stats.items())


def test_a_closed_llm_says_so_and_closes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(monkeypatch) as llm:
        worker = worker_of(llm)
        assert not worker.closed
    assert worker.closed
    llm.close()
    for call in (lambda: llm.generate([5]), llm.stats, llm.verify, llm.reset_prefix_cache, llm.get_tokenizer):
        with pytest.raises(RequestError, match="has been closed"):
            call()
    assert "closed" in repr(llm)


def test_engines_in_one_process_do_not_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(3, 103))
    with make_llm(monkeypatch) as one, make_llm(monkeypatch, enable_prefix_caching=False) as two:
        outputs = [llm.generate(prompt, _params())[0] for llm in (one, two, one, two)]
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 96, 0]
        assert len({tuple(_tokens(output)) for output in outputs}) == 1


def test_without_a_tokenizer_ids_are_served_and_texts_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(monkeypatch, skip_tokenizer_init=True)
    (output,) = llm.generate([5, 6, 7], _params())
    assert _tokens(output) == _expected(llm, [5, 6, 7], 12)
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="no tokenizer; give token ids"):
        llm.generate("fox")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([5], _params(stop=["x"]))
    for call in (lambda: llm.chat(MESSAGES), llm.get_tokenizer):
        with pytest.raises(RequestError, match="no tokenizer"):
            call()


def test_a_bad_option_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(OptionError, match="did you mean block_size"):
        LLM("/no/such/folder", blocksize=16)
