"""What the documentation names: modules, dotted names, make targets, commands; and whether it exists."""

import ast
import re
from collections.abc import Iterable, Iterator

from tests.repo.source import Module

__all__ = ["code_blocks", "missing_targets", "unknown_names", "unlisted_modules"]

_SPANS = re.compile(r"`([^`\n]+)`")


def unlisted_modules(page: str, modules: Iterable[Module]) -> list[str]:
    """Return the modules that no line of the page names as "- `path`: what it is"."""
    listed = {m.group(1) for m in re.finditer(r"^- `([\w/]+\.py)`: \S.+$", page, re.MULTILINE)}
    return [m.path for m in modules if not m.is_package and m.path.split("dalsegno/", 1)[-1] not in listed]


def unknown_names(page: str, modules: Iterable[Module], files: Iterable[str]) -> list[str]:
    """Return the Python files, test folders and `dalsegno.…` names a page gives in backticks that do not exist.

    A file is given relative to the package or to the repository.
    """
    known_files = set(files)
    folders = {file.rpartition("/")[0] for file in known_files}
    by_name = {m.name: m for m in modules}
    known_files |= {m.path.split("dalsegno/", 1)[-1] for m in by_name.values()}
    spans = _SPANS.findall(page)
    found = [span for span in spans if re.fullmatch(r"[\w/]+\.py", span) and span not in known_files]
    found += [span for span in spans if re.fullmatch(r"tests/\w+", span) and span not in folders]
    dotted = [span for span in spans if re.fullmatch(r"dalsegno(\.\w+)+", span)]
    return found + [span for span in dotted if not _resolves(span.removeprefix("dalsegno."), by_name)]


def _resolves(name: str, modules: dict[str, Module]) -> bool:
    if name in modules:
        return True
    owner, _, last = name.rpartition(".")
    return owner in modules and last in set(_top_level(modules[owner].tree))


def _top_level(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            if any(ast.unparse(target) == "__all__" for target in node.targets):
                yield from ast.literal_eval(node.value)


def missing_targets(page: str, makefile: str) -> list[str]:
    """Return the make targets that a page names and the Makefile lacks."""
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    return sorted(
        {name for name in re.findall(r"(?:`|^ *)make ([a-z][\w-]*)", page, re.MULTILINE) if name not in targets}
    )


def code_blocks(page: str, language: str) -> list[str]:
    """Return the page's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
