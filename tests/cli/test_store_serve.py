"""`dalsegno store serve` and the other commands on a Mooncake store."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from dalsegno.cli.main import app
from dalsegno.store.base import Status
from dalsegno.store.mooncake import open_mooncake
from dalsegno.store.mooncake.master import MooncakeMaster, free_port
from dalsegno.testing.store_contract import make_key, pattern


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["store", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def serve(*arguments: str) -> "subprocess.Popen[str]":
    """Start the command and wait for its line, which says where metrics are exactly if the master is its own."""
    code = "from dalsegno.cli.main import app; app()"
    command = [sys.executable, "-c", code, "store", "serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("lending 16,777,216 bytes to mooncake://127.0.0.1:"), line
    found = re.search(r"metrics at (\S+/metrics);", line)
    assert (found is not None) == ("--with-master" in arguments), line
    if found is not None:
        with urllib.request.urlopen(found[1], timeout=10) as page:
            assert b"master_total_capacity_bytes 16777216" in page.read()
    return process


def end(process: "subprocess.Popen[str]", number: int) -> int:
    process.send_signal(number)
    _, _ = process.communicate(timeout=60)
    return process.returncode


def put_and_get(port: int, number: int) -> list[Status]:
    store = open_mooncake({"master_server_address": f"127.0.0.1:{port}"})
    payload, target = pattern(number, 1000), bytearray(1000)
    found = store.put([make_key(number)], [[memoryview(payload)]])
    found += store.get([make_key(number)], [[memoryview(target)]])
    assert target == payload or Status.OK not in found
    store.close()
    return found


def test_it_lends_with_a_master_of_its_own_until_it_is_stopped(mooncake_package: None) -> None:
    port = free_port()
    url = f"mooncake://127.0.0.1:{port}"
    process = serve(url, "--segment-bytes", "16MB", "--with-master")
    try:
        assert put_and_get(port, 1) == put_and_get(port, 2) == [Status.OK] * 2
        assert run("clear", url, "--json")[1].splitlines()[-1] == '{"removed": 2}'
    finally:
        assert end(process, signal.SIGINT) == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 1):
        pass


def test_it_lends_to_a_master_that_runs_elsewhere(mooncake_master: MooncakeMaster) -> None:
    process = serve(f"mooncake://{mooncake_master.address}", "--segment-bytes", str(2**24))
    try:
        assert put_and_get(mooncake_master.port, 1) == [Status.OK] * 2
    finally:
        assert end(process, signal.SIGTERM) == 0
    assert put_and_get(mooncake_master.port, 2) == [Status.NO_ROOM, Status.MISS]


def test_a_port_in_use_and_a_master_that_is_not_there_are_refused(mooncake_package: None, listening: int) -> None:
    status, output = run("serve", f"mooncake://127.0.0.1:{listening}", "--segment-bytes", "16MB", "--with-master")
    assert (status, f"port {listening} is in use" in output) == (2, True)
    status, output = run("serve", f"mooncake://127.0.0.1:{free_port()}", "--segment-bytes", "16MB")
    assert (status, "no Mooncake master answers" in output) == (2, True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    status, output = run("serve", "mooncake://127.0.0.1", "--segment-bytes", "16MB")
    assert (status, "libibverbs1" in output, "pip install mooncake-transfer-engine" in output) == (2, True, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "folder", "--segment-bytes", "16MB"], "mooncake://HOST:PORT, got 'folder'"),
        (["serve", "mooncake://a b", "--segment-bytes", "16MB"], "HOST:PORT, got 'a b'"),
        (["serve", "mooncake://host", "--segment-bytes", "many"], "such as \"4GB\", got 'many'"),
        (["serve", "mooncake://host", "--segment-bytes", "0"], "segment_bytes must be at least 16777216, got 0"),
        (["serve", "mooncake://host", "--segment-bytes", "1000"], "segment_bytes must be at least 16777216, got 1000"),
        (["stats", "mooncake://host:1"], "looks into folders, got 'mooncake://host:1'"),
        (["ls", "mooncake://host:1"], "looks into folders"),
        (["verify", "mooncake://host:1"], "looks into folders"),
        (["clear", "redis://host:1"], "mooncake://HOST:PORT, got 'redis://host:1'"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(arguments: list[str], words: str) -> None:
    status, output = run(*arguments)
    assert status == 2
    [line] = output.splitlines()
    assert words in line
