"""Checks of what a module shows to others: docstrings and `__all__`."""

import ast
from collections.abc import Iterable, Iterator

from tests.repo.source import Module

__all__ = ["MAX_DOCSTRING_LINES", "export_violations", "undocumented"]

MAX_DOCSTRING_LINES = 12
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def undocumented(modules: Iterable[Module]) -> list[str]:
    """Return the modules, public classes, functions and methods without a docstring, and too long module docstrings."""
    found: list[str] = []
    for module in modules:
        docstring = ast.get_docstring(module.tree)
        if not docstring:
            found.append(f"{module.path}: no module docstring")
        elif len(docstring.splitlines()) > MAX_DOCSTRING_LINES:
            found.append(f"{module.path}: module docstring longer than {MAX_DOCSTRING_LINES} lines")
        if not module.is_private:
            found += [f"{module.path}:{line}: {name} has no docstring" for line, name in _undocumented(module.tree, "")]
    return found


def _undocumented(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[int, str]]:
    for node in parent.body:
        if not isinstance(node, _Definition) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and not _documented_elsewhere(node):
            yield node.lineno, prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node, f"{prefix}{node.name}.")


def _documented_elsewhere(node: _Definition) -> bool:
    names = {ast.unparse(decorator).rsplit(".", 1)[-1] for decorator in node.decorator_list}
    return bool(names & {"overload", "override", "setter"})


def export_violations(modules: Iterable[Module]) -> list[str]:
    """Return the public names a module defines but does not export, and the exported names it does not define."""
    found: list[str] = []
    for module in modules:
        if module.is_private:
            continue
        exported = _exported(module.tree)
        defined = set(_defined(module.tree))
        if exported is None:
            if not module.is_package or defined:
                found.append(f"{module.path}: no __all__")
            continue
        known = defined | set(_imported(module.tree))
        found += [f"{module.path}: {name} is public and not in __all__" for name in sorted(defined - exported)]
        found += [f"{module.path}: __all__ names {name}, which is not defined" for name in sorted(exported - known)]
    return found


def _exported(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if value is not None and any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return set(ast.literal_eval(value))
    return None


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, _Definition):
            names = [] if _is_command(node) else [node.name]
        elif isinstance(node, ast.Assign):
            names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        yield from (name for name in names if name == "__version__" or not (name.startswith("_") or name == "logger"))


def _is_command(node: _Definition) -> bool:
    """Whether the function is given to the command line by a decorator and called by nobody else."""
    return any(ast.unparse(decorator).startswith("app.command(") for decorator in node.decorator_list)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
