"""Every test file tests something, and nothing is skipped without saying why."""

import ast
from collections.abc import Iterable

import pytest

from tests.repo.source import Module, module_of, modules_of_tests

_MARKS = ("mark.skip", "mark.skipif", "mark.xfail")
_CALLS = ("pytest.skip", "pytest.xfail", "pytest.importorskip")


def files_without_tests(modules: Iterable[Module]) -> list[str]:
    """Return the test files in which pytest finds no test."""
    return [m.path for m in modules if m.path.rsplit("/", 1)[-1].startswith("test_") and not _has_test(m.tree)]


def _has_test(tree: ast.Module | ast.ClassDef) -> bool:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            return True
        # The tests of a contract suite are inherited.
        is_suite = isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith("Contract") for b in node.bases)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test") and (is_suite or _has_test(node)):
            return True
        # A stateful machine of hypothesis becomes a test through its TestCase.
        is_case = isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".TestCase")
        if is_case and ast.unparse(node).startswith("Test"):
            return True
    return False


def silent_skips(modules: Iterable[Module]) -> list[str]:
    """Return the skip and xfail marks and calls that give no reason."""
    found: list[str] = []
    for module in modules:
        calls = {id(node.func): node for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
        found += [
            f"{module.path}:{node.lineno}: {ast.unparse(node)} without a reason"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and _is_silent(ast.unparse(node), calls.get(id(node)))
        ]
    return found


def _is_silent(name: str, call: ast.Call | None) -> bool:
    if name.endswith(_MARKS):
        return call is None or not _has_text(call, positional=name.endswith("mark.skip"))
    return name in _CALLS and (call is None or not _has_text(call, positional=name != "pytest.importorskip"))


def _has_text(call: ast.Call, *, positional: bool) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    given += call.args[:1] if positional else []
    return any(not isinstance(value, ast.Constant) or bool(value.value) for value in given)


def test_every_test_file_yields_a_test() -> None:
    assert files_without_tests(modules_of_tests()) == []


def test_every_skip_and_xfail_gives_a_reason() -> None:
    assert silent_skips(modules_of_tests()) == []


@pytest.mark.parametrize(
    "text",
    ["", "def helper(): ...", "class TestNothing:\n    value = 1", "if True:\n    def test_x(): ...", "x = M.TestCase"],
)
def test_a_file_without_tests_is_found(text: str) -> None:
    assert files_without_tests([module_of(text, "kv.test_sample")]) == ["kv/test_sample.py"]


@pytest.mark.parametrize(
    "text",
    [
        "def test_x(): ...",
        "class TestX:\n    def test_y(self): ...",
        "class TestX(StoreContract): ...",
        "TestMachine = Machine.TestCase",
    ],
)
def test_a_file_with_a_test_passes(text: str) -> None:
    assert files_without_tests([module_of(text, "kv.test_sample")]) == []


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.skip\ndef test_x(): ...",
        "@pytest.mark.skip()\ndef test_x(): ...",
        "@pytest.mark.skipif(True)\ndef test_x(): ...",
        "@pytest.mark.xfail(strict=True)\ndef test_x(): ...",
        "@pytest.mark.xfail(reason='')\ndef test_x(): ...",
        "def test_x():\n    pytest.skip()",
        "pytest.importorskip('torch')",
    ],
)
def test_a_skip_without_a_reason_is_found(text: str) -> None:
    assert len(silent_skips([module_of(text)])) == 1


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.skip('no disk')\ndef test_x(): ...",
        "@pytest.mark.skipif(True, reason='no disk')\ndef test_x(): ...",
        "def test_x():\n    pytest.skip(f'no {disk}')",
        "pytest.importorskip('torch', reason='needs torch')",
        "sampler.skip(3)",
    ],
)
def test_a_skip_with_a_reason_passes(text: str) -> None:
    assert silent_skips([module_of(text)]) == []
