"""Benchmark scripts print rows of one form, or say that they did nothing."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"name", "value", "unit", "reference", "ratio", "command"}


def _run(script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "DALSEGNO_TRACES"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_the_control_plane_prints_every_figure_at_both_block_sizes_as_json() -> None:
    sizes = {"tokens": 2048, "short": 512, "cached": 3000, "few": 600, "repeats": 1, "steps": 2}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    rows = [json.loads(line) for line in _run("control_plane.py", "--json", *options).stdout.splitlines()]
    assert all(set(row) == FIELDS for row in rows)
    for row in rows:
        assert row["value"] > 0, row
        assert row["command"] == " ".join(["python", "benchmarks/control_plane.py", "--json", *options])
        if row["reference"] is not None:
            assert math.isclose(row["ratio"], row["value"] / row["reference"]), row
    names = {row["name"] for row in rows}
    assert len(names) == len(rows)
    for block_size in (528, 16):
        for figure in (
            "hash a new",
            "hash a prompt that extends",
            "list to u32",
            "full-hit lookup",
            "allocate",
            "step",
        ):
            found = [name for name in names if name.startswith(f"B={block_size}: ") and figure in name]
            assert any("2048 | 512" in name for name in found) == (figure != "step"), found
            assert any("3000 | 600 cached" in name for name in found), found


@pytest.mark.slow
def test_the_dialogues_are_skipped_loudly_without_the_traces() -> None:
    done = _run("tau_bench.py", "--json")
    assert done.stdout == ""
    assert "SKIPPED: DALSEGNO_TRACES" in done.stderr


@pytest.mark.slow
def test_mooncake_is_measured_beside_its_own_calls(mooncake_package: None) -> None:
    options = ["--objects", "8", "--kib", "256", "--parts", "4", "--rounds", "1"]
    rows = [json.loads(line) for line in _run("mooncake_store.py", "--json", *options).stdout.splitlines()]
    assert all(set(row) == FIELDS and row["value"] > 0 for row in rows)
    for call in ("put", "get"):
        [row] = [row for row in rows if row["name"] == f"Mooncake: {call}"]
        assert math.isclose(row["ratio"], row["value"] / row["reference"]), row
