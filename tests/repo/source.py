"""The repository as the checks of this folder see it: modules with their syntax trees, and text files."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["PACKAGE", "ROOT", "Module", "module_of", "modules_of_tests", "package_modules", "text_files"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "dalsegno"


@dataclass(frozen=True)
class Module:
    """One Python file.

    `name` is dotted and relative to the package (`kv.layout`, "" for the package root); `path` is as it is reported.
    """

    name: str
    path: str
    text: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        """The file's syntax tree; the same object each time."""
        return _parse(self.text)

    @property
    def is_private(self) -> bool:
        """Whether some part of the name starts with an underscore."""
        return any(part.startswith("_") for part in self.name.split("."))


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def module_of(text: str, name: str = "sample") -> Module:
    """Return a made-up module, for the tests of the checks."""
    return Module(name, f"{name.replace('.', '/')}.py", text)


def _read(path: Path, base: Path) -> Module:
    parts = path.relative_to(base).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"), is_package)


@cache
def package_modules() -> tuple[Module, ...]:
    """Return every module of the package, packages included."""
    return tuple(_read(path, PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def modules_of_tests() -> tuple[Module, ...]:
    """Return every Python file under tests/."""
    return tuple(_read(path, ROOT / "tests") for path in sorted((ROOT / "tests").rglob("*.py")))


def text_files() -> Iterator[tuple[str, str]]:
    """Yield path and text of every file that git tracks or would track, binary ones left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in sorted(filter(None, listed.split("\0"))):
        path = ROOT / name
        if not path.is_file():
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
