"""A small file system, and how to fill it."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["fill", "mounted"]


def mounted(path: Path) -> Iterator[Path]:
    """Mount a file system of 24 MiB at `path`, which is made; the test that needs it is skipped where that fails."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED: a small file system needs the right to mount: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room; return the file that takes it."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast
