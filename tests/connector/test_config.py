"""What can be asked of a connector, and that everything else is refused by name with what is allowed."""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.config import CacheConfig
from dalsegno.connector.base import SchedulerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import CONNECTORS, ConnectorContext, create_connector
from dalsegno.connector.store.settings import StoreSettings
from dalsegno.engine.options import EngineOptions
from dalsegno.errors import OptionError
from dalsegno.testing.builders import make_layout
from dalsegno.testing.fake_worker import FakeClock
from tests.cli.stand_in import Engines, run
from tests.connector.third_party import ClassConnector

THIRD_PARTY = "tests.connector.third_party"
STORE = {"kv_connector": "StoreConnector", "kv_role": "kv_both"}


def context() -> ConnectorContext:
    config = CacheConfig(32, 16)
    return ConnectorContext(make_layout("as", config), config, {}, FakeClock())


def refusal(given: Any) -> str:
    with pytest.raises(OptionError) as caught:
        create_connector(KVTransferConfig.parse(given), context())
    return str(caught.value)


# The option.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", ["no JSON", "{"]),
        ("", ["no JSON"]),
        ("null", ["must be an object", "None"]),
        ("[]", ["must be an object"]),
        (3, ["must be an object", "3"]),
        ({}, ["kv_connector is missing", "kv_role"]),
        ({1: 2}, ["must be an object"]),
        ({"kv_connector": 5}, ["kv_connector must be a name", "5"]),
        ({"kv_connector": ""}, ["kv_connector must be a name"]),
        ({**STORE, "kv_role": "both"}, ["kv_role", "'both'", "kv_producer, kv_consumer, kv_both"]),
        ({**STORE, "kv_role": ["kv_both"]}, ["kv_role", "kv_producer, kv_consumer, kv_both"]),
        ({**STORE, "kv_load_failure_policy": "ignore"}, ["kv_load_failure_policy", "'ignore'", "recompute or fail"]),
        ({**STORE, "kv_connector_extra_config": []}, ["kv_connector_extra_config", "[]"]),
        ({**STORE, "kv_connector_module_path": 3}, ["kv_connector_module_path must be text"]),
        ({**STORE, "engine_id": 3}, ["engine_id must be text"]),
        ({**STORE, "kv_rol": "kv_both"}, ["'kv_rol'", "did you mean kv_role"]),
        ({**STORE, "watermark": 1}, ["'watermark'", "valid names", "kv_connector_extra_config"]),
        ({**STORE, "kv_rank": 0}, ["kv_rank=0"]),
        ({**STORE, "kv_ip": "127.0.0.1"}, ["kv_ip='127.0.0.1'"]),
        ({**STORE, "kv_buffer_size": 1e9}, ["kv_buffer_size"]),
        ({**STORE, "kv_parallel_size": 2}, ["kv_parallel_size=2"]),
        ({**STORE, "kv_buffer_device": "cuda"}, ["kv_buffer_device='cuda'"]),
        ({**STORE, "enable_permute_local_kv": True}, ["enable_permute_local_kv=True"]),
    ],
)
def test_a_wrong_config_is_refused_by_name_in_python_and_json(given: Any, words: list[str]) -> None:
    forms = [given] if isinstance(given, str) or given == {1: 2} else [given, json.dumps(given)]
    for form in forms:
        message = refusal(form)
        assert all(word in message for word in words), message
        with pytest.raises(OptionError, match="kv_"):
            EngineOptions.from_keywords({"kv_transfer_config": form})


def test_what_vllm_has_besides_is_accepted_where_it_asks_for_nothing() -> None:
    plain = KVTransferConfig.parse(STORE)
    extra = {"kv_port": 14579, "kv_buffer_device": "cpu", "enable_permute_local_kv": False, "kv_rank": None}
    assert KVTransferConfig.parse({**STORE, **extra}) == KVTransferConfig.parse(json.dumps({**STORE, **extra})) == plain
    assert KVTransferConfig.parse({"kv_connector": "StoreConnector"}) == plain


