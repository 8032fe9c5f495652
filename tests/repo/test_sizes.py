"""Files and functions of the package stay small enough to read."""

import ast
from collections.abc import Iterable

from tests.repo.source import Module, module_of, package_modules

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def oversized(modules: Iterable[Module]) -> list[str]:
    """Return one line per file and per function that is too long."""
    found: list[str] = []
    for module in modules:
        if (lines := len(module.text.splitlines())) > MAX_FILE_LINES:
            found.append(f"{module.path}: {lines} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{module.path}:{node.lineno}: {node.name} has {lines} lines")
    return found


def test_no_file_and_no_function_of_the_package_is_too_long() -> None:
    assert oversized(package_modules()) == []


def test_the_limits_are_exact() -> None:
    body = "    pass\n"
    assert oversized([module_of("x = 1\n" * MAX_FILE_LINES)]) == []
    assert oversized([module_of("x = 1\n" * (MAX_FILE_LINES + 1))]) == ["sample.py: 501 lines"]
    assert oversized([module_of("def f():\n" + body * (MAX_FUNCTION_LINES - 1))]) == []
    assert oversized([module_of("def f():\n" + body * MAX_FUNCTION_LINES)]) == ["sample.py:1: f has 81 lines"]
