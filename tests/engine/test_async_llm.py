"""`AsyncLLM`: the answers of `LLM`, many at once, and nothing left behind by whoever goes away."""

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno import LLM, AsyncLLM, SamplingParams
from dalsegno.engine.outputs import RequestOutput
from dalsegno.errors import EngineError, OptionError, RequestError
from dalsegno.kv.verify import census
from tests.matrix.tiny_models import tiny_model

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "max_model_len": 512, "threads": 1}
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("qwen3-next")


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(model, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture
def engine(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """The module's engine; whatever a test does, it holds nothing afterwards."""
    yield shared
    core = shared._engine.core
    gc.collect()
    shared._thread.call(lambda: census(core.manager)).result(30)
    assert not shared._streams
    assert not shared._thread._tickets
    assert not shared._engine.front_end._samples


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    *_, output = [output async for output in stream]
    assert output.finished
    return output


def test_twenty_prompts_at_once_are_answered_as_by_llm(engine: AsyncLLM, model: Path) -> None:
    prompts = [f"Tell me {count} things. " * (1 + count % 4) for count in range(20)]
    params = [
        SamplingParams(temperature=count % 2, seed=count, max_tokens=3 + count, n=1 + (count == 7), ignore_eos=True)
        for count in range(20)
    ]

    async def run() -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine.generate(p, s)) for p, s in zip(prompts, params, strict=True)))

    found = asyncio.run(run())
    with LLM(model, **OPTIONS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    for ours, theirs in zip(found, expected, strict=True):
        assert [list(sample.token_ids) for sample in ours.outputs] == [list(s.token_ids) for s in theirs.outputs]
        assert [sample.text for sample in ours.outputs] == [sample.text for sample in theirs.outputs]


def test_a_conversation_is_answered_as_by_llm(engine: AsyncLLM, model: Path) -> None:
    messages = [{"role": "user", "content": "What is a boundary state?"}]
    found = asyncio.run(last(engine.chat(messages, SHORT)))
    with LLM(model, **OPTIONS) as llm:
        [expected] = llm.chat(messages, SHORT, use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_results_grow_and_streams_interleave(engine: AsyncLLM) -> None:
    async def run() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        async def read(name: int) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
            stream = engine.generate([name, 2, 3], params)
            async for output in stream:
                seen.append((name, len(output.outputs[0].token_ids)))  # noqa: PERF401 - the order between streams counts

        await asyncio.gather(read(1), read(2))
        return seen

    seen = asyncio.run(run())
    for name in (1, 2):
        lengths = [length for who, length in seen if who == name]
        assert lengths == sorted(set(lengths))
    changes = sum(a[0] != b[0] for a, b in itertools.pairwise(seen))
    assert changes > 10, "one stream was read behind the other"


def test_the_next_prompt_hits_and_a_stop_string_stops(engine: AsyncLLM) -> None:
    async def run() -> tuple[RequestOutput, RequestOutput]:
        first = await last(engine.generate(list(range(100, 200)), LONG))
        text = first.outputs[0].text[40:44]
        params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, stop=text)
        return first, await last(engine.generate(list(range(100, 200)), params))

    first, second = asyncio.run(run())
    assert second.num_cached_tokens == 96
    assert second.outputs[0].finish_reason == "stop"
    assert first.outputs[0].text.startswith(second.outputs[0].text)


@pytest.mark.parametrize("after", [1, 2, 7])
def test_an_aborted_request_ends_with_what_it_has(engine: AsyncLLM, after: int) -> None:
    async def run() -> list[RequestOutput]:
        found = []
        async for output in engine.generate([5, 6, 7], LONG, request_id="mine"):
            found.append(output)
            if len(found) == after:
                await engine.abort("mine")
                await engine.abort("nobody's")
        return found

    found = asyncio.run(run())
    assert found[-1].outputs[0].finish_reason == "abort"
    assert len(found[-1].outputs[0].token_ids) < 300
    assert {output.request_id for output in found} == {"mine"}


def test_a_request_aborted_before_it_began_has_no_result(engine: AsyncLLM) -> None:
    async def run() -> list[RequestOutput]:
        stream = engine.generate([5, 6, 7], LONG, request_id="mine")
        await engine.abort("mine")
        return [output async for output in stream]

    assert asyncio.run(run()) == []


def test_whoever_stops_reading_takes_the_request_along(engine: AsyncLLM) -> None:
    """By break, by cancellation, by timeout, by dropping the stream, by leaving the event loop."""

    async def breaks() -> None:
        async for _ in engine.generate([1, 2], LONG):
            break

    async def is_cancelled() -> None:
        task = asyncio.create_task(last(engine.generate([1, 2, 3], LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def times_out() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(last(engine.generate([1, 2, 3, 4], LONG)), 0.02)

    async def drops() -> None:
        stream = engine.generate([1, 2, 3, 4, 5], LONG)
        await anext(stream)
        del stream
        gc.collect()

    async def leaves() -> None:
        stream = engine.generate([1, 2, 3, 4, 5, 6], LONG)
        await anext(stream)
        left.append(stream)

    left: list[Any] = []
    for way in (breaks, is_cancelled, times_out, drops, leaves):
        asyncio.run(way())
    left.clear()
    assert asyncio.run(engine.stats())["request_success_abort"] >= 3


def test_bad_input_is_named_and_costs_nobody_else_anything(engine: AsyncLLM) -> None:
    async def run() -> list[Any]:
        good = [last(engine.generate([9, 8, 7, count], SHORT)) for count in range(4)]
        bad = [
            last(engine.generate([], SHORT)),
            last(engine.generate([10**9], SHORT)),
            last(engine.generate([1] * 600, SHORT)),
            last(engine.generate({"prompt": "x", "no_such_key": 1}, SHORT)),
            last(engine.generate("x", "no params")),  # type: ignore[arg-type]
            last(engine.chat([], SHORT)),
        ]
        return await asyncio.gather(*good, *bad, return_exceptions=True)

    found = asyncio.run(run())
    assert all(isinstance(output, RequestOutput) for output in found[:4])
    assert [type(error) for error in found[4:] if not isinstance(error, RequestError | OptionError)] == []


def test_a_name_in_use_is_refused_and_free_again_afterwards(engine: AsyncLLM) -> None:
    async def run() -> None:
        first = engine.generate([1, 2, 3], LONG, request_id="one")
        await anext(first)
        with pytest.raises(RequestError, match="'one'"):
            engine.generate([1, 2, 3], SHORT, request_id="one")
        await first.aclose()
        await last(engine.generate([1, 2, 3], SHORT, request_id="one"))

    asyncio.run(run())


def test_a_consumer_that_never_reads_stalls_nobody(engine: AsyncLLM) -> None:
    async def run() -> int:
        lazy = engine.generate([3, 2, 1], LONG)
        await anext(lazy)
        await asyncio.gather(*(last(engine.generate([count, 2, 1], SHORT)) for count in range(10)))
        while (await engine.stats())["num_requests_running"]:
            await asyncio.sleep(0.02)
        # All of it is there by now, in one result.
        return len((await anext(lazy)).outputs[0].token_ids)

    assert asyncio.run(run()) == 300


def test_two_hundred_short_requests_from_two_event_loops_leave_nothing(engine: AsyncLLM) -> None:
    async def run(start: int) -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine.generate([start + i, 4, 5], SHORT)) for i in range(100)))

    found: dict[int, list[RequestOutput]] = {}
    threads = [
        threading.Thread(target=lambda start=start: found.update({start: asyncio.run(run(start))}))
        for start in (0, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(outputs) for outputs in found.values()] == [100, 100]
    assert all(len(output.outputs[0].token_ids) == 5 for outputs in found.values() for output in outputs)


def test_a_stream_is_read_by_one_task_at_a_time_and_the_first_is_not_disturbed(engine: AsyncLLM) -> None:
    async def run() -> list[Any]:
        stream = engine.generate([1, 1, 1], LONG)
        await anext(stream)
        results = await asyncio.gather(anext(stream), anext(stream), return_exceptions=True)
        await last(stream)
        return list(results)

    first, second = asyncio.run(run())
    assert isinstance(first, RequestOutput)
    assert isinstance(second, RequestError)


def test_closing_a_stream_ends_the_wait_of_another_task(engine: AsyncLLM) -> None:
    async def run() -> list[RequestOutput]:
        stream = engine.generate([1, 1, 2], LONG)
        reader = asyncio.create_task(_collect(stream))
        await asyncio.sleep(0.05)
        await stream.aclose()
        return await asyncio.wait_for(reader, 30)

    assert not any(output.finished for output in asyncio.run(run()))


@pytest.mark.parametrize("way", ["aclose", "abort"])
def test_a_request_that_is_ended_while_its_prompt_is_prepared_has_no_result(engine: AsyncLLM, way: str) -> None:
    async def run() -> list[RequestOutput]:
        stream = engine.generate([1, 1, 3], LONG, request_id="prepared")
        with engine._making:
            reader = asyncio.create_task(_collect(stream))
            await asyncio.sleep(0.05)
            if way == "abort":
                await engine.abort("prepared")
            else:
                await stream.aclose()
        return await asyncio.wait_for(reader, 30)

    assert asyncio.run(run()) == []


async def _collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def test_the_cache_is_reset_when_nothing_runs(engine: AsyncLLM) -> None:
    async def run() -> None:
        running = engine.generate([1, 2, 3], LONG)
        await anext(running)
        assert not await engine.reset_prefix_cache()
        assert await engine.reset_prefix_cache(reset_running_requests=True)
        await running.aclose()
        assert await engine.reset_prefix_cache()
        await engine.verify()
        await engine.check_health()

    asyncio.run(run())


def test_closing_ends_open_streams_and_the_thread(model: Path) -> None:
    before = set(threading.enumerate())

    async def run() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            waiting = asyncio.create_task(last(llm.generate([1, 2, 3], LONG)))
            idle = llm.generate([3, 2, 1], LONG)
            await anext(idle)
            await asyncio.to_thread(llm.shutdown)
            for stream in (waiting, last(idle)):
                with pytest.raises(RequestError, match="closed"):
                    await stream
            llm.shutdown()
        assert not llm.is_running
        assert not llm.errored
        with pytest.raises(RequestError, match="closed"):
            llm.generate([1], SHORT)
        with pytest.raises(RequestError, match="closed"):
            await llm.stats()
        with pytest.raises(RequestError, match="closed"):
            await llm.check_health()

    asyncio.run(run())
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("dalsegno")]


def test_an_engine_that_breaks_fails_every_stream(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            streams = [llm.generate([count, 2, 3], LONG) for count in range(3)]
            for stream in streams:
                await anext(stream)

            def breaks(*_: Any) -> None:
                raise AssertionError("a broken invariant")

            monkeypatch.setattr(llm._engine.core.scheduler, "commit", breaks)
            for stream in streams:
                with pytest.raises(EngineError, match="a broken invariant"):
                    await last(stream)
            assert llm.errored
            assert not llm.is_running
            with pytest.raises(EngineError):
                await llm.check_health()
            with pytest.raises(EngineError):
                llm.generate([1], SHORT)

    asyncio.run(run())


def test_with_a_store_a_new_engine_resumes_and_wakes_for_its_loads(model: Path, tmp_path: Path) -> None:
    ids = list(range(100, 300))

    async def run() -> RequestOutput:
        async with AsyncLLM(model, kv_store=str(tmp_path), kv_store_bytes=2**24, **OPTIONS) as llm:
            return await last(llm.generate(ids, SHORT))

    first, second = asyncio.run(run()), asyncio.run(run())
    assert second.num_cached_tokens == 192
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_options_are_those_of_llm() -> None:
    with pytest.raises(OptionError, match=r"block_sise.*did you mean block_size"):
        AsyncLLM("nowhere", block_sise=16)
