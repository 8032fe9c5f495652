"""Engines in processes of their own on the real Mooncake: every tail is hit, and whatever fails, answers are cold."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dalsegno import LLM, SamplingParams
from dalsegno.store.base import Buffers, Status, Store
from dalsegno.store.keys import StoreKey
from dalsegno.store.mooncake import open_mooncake
from dalsegno.store.mooncake.master import MooncakeMaster
from dalsegno.store.wrappers.wrapped import WrappedStore
from tests.connector.processes import answers, start
from tests.matrix.tiny_models import tiny_model

MODEL = "qwen3-next"
VOCABULARY = 4096
LENGTHS = (15, 16, 17, 100, 128, 255, 256, 257, 400, 512, 530)
HITS = "external_prefix_cache_hits"
MEMORY: dict[str, Any] = {"kv_cache_memory_bytes": 2**27, "threads": 1}


@cache
def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(1000 * seed + length).choices(range(VOCABULARY), k=length))


@cache
def cold(prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> list[list[int]]:
    """Answer prompts with every cache off."""
    with LLM(tiny_model(MODEL), enable_prefix_caching=False, **MEMORY) as llm:
        return ask(llm, prompts, max_tokens)


def ask(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate([list(ids) for ids in prompts], params, use_tqdm=False)]


class Lender:
    """`dalsegno store serve` in a process of its own."""

    def __init__(self, address: str, segment_bytes: int = 2**27, *options: str) -> None:
        command = [str(Path(sys.executable).with_name("dalsegno")), "store", "serve", f"mooncake://{address}"]
        self.process = subprocess.Popen(
            [*command, "--segment-bytes", str(segment_bytes), *options], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        if not self.ready:
            self.process.stdout.close()
            raise AssertionError(f"it has ended with {self.process.wait()}")

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        self.process.send_signal(signal_number)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def lender(mooncake_master: MooncakeMaster) -> Iterator[Lender]:
    """A process that lends 128 MiB to the test's master."""
    made = Lender(mooncake_master.address)
    yield made
    if made.process.poll() is None:
        made.end()


def role(name: str, master: MooncakeMaster, **extra: Any) -> dict[str, Any]:
    settings = {"master_server_address": master.address, "pressure_pause_s": 0.1, **extra}
    return {"kv_connector": "MooncakeStoreConnector", "kv_role": name, "kv_connector_extra_config": settings}


def engine(master: MooncakeMaster, **extra: Any) -> LLM:
    return LLM(tiny_model(MODEL), kv_transfer_config=role("kv_both", master, **extra), **MEMORY)