@pytest.mark.parametrize("name", ["StoreConnectr", "storeconnector", "LMCacheConnectorV1", "NixlConnector"])
def test_an_unknown_connector_is_refused_with_those_there_are(name: str) -> None:
    message = refusal({"kv_connector": name})
    assert repr(name) in message
    assert "kv_connector_module_path" in message
    assert all(known in message for known in CONNECTORS)
    assert "did you mean" not in message, "others' connectors have names that are like ours and do something else"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stor": "memory"}, ["stor", "store"]),
        ({"store": "redis"}, ["'redis'", "embedded", "memory"]),
        ({"store": "memory", "path": "x"}, ["'path'"]),
        ({"store": "memory", "watermark": 1}, ["'watermark'"]),
        ({"store": "memory", "bytes": -1}, ["bytes", "-1"]),
        ({"store": "embedded"}, ["path"]),
        ({"store": "embedded", "path": 3}, ["path", "3"]),
        ({}, ["path"]),
        ({"store": "memory", "store_block_size": 0}, ["store_block_size", "0"]),
        ({"store": "memory", "store_block_size": 33}, ["store_block_size", "multiple", "block_size=32", "33"]),
        ({"store": "memory", "store_block_size": "64"}, ["store_block_size", "'64'"]),
        ({"store": "memory", "max_state_probes": 0}, ["max_state_probes", "0"]),
        ({"store": "memory", "max_store_backlog_bytes": -1}, ["max_store_backlog_bytes", "-1"]),
        ({"store": "memory", "max_store_backlog_bytes": 1.5}, ["max_store_backlog_bytes", "1.5"]),
        ({"store": "memory", "enable_lookup": 1}, ["enable_lookup", "true or false", "1"]),
        ({"store": "memory", "enable_lookup": None}, ["enable_lookup", "true or false", "None"]),
        ({"store": "memory", "load_async": "no"}, ["load_async", "'no'"]),
        ({"store": "memory", "lookup_async": 0}, ["lookup_async", "0"]),
        ({"store": "memory", "save_decode_cache": "yes"}, ["save_decode_cache", "'yes'"]),
        ({"store": "memory", "lookup_timeout_s": 0}, ["lookup_timeout_s", "0"]),
        ({"store": "memory", "lookup_timeout_s": float("inf")}, ["lookup_timeout_s", "inf"]),
        ({"store": "memory", "pressure_pause_s": -1}, ["pressure_pause_s", "-1"]),
        ({"store": "memory", "cache_prefix": 3}, ["cache_prefix", "3"]),
        ({"store": "memory", "offload_worker": "gpu"}, ["offload_worker", "'gpu'", "thread", "process"]),
        ({"store": "memory", "store_tp_size": 2}, ["kv_connector_extra_config", "store_tp_size=2", "=1"]),
        ({"store": "memory", "enable_group_semantics": True}, ["enable_group_semantics=True"]),
        ({"store": "memory", "prefill_tp_sizes": [2, 4]}, ["prefill_tp_sizes=[2, 4]"]),
    ],
)
def test_a_wrong_setting_of_the_store_connector_is_refused_by_name(
    settings: Mapping[str, Any], words: list[str]
) -> None:
    message = refusal({**STORE, "kv_connector_extra_config": settings})
    assert all(word in message for word in words), message


