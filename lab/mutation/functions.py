"""Changes of code that are named by function and text, so that they survive moves of lines.

    Change("xpyd_sidecar.kv.pairing", "Pairing.on_ready", "if a <= b:", "if a < b:")

``function`` is a qualified name within the module: ``Class.method``, ``function``, ``function.inner``, a class for what
stands in its body, or empty for the whole module. ``before`` is searched within the source of that definition alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

PACKAGES = {"xpyd_operator": Path("operator/src"), "xpyd_sidecar": Path("sidecar/src")}
"""Where each package of the product lies, from the root of the tree."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class UnfitError(Exception):
    """A change no longer fits the code; says why."""


@dataclass(frozen=True)
class Change:
    """One place that is broken."""

    module: str
    function: str
    before: str
    after: str
    nth: int | None = None
    """Which occurrence of ``before``, from 0; None: there must be exactly one."""

    @property
    def name(self) -> str:
        """The function's name with its module, for people."""
        return f"{self.module}:{self.function}"


def path_of(root: Path, module: str) -> Path:
    """The file of a module in a tree.

    Raises:
        UnfitError: there is none.
    """
    package = module.partition(".")[0]
    if package not in PACKAGES:
        raise UnfitError(f"{module}: no package of the product; there are {', '.join(PACKAGES)}")
    base = (root / PACKAGES[package]).joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise UnfitError(f"{module}: there is no such module")


def module_of(path: Path) -> str:
    """The module of a file, whose path counts from the root of the tree; empty where it is none of the product."""
    for folder in PACKAGES.values():
        if path.is_relative_to(folder) and path.suffix == ".py":
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return ""


@lru_cache(maxsize=8)
def definitions(source: str) -> tuple[tuple[str, int, int], ...]:
    """Each function and class: qualified name, first line (that of a decorator, if any) and last line, counted from 1."""
    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _DEFINITIONS):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                yield name, first, child.end_lineno or first
                yield from inside(child, f"{name}.")
            else:
                yield from inside(child, prefix)

    return tuple(inside(ast.parse(source), ""))


def function_at(source: str, line: int) -> str:
    """The innermost function or class around a line; empty at the level of the module."""
    around = [one for one in definitions(source) if one[1] <= line <= one[2]]
    return min(around, key=lambda one: one[2] - one[1])[0] if around else ""


def spans(source: str, function: str) -> list[tuple[int, int]]:
    """Where a definition stands, as offsets of characters: several where a name is defined again (a property's setter)."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    if not function:
        return [(0, len(source))]
    return [(starts[first - 1], starts[last]) for name, first, last in definitions(source) if name == function]


def occurrences(source: str, function: str, text: str) -> list[int]:
    """Offsets of a text within a definition."""
    found = []
    for begin, end in spans(source, function):
        at = source.find(text, begin, end)
        while at >= 0:
            found.append(at)
            at = source.find(text, at + 1, end)
    return found


def apply(source: str, change: Change) -> str:
    """The source of the module with the change.

    Raises:
        UnfitError: the function or the text is not there, or not as often as the change says, or the result is no Python.
    """
    if not spans(source, change.function):
        raise UnfitError(f"{change.name}: there is no such function")
    found = occurrences(source, change.function, change.before)
    if not found:
        raise UnfitError(f"{change.name}: the text is not there: {change.before!r}")
    if change.nth is None and len(found) > 1:
        raise UnfitError(f"{change.name}: the text is there {len(found)} times: {change.before!r}")
    if (change.nth or 0) >= len(found):
        raise UnfitError(f"{change.name}: number {change.nth} is meant of {len(found)} of the text: {change.before!r}")
    at = found[change.nth or 0]
    changed = source[:at] + change.after + source[at + len(change.before):]
    if changed == source:
        raise UnfitError(f"{change.name}: nothing changes: {change.before!r}")
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise UnfitError(f"{change.name}: what comes out is no Python: {error}") from error
    return changed


def moved(root: Path, change: Change) -> Change:
    """The change where its function is now: in its module, or in the one other that has such a function with that text."""
    def fits(path: Path) -> bool:
        try:
            apply(path.read_text("utf-8"), change)
        except UnfitError:
            return False
        return True

    paths = [path for folder in PACKAGES.values() for path in sorted((root / folder).rglob("*.py"))]
    modules = {module_of(path.relative_to(root)): path for path in paths}
    if change.module in modules and fits(modules[change.module]):
        return change
    found = [module for module, path in modules.items() if change.function and fits(path)]
    return replace(change, module=found[0]) if len(found) == 1 else change


def change_of_lines(source: str, changed: str, module: str) -> Change:
    """The change from a source to another one that differs from it in neighbouring lines of one definition."""
    old, new = source.splitlines(), changed.splitlines()
    shorter = min(len(old), len(new))
    begin = next((at for at in range(shorter) if old[at] != new[at]), shorter)
    tail = next((at for at in range(shorter - begin) if old[-1 - at] != new[-1 - at]), shorter - begin)
    end = len(old) - tail
    before, after = "\n".join(old[begin:end]), "\n".join(new[begin:len(new) - tail])
    indent = len(before) - len(before.lstrip())
    if after[:indent] == before[:indent]:
        before, after = before[indent:], after[indent:]
    else:
        indent = 0
    function = function_at(source, begin + 1)
    at = sum(len(line) + 1 for line in old[:begin]) + indent
    return Change(module, function, before, after, occurrences(source, function, before).index(at))
