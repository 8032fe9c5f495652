"""`dalsegno store`: what it prints, what it removes, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dalsegno.cli.main import app
from dalsegno.store.base import Status
from dalsegno.store.embedded import EmbeddedStore
from dalsegno.testing.store_contract import make_key, pattern
from tests.store.objects import put_number


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["store", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> str:
    store = EmbeddedStore(tmp_path / "store", 2**22)
    for number in range(3):
        assert put_number(store, number) is Status.OK
    payload = [memoryview(pattern(1, 1000))]
    assert store.put([make_key(9, salt="x")], [payload]) == [Status.OK]
    store.close()
    return str(tmp_path / "store")


def test_stats_tell_how_full_it_is(folder: str) -> None:
    status, output = run("stats", folder, "--json")
    figures = json.loads(output)
    assert (status, figures["objects"], figures["capacity_bytes"]) == (0, 4, 2**22)
    status, output = run("stats", folder)
    assert status == 0
    assert "4,194,304" in output


def test_ls_lists_every_object(folder: str) -> None:
    status, output = run("ls", folder, "--json")
    found = [json.loads(line) for line in output.splitlines()]
    assert status == 0
    assert sorted(entry["hash"] for entry in found) == sorted(make_key(n).block_hash.hex() for n in (0, 1, 2, 9))
    assert run("ls", folder)[1].count("attention") == 4


def test_verify_passes_a_sound_store_and_fails_a_spoiled_one(folder: str) -> None:
    assert run("verify", folder, "--json") == (0, '{"objects": 4, "faults": []}\n')
    file = Path(folder) / "objects.lmdb"
    word = (2).to_bytes(8, "little") * 4
    assert word in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(word, bytes(32), 1))
    status, output = run("verify", folder)
    assert status == 1
    assert f"{make_key(2).text}: the checksum is wrong" in output


def test_a_damaged_store_is_told_and_left_where_it_is(folder: str) -> None:
    file = Path(folder) / "objects.lmdb"
    file.write_bytes(bytes(file.stat().st_size))
    for command in ("stats", "ls", "verify", "clear"):
        status, output = run(command, folder)
        assert status == 2
        assert "is damaged" in output
    assert not (Path(folder) / "aside").exists()


def test_clear_removes_one_salt_or_everything(folder: str) -> None:
    assert run("clear", folder, "--salt", "y")[1] == "removed 0 objects\n"
    assert run("clear", folder, "--salt", "x") == (0, "removed 1 objects\n")
    assert run("clear", folder, "--json") == (0, '{"removed": 3}\n')
    assert json.loads(run("stats", folder, "--json")[1])["used_bytes"] == 0


@pytest.mark.parametrize("command", ["stats", "ls", "verify", "clear"])
def test_a_wrong_folder_is_a_mistake_and_nothing_is_created(tmp_path: Path, command: str) -> None:
    status, output = run(command, str(tmp_path / "gone"))
    assert status == 2
    assert "cannot be opened as a store" in output
    status, output = run(command, str(tmp_path))
    assert status == 2
    assert "is no store" in output
    assert list(tmp_path.iterdir()) == []