def test_the_log_says_which_engines_share_a_store(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dalsegno")
    for prefix in ("a", "a", "b"):
        settings = {"store": "memory", "cache_prefix": prefix}
        given = {**STORE, "kv_role": "kv_consumer", "kv_connector_extra_config": settings}
        scheduler, workers = create_connector(KVTransferConfig.parse(given), context())
        scheduler.shutdown()
        for worker in workers:
            worker.shutdown()
    first, second, other = (record.getMessage() for record in caplog.records)
    assert first == second != other
    assert re.fullmatch(r"StoreConnector: kv_consumer, namespace [0-9a-f]{32}", first)


def test_what_vllms_connector_has_besides_is_accepted_where_it_asks_for_nothing() -> None:
    extra = {"enable_group_semantics": False, "enable_store_tp_lcm": False, "prefill_tp_sizes": [1], "store_tp_size": 1}
    settings = {"store": "memory", "bytes": 2**20}
    parsed = [
        StoreSettings.parse(KVTransferConfig.parse({**STORE, "kv_connector_extra_config": given}), 32)
        for given in (settings, {**settings, **extra})
    ]
    assert parsed[0] == parsed[1]


def test_the_null_connector_has_no_settings() -> None:
    assert "'store'" in refusal({"kv_connector": "NullConnector", "kv_connector_extra_config": {"store": "memory"}})


# The registry.


@pytest.mark.parametrize("name", ["ClassConnector", "function_connector"])
def test_a_third_partys_connector_is_made_from_its_module(name: str) -> None:
    config = KVTransferConfig.parse({"kv_connector": name, "kv_connector_module_path": THIRD_PARTY})
    scheduler, _ = create_connector(config, context())
    assert isinstance(scheduler, ClassConnector)


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("ClassConnector", "tests.connector.nowhere", ["'tests.connector.nowhere' cannot be imported"]),
        ("ClassConnectr", THIRD_PARTY, [THIRD_PARTY, "no connector 'ClassConnectr'"]),
        ("NotOneAtAll", THIRD_PARTY, [THIRD_PARTY, "no connector 'NotOneAtAll'"]),
        ("OneSided", THIRD_PARTY, ["'OneSided'", "SchedulerConnector and a sequence of 1 WorkerConnector", "'worker'"]),
        ("ClassConnector", "", ["kv_connector_module_path"]),
        ("ClassConnector", ".third_party", ["kv_connector_module_path"]),
    ],
)
def test_a_third_partys_connector_that_is_none_is_refused(name: str, module: str, words: list[str]) -> None:
    message = refusal({"kv_connector": name, "kv_connector_module_path": module})
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["NullConnector", "StoreConnector", "MooncakeStoreConnector"])
def test_naming_one_connector_imports_no_other(name: str) -> None:
    script = """
import sys
import dalsegno.connector.registry as registry
assert not {path for path in registry.CONNECTORS.values() if path in sys.modules}, "loaded unasked"
registry.create_connector(*__import__("pickle").loads(bytes.fromhex(sys.argv[1])))
print(*sorted({path for path in registry.CONNECTORS.values() if path in sys.modules}))
"""
    extra = {"store": "memory"} if "StoreConnector" in name else {}
    pickled = pickle.dumps((KVTransferConfig(name, kv_connector_extra_config=extra), context())).hex()
    done = subprocess.run([sys.executable, "-c", script, pickled], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [CONNECTORS[name]]


def test_every_connector_of_the_registry_can_be_made() -> None:
    for name in CONNECTORS:
        extra: dict[str, Any] = {"store": "memory"} if "StoreConnector" in name else {}
        if name == "MultiConnector":
            extra = {"connectors": [{"kv_connector": "NullConnector"}]}
        scheduler, _ = create_connector(KVTransferConfig(name, kv_connector_extra_config=extra), context())
        assert isinstance(scheduler, SchedulerConnector)


# Options of the engine.


def test_the_short_form_is_the_embedded_store_in_both_roles(tmp_path: Path) -> None:
    long = {"store": "embedded", "path": str(tmp_path), "bytes": 2**30}
    short = EngineOptions.from_keywords({"kv_store": tmp_path, "kv_store_bytes": 2**30}).transfer_config()
    assert short == KVTransferConfig("StoreConnector", "kv_both", long)
    spelled = {**STORE, "kv_connector_extra_config": long}
    for form in (spelled, json.dumps(spelled)):
        assert EngineOptions.from_keywords({"kv_transfer_config": form}).transfer_config() == short
    assert EngineOptions().transfer_config() is None


def test_the_short_form_of_mooncake_lends_what_is_said(tmp_path: Path) -> None:
    options = {"kv_store": "mooncake://host:7", "kv_store_bytes": 2**30}
    settings = {"store": "mooncake", "master_server_address": "host:7", "global_segment_size": 2**30}
    found = EngineOptions.from_keywords(options).transfer_config()
    assert found == KVTransferConfig("MooncakeStoreConnector", "kv_both", settings)
    found = EngineOptions(kv_store="mooncake://host").transfer_config()
    assert found is not None
    assert found.kv_connector_extra_config == {"store": "mooncake", "master_server_address": "host:50051"}


def test_vllms_name_means_mooncake_which_is_looked_up_beside_the_steps() -> None:
    config = KVTransferConfig.parse({"kv_connector": "MooncakeStoreConnector"})
    settings = StoreSettings.parse(config, 16)
    assert settings.store == {"store": "mooncake"}
    assert (settings.lookup_async, settings.uses_process) == (True, False)
    explicit = replace(settings, lookup_async=False, offload_worker="process")
    assert explicit.lookup_async is False
    assert explicit.uses_process is (sys.platform == "linux")
    assert explicit.process_store["global_segment_size"] == 0, "the memory is the engine's to lend"
    local = StoreSettings.parse(KVTransferConfig.parse({"kv_connector": "StoreConnector"}), 16)
    assert (local.lookup_async, local.uses_process) == (False, sys.platform == "linux")
    given = {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": {"store": "memory"}}
    assert StoreSettings.parse(KVTransferConfig.parse(given), 16).store == {"store": "memory"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_store": "d", "kv_transfer_config": STORE}, ["kv_store='d'", "kv_transfer_config"]),
        ({"kv_store_bytes": 10**9, "kv_transfer_config": STORE}, ["kv_store_bytes", "kv_transfer_config"]),
        ({"kv_store_bytes": 10**9}, ["kv_store_bytes", "needs kv_store"]),
        ({"kv_store": ""}, ["kv_store must be a folder", "mooncake://HOST:PORT"]),
        ({"kv_store": "mooncake://"}, ["HOST:PORT"]),
        ({"kv_store": "mooncake://host:port"}, ["HOST:PORT", "'host:port'"]),
        ({"kv_store": "redis://host:1"}, ["mooncake://HOST:PORT", "'redis://host:1'"]),
        ({"kv_store": "mooncake://host:1", "kv_store_bytes": -1}, ["kv_store_bytes", "-1"]),
        ({"kv_store": 3}, ["kv_store must be a folder", "3"]),
        ({"kv_store": "d", "kv_store_bytes": 0}, ["kv_store_bytes", "0"]),
        ({"kv_store": "d", "kv_store_bytes": 1e9}, ["kv_store_bytes", "1000000000.0"]),
        ({"kv_store": "d", "enable_prefix_caching": False}, ["connector", "enable_prefix_caching=True"]),
        ({"kv_transfer_config": STORE, "enable_prefix_caching": False}, ["connector", "enable_prefix_caching=True"]),
        ({"kv_store": "d", "device": "cuda"}, ["connector", "device='cpu'", "'cuda'"]),
        ({"kv_store": "d", "device": "cuda:1"}, ["connector", "device='cpu'", "'cuda:1'"]),
        ({"kv_transfer_config": {"kv_connector": None}}, ["kv_connector is missing"]),
        ({"kv_transfer_config": "[" * 100_000}, ["kv_transfer_config is no JSON"]),
        ({"kv_transfer_config": "9" * 5000}, ["kv_transfer_config is no JSON"]),
        ({"kv_load_timeout_s": 0}, ["kv_load_timeout_s", "0"]),
        ({"kv_job_timeout_s": "x"}, ["kv_job_timeout_s", "'x'"]),
        ({"kv_close_timeout_s": -1}, ["kv_close_timeout_s", "-1"]),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(options: Mapping[str, Any], words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        EngineOptions.from_keywords(options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-transfer-config", "{"], ["kv_transfer_config is no JSON"]),
        (["--kv-transfer-config", '{"kv_role": "kv_both"}'], ["kv_connector is missing"]),
        (["--kv-transfer-config", '{"kv_connector": "N", "kv_role": "x"}'], ["kv_role", "kv_producer"]),
        (["--kv-store", "d", "--kv-transfer-config", json.dumps(STORE)], ["kv_store='d'", "give one of them"]),
        (["--kv-store-bytes", "5"], ["needs kv_store"]),
        (["--kv-store", "d", "--no-enable-prefix-caching"], ["enable_prefix_caching=True"]),
        (["--kv-store", "d", "--device", "cuda"], ["device='cpu'"]),
    ],
)
def test_the_command_line_refuses_them_the_same_before_anything_is_loaded(
    flags: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch)
    result = run("generate", "m", "-p", "fox", *flags)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert engines.models == []


def test_the_flags_of_the_short_form_set_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    result = run("generate", "m", "-p", "fox", "--max-tokens", "1", "--kv-store", "d", "--kv-store-bytes", "1073741824")
    assert result.exit_code == 0, result.stderr
    assert engines.options == [EngineOptions(kv_store="d", kv_store_bytes=2**30)]
