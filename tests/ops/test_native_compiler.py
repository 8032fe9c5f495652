"""Compiling the native kernels: once, into a private folder, whole or not at all, and never an error."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.ops.native.compiler import compiled_library

SOURCE = "int answer(void) { return 42; }\n"

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "small.c"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def _made(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "dalsegno").iterdir())


def test_a_library_is_compiled_once_and_again_when_the_source_changes(source: Path) -> None:
    library = compiled_library(source)
    assert library is not None
    before = library.stat()
    assert compiled_library(source) == library
    assert library.stat().st_mtime_ns == before.st_mtime_ns
    source.write_text(SOURCE.replace("42", "43"), encoding="utf-8")
    other = compiled_library(source)
    assert other is not None
    assert _made(source) == sorted([library, other])
    assert library != other


def test_the_folder_is_the_users_own(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert compiled_library(source) is not None
    folder = source.parent / "cache" / "dalsegno"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with caplog.at_level(logging.INFO):
        assert compiled_library(source) is None
    assert "can be written by others" in caplog.text


def test_what_does_not_compile_leaves_nothing_and_is_told_in_one_line(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("int answer(void) { return", encoding="utf-8")
    with caplog.at_level(logging.INFO):
        assert compiled_library(source) is None
    assert _made(source) == []
    assert len(caplog.records) == 1
    assert "could not be compiled" in caplog.text
    assert "error" in caplog.text


def test_a_cache_that_cannot_be_made_is_told(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    with caplog.at_level(logging.INFO):
        assert compiled_library(source) is None
    assert "could not be compiled" in caplog.text


def test_processes_that_compile_at_the_same_time_end_with_one_whole_library(source: Path) -> None:
    program = (
        "import ctypes, pathlib, sys\n"
        "from dalsegno.ops.native.compiler import compiled_library\n"
        "print(ctypes.CDLL(str(compiled_library(pathlib.Path(sys.argv[1])))).answer())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE, env=environment, text=True
        )
        for _ in range(4)
    ]
    assert [process.communicate(timeout=120)[0] for process in running] == ["42\n"] * 4
    assert len(_made(source)) == 1