def flush(llm: LLM) -> dict[str, int | float]:
    """Wait for what is stored, take the census, forget what the device holds; return the engine's statistics."""
    assert llm.core.wait_for_connector(60)
    llm.verify()
    assert not llm.core.manager.pins.counts
    assert llm.reset_prefix_cache()
    return llm.stats()


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_consumer_hits_every_tail_of_a_producer(worker: str, mooncake_master: MooncakeMaster, lender: Lender) -> None:
    """R1, R7: the producer answers one token and is gone before the consumer starts."""
    model = tiny_model(MODEL)
    prompts = tuple(prompt_of(length) for length in LENGTHS)
    producing = role("kv_producer", mooncake_master, offload_worker=worker)
    asks = {"do_remote_decode": True}
    told, stored = answers(start(model, [(list(ids), 1) for ids in prompts], asks, kv_transfer_config=producing))
    boundaries = [(answer.transfer or {})["stored_boundary"] for answer in told]
    assert boundaries == [length // 16 * 16 for length in LENGTHS]
    found, stats = answers(
        start(model, [(list(ids), 12) for ids in prompts], kv_transfer_config=role("kv_consumer", mooncake_master))
    )
    assert [answer.num_cached_tokens for answer in found] == [(length - 1) // 16 * 16 for length in LENGTHS]
    assert [answer.token_ids for answer in found] == cold(prompts, 12)
    assert stats["kv_load_failures"] == 0
    assert stored["kv_offload_jobs_incomplete"] == 0
    assert stats["kv_store_get_bytes"] > 0


def test_a_master_killed_and_restarted_mid_run_costs_hits_and_no_answer(
    mooncake_master: MooncakeMaster, lender: Lender
) -> None:
    """69: clean misses while it is away, everything forgotten behind it, and then puts and hits as before."""
    prompts = tuple(prompt_of(300, seed) for seed in range(3))
    expected = cold(prompts, 6)
    with engine(mooncake_master) as llm:
        assert ask(llm, prompts, 6) == expected
        flush(llm)
        assert ask(llm, prompts[:1], 6) == expected[:1]
        assert llm.stats()[HITS] > 0
        mooncake_master.stop(kill=True)
        flush(llm)
        for _ in range(2):
            assert ask(llm, prompts, 6) == expected
            flush(llm)
        assert llm.stats()["kv_store_unreachable"] == 1
        hits = llm.stats()[HITS]
        mooncake_master.start()
        wait_for(lambda: llm.stats()["kv_store_unreachable"] == 0)
        assert ask(llm, prompts, 6) == expected
        flush(llm)
        wait_for(lambda: ask(llm, prompts, 6) == expected and flush(llm)[HITS] > hits)
        assert llm.stats()["kv_store_reconnects"] == 1
    with engine(mooncake_master) as other:
        assert ask(other, prompts, 6) == expected
        assert other.stats()[HITS] == 3 * 288


def test_a_producer_whose_own_cache_hits_stores_again_what_a_restarted_master_has_forgotten(
    mooncake_master: MooncakeMaster, lender: Lender
) -> None:
    prompts = tuple(prompt_of(300, seed) for seed in range(2))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    asking = [{"prompt_token_ids": list(ids), "kv_transfer_params": {"do_remote_decode": True}} for ids in prompts]
    with engine(mooncake_master) as llm:
        ask(llm, prompts, 1)
        assert llm.core.wait_for_connector(60)
        mooncake_master.stop(kill=True)
        mooncake_master.start()

        def stored() -> list[int]:
            outputs = llm.generate(asking, params, use_tqdm=False)
            return [(output.kv_transfer_params or {})["stored_boundary"] for output in outputs]

        wait_for(lambda: stored() == [288, 288])
        llm.verify()
    with engine(mooncake_master) as other:
        assert ask(other, prompts, 6) == cold(prompts, 6)
        assert other.stats()[HITS] == 2 * 288


def test_an_embedded_store_near_and_mooncake_far_each_have_everything(
    mooncake_master: MooncakeMaster, lender: Lender, tmp_path: Path
) -> None:
    """What was found far is kept near; then either one alone is enough."""
    prompts = tuple(prompt_of(300, seed) for seed in range(2))
    expected = cold(prompts, 6)

    def near(name: str) -> dict[str, Any]:
        settings = {"path": str(tmp_path / name), "bytes": 2**26}
        return {"kv_connector": "StoreConnector", "kv_connector_extra_config": settings}

    def hits(*connectors: dict[str, Any]) -> float:
        both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}
        with LLM(tiny_model(MODEL), kv_transfer_config=both, **MEMORY) as llm:
            assert ask(llm, prompts, 6) == expected
            return flush(llm)[HITS]

    far = role("kv_both", mooncake_master)
    assert hits(near("here"), far) == 0
    assert hits(near("there"), far) == 2 * 288
    assert hits(near("here")) == hits(near("there")) == hits(far) == 2 * 288


class Snatched(WrappedStore):
    """Before every other read somebody else removes some of the keys."""

    def __init__(self, inner: Store, thief: Store) -> None:
        super().__init__(inner)
        self.thief = thief
        self.num_reads = 0

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        self.num_reads += 1
        if self.num_reads % 2:
            self.thief.remove(keys[self.num_reads % 3 :: 2])
        return self.inner.get(keys, buffers)


def test_keys_removed_between_lookup_and_load_are_misses(mooncake_master: MooncakeMaster, lender: Lender) -> None:
    """65"""
    prompts = tuple(prompt_of(300, seed) for seed in range(4))
    expected = cold(prompts, 6)
    address = {"master_server_address": mooncake_master.address}
    thief = open_mooncake(address)
    store = Snatched(open_mooncake(address), thief)
    config = {"kv_connector": "StoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"store": store}}
    with LLM(tiny_model(MODEL), kv_transfer_config=config, **MEMORY) as llm:
        assert ask(llm, prompts, 6) == expected
        for _ in range(4):
            flush(llm)
            assert ask(llm, prompts, 6) == expected
        flush(llm)
        stats = llm.stats()
        assert stats["kv_load_failures"] > 0
        assert stats["kv_offload_load_misses"] > 0
        assert stats[HITS] > 0
        assert stats["kv_integrity_failures"] == 0
    thief.close()


def test_a_segment_too_small_holds_what_it_can(mooncake_master: MooncakeMaster) -> None:
    lender = Lender(mooncake_master.address, 2**24)
    prompts = tuple(prompt_of(500, seed) for seed in range(12))
    expected = cold(prompts, 3)
    with engine(mooncake_master) as llm:
        for _ in range(2):
            for index, prompt in enumerate(prompts):
                assert ask(llm, [prompt], 3) == expected[index : index + 1]
                flush(llm)
        stats = llm.stats()
        assert stats["kv_offload_allocation_failure"] > 0
        assert stats["kv_offload_store_objects"] > 0
    assert lender.end() == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lender_that_ends_takes_its_objects_along_and_nothing_else(
    signal_number: int, mooncake_master: MooncakeMaster, lender: Lender
) -> None:
    prompts = tuple(prompt_of(300, seed) for seed in range(3))
    expected = cold(prompts, 6)
    with engine(mooncake_master) as llm:
        assert ask(llm, prompts, 6) == expected
        flush(llm)
        lender.end(signal_number)
        assert ask(llm, prompts, 6) == expected
        flush(llm)
        another = Lender(mooncake_master.address)
        # The master forgets a process that was killed after some seconds; until then its objects seem to be there.
        wait_for(lambda: ask(llm, prompts, 6) == expected and flush(llm)[HITS] >= 3 * 288, 60)
    assert another.end() == 0


def test_a_master_that_is_started_by_the_lender_ends_with_it(mooncake_package: None) -> None:
    from dalsegno.store.mooncake.master import free_port

    port = free_port()
    lender = Lender(f"127.0.0.1:{port}", 2**24, "--with-master")
    store = open_mooncake({"master_server_address": f"127.0.0.1:{port}"})
    store.close()
    assert lender.end() == 0
    with pytest.raises(Exception, match="no Mooncake master answers"):
        open_mooncake({"master_server_address": f"127.0.0.1:{port}"})
