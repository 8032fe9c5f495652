"""The import ladder as ARCHITECTURE.md's table states it, and the check of modules against it."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.repo.source import Module

__all__ = ["Ladder", "imported_names", "ladder_violations", "parse_ladder"]

_LEAF = "leaf"
_TESTS_ONLY = "tests"


@dataclass(frozen=True)
class Ladder:
    """Rungs by top-level name; higher numbers import from lower ones. `torch_free` holds dotted names."""

    rungs: dict[str, int]
    leaves: frozenset[str]
    tests_only: frozenset[str]
    torch_free: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """Every top-level name that has a place."""
        return frozenset(self.rungs) | self.leaves | self.tests_only

    def is_torch_free(self, name: str) -> bool:
        """Return whether the module `name` (dotted, relative to the package) has to stay without torch."""
        return any(name == free or name.startswith(f"{free}.") for free in self.torch_free)


def parse_ladder(text: str) -> Ladder:
    """Read the table under the heading "Import ladder": rung | names | names that never load torch."""
    section = text.split("\n## Import ladder\n", 1)[1].split("\n## ", 1)[0]
    rungs: dict[str, int] = {}
    special: dict[str, set[str]] = {_LEAF: set(), _TESTS_ONLY: set()}
    free: list[str] = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 3 or not (cells[0].isdigit() or cells[0] in special):
            continue
        names = re.findall(r"`([\w.]+)`", cells[1])
        if cells[0].isdigit():
            rungs |= dict.fromkeys(names, int(cells[0]))
        else:
            special[cells[0]] |= set(names)
        free += re.findall(r"`([\w.]+)`", cells[2])
    return Ladder(rungs, frozenset(special[_LEAF]), frozenset(special[_TESTS_ONLY]), tuple(free))


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name relative to the package) of everything of the package that a module imports.

    Imports inside functions and under TYPE_CHECKING count like all others; relative imports are resolved.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "dalsegno" or alias.name.startswith("dalsegno."):
                    yield node.lineno, alias.name.removeprefix("dalsegno").removeprefix(".")
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(module, node)
            if base is not None:
                yield from ((node.lineno, f"{base}.{alias.name}".strip(".")) for alias in node.names)


def _base_of(module: Module, node: ast.ImportFrom) -> str | None:
    if node.level:
        parts = module.name.split(".") if module.name else []
        up = node.level - 1 if module.is_package else node.level
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])
    if node.module == "dalsegno" or (node.module or "").startswith("dalsegno."):
        return (node.module or "").removeprefix("dalsegno").removeprefix(".")
    return None


def ladder_violations(modules: Iterable[Module], ladder: Ladder) -> list[str]:
    """Return one line per import that climbs the ladder, and per module that has no place on it."""
    found: list[str] = []
    for module in modules:
        source = module.name.split(".", 1)[0]
        if not source:
            continue  # the package root re-exports the public API, whatever rung it lives on
        if source not in ladder.names:
            found.append(f"{module.path}: {source} has no place in the import ladder")
            continue
        for line, name in imported_names(module):
            target = name.split(".", 1)[0]
            if reason := _forbidden(source, target, ladder):
                found.append(f"{module.path}:{line}: {reason}")
    return found


def _forbidden(source: str, target: str, ladder: Ladder) -> str | None:
    if target in {source, "__version__"} or source in ladder.tests_only or target in ladder.leaves:
        return None
    if target in ladder.tests_only:
        return f"{source} imports {target}, which is for tests only"
    if source in ladder.leaves:
        return f"{source} is a leaf and imports {target}"
    if target not in ladder.rungs:
        return f"{source} imports {target or 'the package root'}, which has no place in the import ladder"
    if ladder.rungs[target] >= ladder.rungs[source]:
        return f"{source} (rung {ladder.rungs[source]}) imports {target} (rung {ladder.rungs[target]})"
    return None
