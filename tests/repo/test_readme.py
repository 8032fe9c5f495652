"""What the README tells a newcomer to type works as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.models.registry import FAMILIES
from tests.repo.documents import code_blocks
from tests.repo.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    """Return the indented lines of a page that start the project's own command, as argument lists."""
    prefix = "    .venv/bin/dalsegno "
    return [line.removeprefix(prefix).split() for line in page.splitlines() if line.startswith(prefix)]


@pytest.mark.slow
def test_the_commands_and_the_example_run_as_printed(tmp_path: Path) -> None:
    for arguments in commands(README):
        program = [str(Path(sys.executable).with_name("dalsegno")), *arguments]
        subprocess.run(program, cwd=tmp_path, check=True, capture_output=True, text=True)
    (example,) = code_blocks(README, "python")
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert " of " in done.stdout


def test_the_models_it_lists_are_those_that_can_be_served() -> None:
    listed = re.findall(r"`(\w+(?:ForCausalLM|ForConditionalGeneration))`", README)
    assert sorted(listed) == sorted(FAMILIES)


def test_commands_and_code_are_taken_from_a_page() -> None:
    page = "text\n\n    .venv/bin/dalsegno demo --turns 2\n    other\n\n```python\na = 1\n```\n```toml\nb\n```\n"
    assert commands(page) == [["demo", "--turns", "2"]]
    assert code_blocks(page, "python") == ["a = 1\n"]
    assert commands(README)
    assert "make demo" in README
    assert "make test" in README
