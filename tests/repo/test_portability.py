"""The repository works on any machine: no path of one machine and no package host is written down."""

import re
from collections.abc import Iterable

import pytest

from tests.repo.source import text_files

# Written so that no pattern matches its own source.
_PATTERNS = [
    re.compile(r"(?<![\w.~/-])[/](?:home|root|work|opt|mnt|tmp|Users|usr[/]local)[/][\w.-]"),
    re.compile(r"\b[A-Z]:[\\](?:Users|Temp)", re.IGNORECASE),
    re.compile(r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|conda[.]anaconda[.]org"),
    re.compile(r"(?:extra-)?index[-]url"),
]


def machine_bound(files: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line per place that names a path of one machine or a package host."""
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in files
        for number, line in enumerate(text.splitlines(), 1)
        if any(pattern.search(line) for pattern in _PATTERNS)
    ]


def test_no_file_names_a_path_of_one_machine_or_a_package_host() -> None:
    files = list(text_files())
    assert any(name == "Makefile" for name, _ in files)
    assert machine_bound(files) == []


@pytest.mark.parametrize(
    "line",
    [
        "model = '/" + "home/ada/model'",
        "cp /" + "tmp/x .",
        "path: /" + "usr/local/lib/x",
        "C:" + "\\Users\\ada",
        "https://files.python" + "hosted.org/x",
        "pip install --extra-index" + "-url x",
    ],
)
def test_a_machine_bound_line_is_found(line: str) -> None:
    assert machine_bound([("sample.md", f"fine\n{line}\n")]) == [f"sample.md:2: {line}"]


@pytest.mark.parametrize("line", ["../home/x", "tests/work/x", "https://example.com/root/x", "a/tmp/b", "/dev/null"])
def test_a_portable_line_passes(line: str) -> None:
    assert machine_bound([("sample.md", line)]) == []
