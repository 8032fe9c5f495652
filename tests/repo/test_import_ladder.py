"""Every import points down the ladder of ARCHITECTURE.md, and the pure packages never load torch."""

import subprocess
import sys

import pytest

from tests.repo.ladder import Ladder, imported_names, ladder_violations, parse_ladder
from tests.repo.source import ROOT, Module, module_of, package_modules

LADDER = parse_ladder((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))

SAMPLE = """# Page

## Import ladder

| rung | packages and modules | never loads torch |
|---|---|---|
| 2 | `engine`, `sched` | `engine.core`, `sched` |
| 1 | `errors` | `errors` |
| leaf | `obs` | `obs` |
| tests | `testing` | |

## Next
| 9 | `not_this` | |
"""

# Imports each module in turn and prints the first after which torch is loaded.
_PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""


def modules_loading_torch(names: list[str]) -> str:
    """Return the first of the modules (absolute names) whose import loads torch, "" for none; in a fresh process."""
    command = [sys.executable, "-c", _PROBE, *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()


def test_no_import_of_the_package_climbs_the_ladder() -> None:
    assert ladder_violations(package_modules(), LADDER) == []


def test_pure_packages_do_not_load_torch_even_through_other_modules() -> None:
    names = [m.name for m in package_modules() if LADDER.is_torch_free(m.name)]
    assert names
    assert modules_loading_torch([f"dalsegno.{name}" for name in names]) == ""


def test_the_package_root_and_the_command_line_load_no_torch_until_used() -> None:
    assert modules_loading_torch(["dalsegno", "dalsegno.cli.main"]) == ""


def test_the_ladder_names_what_exists_and_holds_the_pure_packages_to_it() -> None:
    tops = {module.name.split(".", 1)[0] for module in package_modules()} - {""}
    names = {module.name for module in package_modules()}
    assert tops == LADDER.names
    assert [free for free in LADDER.torch_free if free not in names] == []
    for pure in ("engine.core", "sched", "kv", "prefix", "hashing", "types", "errors", "config", "request"):
        assert LADDER.is_torch_free(pure), f"{pure} has to stay without torch"


def test_the_table_is_read_as_written() -> None:
    ladder = parse_ladder(SAMPLE)
    assert ladder == Ladder(
        {"engine": 2, "sched": 2, "errors": 1},
        frozenset({"obs"}),
        frozenset({"testing"}),
        ("engine.core", "sched", "errors", "obs"),
    )
    assert ladder.is_torch_free("sched.queue")
    assert not ladder.is_torch_free("engine.llm")


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("from dalsegno.engine.core import EngineCore", "errors", "errors (rung 1) imports engine (rung 2)"),
        ("import dalsegno.sched.queue", "engine.core", "engine (rung 2) imports sched (rung 2)"),
        ("def late():\n    from dalsegno.engine import core", "errors", "imports engine"),
        ("from ..engine.core import EngineCore", "sched.queue", "imports engine"),
        ("from dalsegno import engine", "errors", "imports engine"),
        ("from .. import engine", "sched.queue", "imports engine"),
        ("from dalsegno.testing import faults", "engine.core", "for tests only"),
        ("from dalsegno.errors import EngineError", "obs.log", "obs is a leaf"),
        ("from dalsegno import LLM", "engine.core", "no place"),
        ("", "stray", "stray has no place"),
    ],
)
def test_an_import_against_the_ladder_is_found(text: str, name: str, reason: str) -> None:
    (found,) = ladder_violations([module_of(text, name)], parse_ladder(SAMPLE))
    assert reason in found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from dalsegno.errors import EngineError\nfrom dalsegno.obs import log", "engine.core"),
        ("from .llm import LLM\nfrom ..errors import EngineError\nimport torch", "engine.core"),
        ("from dalsegno.engine.core import EngineCore", "testing.fakes"),
        ("from dalsegno import __version__", "engine.core"),
    ],
)
def test_an_import_down_the_ladder_is_left_alone(text: str, name: str) -> None:
    assert ladder_violations([module_of(text, name)], parse_ladder(SAMPLE)) == []


def test_relative_imports_of_a_package_start_at_the_package_itself() -> None:
    package = Module("kv", "kv/__init__.py", "from . import layout\nfrom ..errors import EngineError", is_package=True)
    assert [name for _, name in imported_names(package)] == ["kv.layout", "errors.EngineError"]


def test_a_module_that_loads_torch_is_found() -> None:
    assert modules_loading_torch(["json", "torch", "re"]) == "torch"
