"""What the package shows is documented and exported."""

import importlib

import pytest

import dalsegno
from tests.repo.public_names import MAX_DOCSTRING_LINES, export_violations, undocumented
from tests.repo.source import module_of, package_modules

GOOD = '''"""A module."""

from typing import override

__all__ = ["Table", "make"]

_limit = 3
logger = logging.getLogger(__name__)


class Table(Base):
    """A table."""

    @override
    def rows(self) -> int:
        return 1

    def _hidden(self) -> None: ...


def make() -> Table:
    """Make a table."""

    def inner() -> None: ...


def _helper() -> None: ...


@app.command()
def serve() -> None:
    """Serve."""
'''


def test_every_module_class_function_and_method_that_is_public_is_documented() -> None:
    assert undocumented(package_modules()) == []


def test_every_public_name_is_exported_and_every_exported_name_exists() -> None:
    assert export_violations(package_modules()) == []


def test_the_root_exports_the_api_and_nothing_else() -> None:
    assert set(dalsegno.__all__) == {"AsyncLLM", "LLM", "SamplingParams", "__version__"}
    assert [name for name in dalsegno.__all__ if name not in dir(dalsegno)] == []
    for name in ("LLM", "SamplingParams"):
        value = getattr(dalsegno, name)
        assert getattr(importlib.import_module(value.__module__), name) is value
    with pytest.raises(AttributeError, match="no attribute 'LLm'"):
        _ = dalsegno.LLm


def test_a_clean_module_passes() -> None:
    assert undocumented([module_of(GOOD)]) == []
    assert export_violations([module_of(GOOD)]) == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"""A module."""\n', "", "no module docstring"),
        ("A module.", "A module." + "\nline" * MAX_DOCSTRING_LINES, "longer than"),
        ('    """A table."""\n', "", "Table has no docstring"),
        ('    """Make a table."""\n', "", "make has no docstring"),
        ("    @override\n", "", "Table.rows has no docstring"),
    ],
)
def test_a_missing_docstring_is_found(old: str, new: str, reason: str) -> None:
    assert GOOD.count(old) == 1
    (found,) = undocumented([module_of(GOOD.replace(old, new))])
    assert reason in found


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('__all__ = ["Table", "make"]\n', "", "no __all__"),
        ('"Table", "make"', '"Table"', "make is public"),
        ("_limit = 3", "limit = 3", "limit is public"),
        ("_limit = 3", "limit: int = 3", "limit is public"),
        ("@app.command()\n", "", "serve is public"),
        ('"Table", "make"', '"Table", "make", "gone"', "names gone"),
    ],
)
def test_a_name_that_is_not_exported_or_does_not_exist_is_found(old: str, new: str, reason: str) -> None:
    assert GOOD.count(old) == 1
    (found,) = export_violations([module_of(GOOD.replace(old, new))])
    assert reason in found


def test_a_private_module_needs_no_exports() -> None:
    assert export_violations([module_of("value = 1", "kv._private")]) == []
