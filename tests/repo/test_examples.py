"""The examples run as they stand, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "prefill_and_decode.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def check(done: "subprocess.CompletedProcess[str]") -> None:
    """Every prompt is stored and found up to its last boundary, and answered as cold."""
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 3
    for tokens, stored, found, *_, same in rows:
        assert int(stored) == int(tokens) // 16 * 16
        assert int(found) == (int(tokens) - 1) // 16 * 16
        assert same == "yes"


def test_prefill_and_decode_on_a_folder(tmp_path: Path) -> None:
    check(run("--store", str(tmp_path)))


@pytest.mark.usefixtures("mooncake_package")
def test_prefill_and_decode_on_a_mooncake_of_its_own() -> None:
    check(run())
