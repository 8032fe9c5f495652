"""How a MultiConnector is asked for: in Python, as JSON, on the command line; and what is refused by name."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dalsegno import LLM, SamplingParams
from dalsegno.config import CacheConfig
from dalsegno.connector.base import SchedulerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, Sides, create_connector
from dalsegno.engine.options import EngineOptions
from dalsegno.errors import OptionError
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.wrapped import WrappedStore
from dalsegno.testing.builders import make_layout
from dalsegno.testing.fake_worker import FakeClock, FakeWorker
from tests.cli.stand_in import Engines, run
from tests.connector.children import NULL, Hooked, MultiEngine
from tests.matrix.tiny_models import tiny_model

MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}


def context(world_size: int = 1) -> ConnectorContext:
    config = CacheConfig(32, 16)
    ranks = range(world_size)
    return ConnectorContext(make_layout("as", config), config, {}, FakeClock(), ranks, world_size)


def create(extra: Any, world_size: int = 1, **given: Any) -> Sides:
    config = KVTransferConfig.parse({**MULTI, "kv_connector_extra_config": extra, **given})
    return create_connector(config, context(world_size))


STORE = {"kv_connector": "StoreConnector", "kv_connector_extra_config": {"store": "memory"}}
THIRD_PARTY = {"kv_connector": "NotOneAtAll", "kv_connector_module_path": "tests.connector.third_party"}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ["connectors must be a list", "kv_connector", "None"]),
        ({"connectors": []}, ["connectors must be a list", "[]"]),
        ({"connectors": {}}, ["connectors must be a list", "{}"]),
        ({"connectors": NULL}, ["connectors must be a list"]),
        ({"connectors": "NullConnector"}, ["connectors must be a list", "'NullConnector'"]),
        ({"connectors": 3}, ["connectors must be a list", "3"]),
        ({"connector": [NULL]}, ["'connector'", "did you mean connectors"]),
        ({"connectors": [NULL], "store": "memory"}, ["MultiConnector", "'store'", "connectors"]),
        ({"connectors": [NULL, 3]}, ["connectors[1]", "must be an object", "3"]),
        ({"connectors": ["NullConnector"]}, ["connectors[0]", "must be an object", "'NullConnector'"]),
        ({"connectors": [json.dumps(NULL)]}, ["connectors[0]", "must be an object"]),
        ({"connectors": [{}]}, ["connectors[0]", "kv_connector is missing"]),
        ({"connectors": [NULL, {"kv_connector": "Nul"}]}, ["connectors[1]", "'Nul'"]),
        ({"connectors": [{**NULL, "kv_roll": "kv_both"}]}, ["connectors[0]", "'kv_roll'", "did you mean kv_role"]),
        ({"connectors": [{**NULL, "kv_role": "both"}]}, ["connectors[0]", "kv_role", "'both'"]),
        ({"connectors": [{**NULL, "kv_load_failure_policy": "fail"}]}, ["connectors[0]", "'fail'", "'recompute'"]),
        ({"connectors": [{**NULL, "kv_load_failure_policy": "x"}]}, ["connectors[0]", "'x'", "recompute or fail"]),
        ({"connectors": [NULL, {**NULL, "kv_connector_extra_config": {"a": 1}}]}, ["connectors[1]", "'a'"]),
        (
            {"connectors": [{**STORE, "kv_connector_extra_config": {"store": "memory", "load_async": 1}}]},
            ["connectors[0]", "load_async", "true or false"],
        ),
        ({"connectors": [NULL, THIRD_PARTY]}, ["connectors[1]", "'NotOneAtAll'", "tests.connector.third_party"]),
        (
            {"connectors": [NULL, {**MULTI, "kv_connector_extra_config": {"connectors": [NULL, NULL, 5]}}]},
            ["connectors[1]", "connectors[2]", "5"],
        ),
    ],
)
def test_what_is_no_list_of_connectors_is_refused_by_name(extra: Any, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        create(extra)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("given", [None, "same", "null"])
def test_the_policy_for_failed_loads_is_that_of_all(policy: str, given: str | None) -> None:
    """It is the engine's, so a child cannot have one of its own."""
    seen = []

    class Noting(Hooked):
        def create(self, config: KVTransferConfig, context: ConnectorContext) -> Sides:
            seen.append((config.kv_role, config.kv_load_failure_policy))
            return super().create(config, context)

    child = Noting(NULL).child() | ({"kv_load_failure_policy": policy if given == "same" else None} if given else {})
    create({"connectors": [child]}, kv_load_failure_policy=policy, kv_role="kv_consumer")
    create({"connectors": [{**child, "kv_role": "kv_producer"}]}, kv_load_failure_policy=policy, kv_role="kv_both")
    assert seen == [("kv_consumer", policy), ("kv_producer", policy)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_has_a_side_of_its_own_in_every_child(world_size: int) -> None:
    third_party = {"kv_connector": "ClassConnector", "kv_connector_module_path": "tests.connector.third_party"}
    nested = {**MULTI, "kv_connector_extra_config": {"connectors": [NULL, STORE]}}
    scheduler, workers = create({"connectors": (third_party, nested, STORE)}, world_size)
    assert isinstance(scheduler, SchedulerConnector)
    assert len(workers) == len({id(worker) for worker in workers}) == world_size
    for worker in workers:
        worker.register_kv_caches(FakeWorker(context().layout).memories[0])
        assert not worker.needs_shared_memory
        worker.shutdown()
    scheduler.shutdown()


def test_memory_is_shared_with_other_processes_when_one_child_needs_it(tmp_path: Path) -> None:
    embedded = {"store": "embedded", "path": str(tmp_path), "bytes": 2**24, "offload_worker": "process"}
    child = {"kv_connector": "StoreConnector", "kv_connector_extra_config": embedded}
    for children in ([NULL, child], [child, NULL]):
        scheduler, (worker,) = create({"connectors": children})
        assert worker.needs_shared_memory
        worker.shutdown()
        scheduler.shutdown()


class Counted(WrappedStore):
    """A store that says whether it was closed."""

    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_children_made_before_one_that_cannot_be_are_shut_down(world_size: int) -> None:
    """Their stores are closed, once, although one of them raises at that too."""
    stores = [Counted(MemoryStore()), Counted(MemoryStore())]
    children: list[Any] = [
        {"kv_connector": "StoreConnector", "kv_connector_extra_config": {"store": store}} for store in stores
    ]
    raising = Hooked(NULL, lambda rank, name: raise_it(name))
    with pytest.raises(OptionError, match=r"connectors\[3\]"):
        create({"connectors": [children[0], raising.child(), children[1], {"kv_connector": "x"}]}, world_size)
    assert [store.num_closed for store in stores] == [1, 1]
    assert len(raising.calls) == world_size + 1


def raise_it(name: str) -> None:
    if name == "shutdown":
        raise RuntimeError("planted")


def test_a_child_that_raises_at_the_start_keeps_the_engine_from_starting() -> None:
    for name in ("bind_block_pool", "register_kv_caches", "on_progress"):

        def hook(rank: int | None, called: str, name: str = name) -> None:
            if called == name:
                raise RuntimeError("planted")

        with pytest.raises(RuntimeError, match="planted"):
            MultiEngine(NULL, Hooked(NULL, hook).child())


def test_what_raises_again_and_again_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def hook(rank: int | None, name: str) -> None:
        if name in ("saves", "get_finished"):
            raise RuntimeError("planted")

    with MultiEngine(NULL, Hooked(NULL, hook).child()) as engine, caplog.at_level(logging.ERROR):
        for number in range(3):
            engine.send(range(number, number + 50), 5)
        stats = engine.core.stats()
    told = [record for record in caplog.records if "MultiConnector" in record.message]
    assert sorted(record.message.split()[-2] for record in told) == ["get_finished", "saves"]
    assert all(record.exc_info for record in told)
    assert min(stats["kv_connector_1_errors"], stats["kv_connector_1_worker_errors"]) >= 3


# From outside.


def config_of(*folders: Path) -> dict[str, Any]:
    settings: list[dict[str, Any]] = [{"store": "embedded", "path": str(path), "bytes": 2**26} for path in folders]
    children = [{"kv_connector": "StoreConnector", "kv_connector_extra_config": extra} for extra in settings]
    return {**MULTI, "kv_connector_extra_config": {"connectors": [NULL, *children]}}


def test_the_command_line_takes_it_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines = Engines(monkeypatch)
    given = json.dumps(config_of(tmp_path))
    result = run("generate", "m", "-p", "fox", "--max-tokens", "1", "--kv-transfer-config", given)
    assert result.exit_code == 0, result.stderr
    [options] = engines.options
    assert options.transfer_config() == EngineOptions(kv_transfer_config=config_of(tmp_path)).transfer_config()
    assert options.transfer_config() == KVTransferConfig.parse(given)


@pytest.mark.parametrize("form", [json.dumps, lambda config: config])
def test_a_model_resumes_from_whichever_folder_is_left(form: Callable[[Any], Any], tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    prompt = random.Random(1).choices(range(4096), k=530)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    model = tiny_model("qwen3-next")

    def generate(config: Any) -> Any:
        with LLM(model, kv_transfer_config=form(config), kv_cache_memory_bytes=2**27, threads=1) as llm:
            [output] = llm.generate([prompt], greedy, False)
            return output, llm.stats()

    cold, stats = generate(config_of(near, far))
    assert cold.num_cached_tokens == 0
    for index in (1, 2):
        assert stats[f"kv_connector_{index}_kv_offload_jobs"] > 0
    hits = []
    for folders in ([near, far], [near], [far], [tmp_path / "new", far]):
        warm, stats = generate(config_of(*folders))
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert stats["kv_connector_errors"] == stats["kv_connector_worker_errors"] == 0
        hits.append(warm.num_cached_tokens)
    again, _ = generate(config_of(tmp_path / "new"))
    assert [*hits, again.num_cached_tokens] == [528] * 5


def test_every_child_of_a_running_engine_is_told_that_it_ends() -> None:
    stores = [Counted(MemoryStore()), Counted(MemoryStore())]
    children = [{"kv_connector": "StoreConnector", "kv_connector_extra_config": {"store": store}} for store in stores]
    with MultiEngine(children[0], Hooked(NULL, lambda rank, name: raise_it(name)).child(), children[1]) as engine:
        engine.send(range(50), 5)
    assert [store.num_closed for store in stores] == [1, 1]
