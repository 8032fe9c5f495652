"""Where Mooncake's settings come from, and that what cannot be done is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from dalsegno.engine.options import EngineOptions
from dalsegno.errors import OptionError
from dalsegno.store.base import Status
from dalsegno.store.mooncake.codes import Code, code_name, status_of
from dalsegno.store.mooncake.config import (
    MIN_SEGMENT_BYTES,
    MooncakeConfig,
    master_address,
    parse_bytes,
    split_address,
)

FILE = {
    "local_hostname": "node1",
    "metadata_server": "http://node0:8080/metadata",
    "master_server_address": "node0:50052",
    "global_segment_size": "4GB",
    "local_buffer_size": 2**30,
    "protocol": "RDMA",
    "device_name": "mlx5_0",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(FILE), encoding="utf-8")
    return {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_MASTER": "ignored:1"}


def test_a_file_of_mooncakes_own_is_read(environment: dict[str, str]) -> None:
    assert MooncakeConfig.from_settings({}, environment) == MooncakeConfig(
        master_server_address="node0:50052",
        local_hostname="node1",
        metadata_server="http://node0:8080/metadata",
        global_segment_size=2**32,
        local_buffer_size=2**30,
        protocol="rdma",
        device_name="mlx5_0",
        mode="embedded",
    )


def test_settings_go_before_the_file_key_by_key(environment: dict[str, str]) -> None:
    config = MooncakeConfig.from_settings({"master_server_address": "b:2", "global_segment_size": 0}, environment)
    assert (config.master_server_address, config.global_segment_size) == ("b:2", 0)
    assert (config.local_hostname, config.protocol) == ("node1", "rdma")


def test_variables_stand_in_for_a_file() -> None:
    variables = {
        "MOONCAKE_MASTER": "m",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_DEVICE": "",
        "MOONCAKE_LOCAL_HOSTNAME": "me",
        "MOONCAKE_TE_META_DATA_SERVER": "etcd://x",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "16 mb",
        "MOONCAKE_LOCAL_BUFFER_SIZE": "1k",
    }
    assert MooncakeConfig.from_settings({}, variables) == MooncakeConfig(
        "m:50051", "me", "etcd://x", 2**24, 1024, "tcp", "", "embedded"
    )


def test_a_host_is_known_by_the_address_from_which_it_reaches_the_master() -> None:
    assert MooncakeConfig("127.0.0.1:1").local_hostname == "127.0.0.1"
    assert MooncakeConfig("no-such-host.invalid:1").local_hostname
    assert MooncakeConfig("etcd://a:1;b:2").master_server_address == "etcd://a:1;b:2"


def test_a_master_may_be_named_as_kv_store_names_it() -> None:
    assert MooncakeConfig("mooncake://127.0.0.1:7") == MooncakeConfig("127.0.0.1:7")
    with pytest.raises(OptionError, match="HOST:PORT"):
        MooncakeConfig("mooncake://127.0.0.1:7/x")


def test_a_variable_that_asks_for_a_place_is_refused(environment: dict[str, str]) -> None:
    for others in ({"MOONCAKE_MASTER": "a:1"}, environment):
        with pytest.raises(OptionError, match="MOONCAKE_PREFERRED_SEGMENT"):
            MooncakeConfig.from_settings({}, {**others, "MOONCAKE_PREFERRED_SEGMENT": "b:1"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["master_server_address", "MOONCAKE_CONFIG_PATH"]),
        ({"master_server_address": "a:b"}, ["HOST:PORT", "'a:b'"]),
        ({"master_server_address": "a:70000"}, ["HOST:PORT", "70000"]),
        ({"master_server_address": 5}, ["master_server_address", "5"]),
        ({"master_server_addres": "a:1"}, ["'master_server_addres'", "did you mean master_server_address"]),
        ({"path": "x"}, ["the mooncake store", "'path'"]),
        ({"protocol": "carrier pigeon"}, ["protocol", "tcp or rdma", "carrier pigeon"]),
        ({"mode": "both"}, ["mode", "embedded or standalone-store", "both"]),
        ({"mode": "standalone-store", "global_segment_size": 2**24}, ["standalone-store", "must be 0"]),
        ({"global_segment_size": 1000}, ["global_segment_size", "at least 16777216", "1000"]),
        ({"global_segment_size": -1}, ["global_segment_size", "-1"]),
        ({"global_segment_size": 2**63}, ["global_segment_size", "9223372036854775808"]),
        ({"global_segment_size": "9" * 400 + "GB"}, ["global_segment_size", "999"]),
        ({"global_segment_size": True}, ["global_segment_size", "True"]),
        ({"local_buffer_size": "a lot"}, ["local_buffer_size", "4GB", "a lot"]),
        ({"enable_offload": True}, ["enable_offload=True", "only enable_offload=False"]),
        ({"enable_ssd_offload": True}, ["enable_ssd_offload=True"]),
        ({"tenant_id": "me"}, ["tenant_id='me'"]),
        ({"preferred_segment": True}, ["preferred_segment=True"]),
        ({"enable_client_http_server": True}, ["enable_client_http_server=True"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(settings: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    given = {"master_server_address": "a:1", **settings} if settings else {}
    with pytest.raises(OptionError) as caught:
        MooncakeConfig.from_settings(given, {})
    assert all(word in str(caught.value) for word in words), caught.value
    path = tmp_path / "file.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    with pytest.raises(OptionError):
        MooncakeConfig.from_settings({}, {"MOONCAKE_CONFIG_PATH": str(path)})


@pytest.mark.parametrize("given", [1, MIN_SEGMENT_BYTES - 1, 2**63])
def test_what_an_engine_cannot_lend_is_refused_by_the_name_of_its_option(given: int) -> None:
    with pytest.raises(OptionError, match=f"kv_store_bytes.*{given}"):
        EngineOptions(kv_store="mooncake://host:1", kv_store_bytes=given)


def test_settings_that_ask_for_nothing_are_accepted() -> None:
    off = {"enable_offload": False, "tenant_id": "default", "ssd_offload_path": "", "client_http_port": 9300}
    assert MooncakeConfig.from_settings({"master_server_address": "a:1", **off}, {}) == MooncakeConfig("a:1")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, None])
def test_a_file_that_is_none_is_refused_by_its_name(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match="MOONCAKE_CONFIG_PATH="):
        MooncakeConfig.from_settings({}, {"MOONCAKE_CONFIG_PATH": str(path)})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (7, 7), ("8", 8), ("7b", 7), ("1KB", 2**10), ("1.5 GB", 3 * 2**29), ("2TiB", 2**41), (" 3 M ", 3 * 2**20)],
)
def test_sizes_may_have_units(value: object, expected: int) -> None:
    assert parse_bytes("size", value) == expected


def test_a_url_names_a_master() -> None:
    assert master_address("mooncake://h:7") == "h:7"
    assert master_address("mooncake://h") == "h:50051"
    assert split_address("h.example-1:65535") == ("h.example-1", 65535)
    for wrong in ("h:7", "mooncake:/h:7", "mooncake://h:7/x", "mooncake://:7", "mooncake://h:0"):
        with pytest.raises(OptionError, match="HOST:PORT"):
            master_address(wrong)


def test_every_code_has_a_name_and_a_status() -> None:
    assert {code: status_of(code) for code in Code if status_of(code) is not Status.ERROR} == {
        Code.OK: Status.OK,
        Code.NO_AVAILABLE_HANDLE: Status.NO_ROOM,
        Code.REPLICA_IS_NOT_READY: Status.MISS,
        Code.OBJECT_NOT_FOUND: Status.MISS,
        Code.REPLICA_IS_GONE: Status.MISS,
        Code.OBJECT_ALREADY_EXISTS: Status.EXISTS,
        Code.CHECKSUM_MISMATCH: Status.CORRUPT,
    }
    assert code_name(-707) == "lease_expired"
    assert (code_name(-1300), status_of(-1300)) == ("code_1300", Status.ERROR)
