"""Real processes, a real tiny model and the embedded store: what one leaves behind the others resume."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from dalsegno import LLM, SamplingParams
from dalsegno.errors import RequestError
from tests.connector.processes import answers, start
from tests.matrix.tiny_models import tiny_model

MODEL = "qwen3-next"
VOCABULARY = 4096
LENGTHS = (15, 16, 17, 100, 128, 255, 256, 257, 400, 512, 530)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(VOCABULARY), k=length)


def cold(prompts: list[tuple[list[int], int]]) -> list[list[int]]:
    """Answer prompts with every cache off."""
    with LLM(tiny_model(MODEL), enable_prefix_caching=False, kv_cache_memory_bytes=2**27, threads=1) as llm:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in prompts]
        return [list(o.outputs[0].token_ids) for o in llm.generate([ids for ids, _ in prompts], params, False)]


def role(name: str, path: Path, **extra: Any) -> dict[str, Any]:
    settings = {"store": "embedded", "path": str(path), "bytes": 2**26, **extra}
    return {"kv_connector": "StoreConnector", "kv_role": name, "kv_connector_extra_config": settings}


def test_a_producers_tail_of_any_length_is_hit_to_its_last_boundary_by_another_process(tmp_path: Path) -> None:
    model = tiny_model(MODEL)
    producer = [(prompt_of(length), 1) for length in LENGTHS]
    consumer = [(ids, 12) for ids, _ in producer]
    answers(start(model, producer, kv_transfer_config=role("kv_producer", tmp_path)))
    found, stats = answers(start(model, consumer, kv_transfer_config=role("kv_consumer", tmp_path)))
    assert [answer.num_cached_tokens for answer in found] == [(length - 1) // 16 * 16 for length in LENGTHS]
    assert [answer.token_ids for answer in found] == cold(consumer)
    assert stats["kv_offload_load_bytes"] > 0
    assert stats["external_prefix_cache_hits"] == sum(answer.num_cached_tokens for answer in found)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_conversation_goes_on_in_the_next_process_where_it_ended(worker: str, tmp_path: Path) -> None:
    model = tiny_model(MODEL)
    config = role("kv_both", tmp_path, offload_worker=worker)
    first = [(prompt_of(300), 40)]
    [answer], _ = answers(start(model, first, kv_transfer_config=config))
    following = [([*first[0][0], *answer.token_ids, *prompt_of(20)], 10)]
    [resumed], _ = answers(start(model, following, kv_transfer_config=config))
    # The last sampled token has not been computed by anybody.
    assert resumed.num_cached_tokens == (300 + 40 - 1) // 16 * 16
    assert resumed.by_tier == {"store": resumed.num_cached_tokens}
    assert [resumed.token_ids] == cold(following)


def test_two_engines_write_and_read_one_store_at_once(tmp_path: Path) -> None:
    model = tiny_model(MODEL)
    shared = prompt_of(200)
    ours = [([*shared, *prompt_of(30, seed)], 6) for seed in range(1, 5)]
    theirs = [([*shared, *prompt_of(30, seed)], 6) for seed in range(3, 7)]
    both = [start(model, prompts, kv_store=str(tmp_path), kv_store_bytes=2**26) for prompts in (ours, theirs)]
    for prompts, process in zip((ours, theirs), both, strict=True):
        found, _ = answers(process)
        assert [answer.token_ids for answer in found] == cold(prompts)
    everything = [*ours, *theirs[2:]]
    found, _ = answers(start(model, everything, kv_store=str(tmp_path), kv_store_bytes=2**26))
    assert [answer.num_cached_tokens for answer in found] == [224] * len(everything)
    assert [answer.token_ids for answer in found] == cold(everything)


def test_a_killed_sender_costs_what_it_had_not_stored_and_is_replaced(tmp_path: Path) -> None:
    config = role("kv_both", tmp_path, offload_worker="process")
    prompts = [prompt_of(300, seed) for seed in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = cold([(ids, 8) for ids in prompts])
    with LLM(tiny_model(MODEL), kv_transfer_config=config, kv_cache_memory_bytes=2**27, threads=1) as llm:
        sender: Any = llm.core.worker.port.connectors[0]._sender  # type: ignore[attr-defined]
        for ids, tokens in zip(prompts, expected, strict=True):
            [output] = llm.generate([ids], params, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == tokens
            if ids is not prompts[-1]:
                sender._process.kill()
                assert llm.core.wait_for_connector(60), "a dead process was waited for"
        assert llm.core.wait_for_connector(60)
        llm.verify()
        assert llm.stats()["kv_offload_workers_lost"] == 3
    with LLM(tiny_model(MODEL), kv_transfer_config=config, kv_cache_memory_bytes=2**27, threads=1) as llm:
        for ids, tokens in zip(prompts, expected, strict=True):
            [output] = llm.generate([ids], params, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == tokens
        assert output.num_cached_tokens == 288, "what the last process stored was not found"


def test_a_fork_of_the_engines_process_is_told_to_make_its_own_engine(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [prompt_of(100, seed) for seed in range(2)]
    expected = cold([(ids, 4) for ids in prompts])
    with LLM(tiny_model(MODEL), kv_store=str(tmp_path), kv_cache_memory_bytes=2**27, threads=1) as llm:
        [before] = llm.generate(prompts[:1], params, use_tqdm=False)
        child = os.fork()
        if not child:
            code = 1
            try:
                llm.generate(prompts[1:], params, use_tqdm=False)
            except RequestError:
                llm.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        [after] = llm.generate(prompts[1:], params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in (before, after)] == expected
        assert llm.core.wait_for_connector(60)
        assert llm.stats()["kv_offload_jobs_incomplete"] == 0


def test_a_relative_folder_is_the_same_one_for_the_sender_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    options: dict[str, Any] = {"kv_store": "store", "kv_store_bytes": 2**24, "kv_cache_memory_bytes": 2**27}
    with LLM(tiny_model(MODEL), threads=1, **options) as llm:
        monkeypatch.chdir(tmp_path / "elsewhere")
        llm.generate([prompt_of(100)], params, use_tqdm=False)
        assert llm.core.wait_for_connector(60)
        assert llm.reset_prefix_cache()
        [again] = llm.generate([prompt_of(100)], params, use_tqdm=False)
    assert again.num_cached_tokens == 96
    assert not list((tmp_path / "elsewhere").iterdir())
