"""What `.ci/install-mooncake` says where Mooncake cannot be installed."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.repo.source import ROOT

NO_INDEX = """\
  ERROR: No matching distribution found for setuptools>=77

note: This error originates from a subprocess, and is likely not a problem with pip.
"""
NO_LIBRARY = "Traceback (most recent call last):\nImportError: libibverbs.so.1: cannot open shared object file"


@pytest.mark.parametrize(
    ("pip_status", "pip_says", "import_says", "words"),
    [
        (1, NO_INDEX, "ModuleNotFoundError: No module named 'mooncake'", ["No matching distribution found for setup"]),
        (1, "killed", "", ["not installed: killed"]),
        (0, "", NO_LIBRARY, ["libibverbs.so.1", "libibverbs1, libnuma1 and libcurl4"]),
    ],
)
def test_it_fails_and_says_why(
    pip_status: int, pip_says: str, import_says: str, words: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nif [ $1 = -m ]; then cat {tmp_path}/pip >&2; exit {pip_status}; fi\n"
        f"cat {tmp_path}/import >&2; exit 1\n"
    )
    python.chmod(0o755)
    (tmp_path / "pip").write_text(pip_says)
    (tmp_path / "import").write_text(import_says)
    for tool in ("sh", "mktemp", "rm", "grep", "tail", "id", "cat"):  # and no apt-get
        [found] = [place for place in (Path("/bin") / tool, Path("/usr/bin") / tool) if place.exists()][:1]
        (tmp_path / tool).symlink_to(found)
    command = [ROOT / ".ci/install-mooncake", python]
    done = subprocess.run(command, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Mooncake is not installed: "), done.stderr
    assert all(word in done.stderr for word in words), done.stderr
