"""Words that identifiers may not use, as GLOSSARY.md's table lists them."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.repo.source import Module

__all__ = ["BannedWords", "banned_identifiers", "parse_banned_words", "words_of"]


@dataclass(frozen=True)
class BannedWords:
    """Words banned anywhere in an identifier, as a whole identifier, and as a module's name."""

    anywhere: tuple[str, ...]
    whole: tuple[str, ...]
    module: tuple[str, ...]


def parse_banned_words(text: str) -> BannedWords:
    """Read the table under the heading "Banned identifiers": words | where ("anywhere", "whole name", "module")."""
    section = text.split("\n## Banned identifiers\n", 1)[1].split("\n## ", 1)[0]
    found: dict[str, list[str]] = {"anywhere": [], "whole name": [], "module name": []}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) >= 2 and cells[1] in found:
            found[cells[1]] += re.findall(r"`(\w+)`", cells[0])
    return BannedWords(*(tuple(words) for words in found.values()))


def words_of(identifier: str) -> list[str]:
    """Split snake_case and CamelCase into lower-case words."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def banned_identifiers(modules: Iterable[Module], banned: BannedWords) -> list[str]:
    """Return one line per identifier that a module introduces and the glossary bans."""
    found: list[str] = []
    for module in modules:
        last = module.name.rsplit(".", 1)[-1]
        if last in banned.module or _bans(last, banned):
            found.append(f"{module.path}: module name {last}")
        for line, identifier in sorted(_introduced(module.tree)):
            if _bans(identifier, banned):
                found.append(f"{module.path}:{line}: {identifier}")
    return found


def _bans(identifier: str, banned: BannedWords) -> bool:
    words = words_of(identifier)
    return identifier.strip("_") in banned.whole or any(_contains(words, words_of(word)) for word in banned.anywhere)


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))


def _introduced(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((node.lineno, alias.asname) for alias in node.names if alias.asname)
