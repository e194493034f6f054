"""Places drawn from cosmic-ray's operators: comparisons, arithmetic, numbers, booleans, loops, decorators.

A line of code is drawn first, then one of the changes that the operators know for it: a line of many operators counts once.
Left out are annotations, docstrings and what stands outside of functions. cosmic-ray is an extra of the lab
(``lab/extras``), installed when it is first asked for.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lab import extras
from lab.mutation.functions import PACKAGES, Change, change_of_lines, definitions, module_of
from lab.mutation.tree import TreeError

_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)

LEFT_OUT = {"ExceptionReplacer"}
"""It fails at names with a dot, and elsewhere puts a name that the module does not have."""


class Spot(NamedTuple):
    """One change that an operator knows."""

    operator: str
    nth: int
    """Of the operator's changes at positions that begin where this one does."""
    at: tuple[int, int]
    """Line, from 1, and column."""


class Operators:
    """cosmic-ray's operators, those without arguments of their own."""

    def __init__(self) -> None:
        sys.path.append(str(extras.install("mutation") / "site"))
        from cosmic_ray import ast as trees  # noqa: PLC0415 (it is installed a line above)
        from cosmic_ray.mutating import mutate_code  # noqa: PLC0415
        from cosmic_ray.operators.provider import OperatorProvider  # noqa: PLC0415

        provider = OperatorProvider()
        self._all: dict[str, Any] = {name: provider[name]() for name in provider
                                     if name not in LEFT_OUT and not provider[name].arguments()}
        self._trees, self._mutate = trees, mutate_code

    @lru_cache(maxsize=512)  # noqa: B019 (one object for a run)
    def _nodes(self, source: str) -> list[Any]:
        return list(self._trees.ast_nodes(self._trees.get_ast(source)))

    def spots(self, source: str, line: int) -> list[Spot]:
        """All changes on a line that mean something."""
        left_out, found = list(annotation_spans(source)), list[Spot]()
        for node in self._nodes(source):
            if not node.start_pos[0] <= line <= node.end_pos[0]:
                continue
            for name, operator in self._all.items():
                for begin, _ in operator.mutation_positions(node):
                    if begin[0] == line and not any(first <= begin < last for first, last in left_out):
                        found.append(Spot(name, sum(one.operator == name and one.at == begin for one in found), begin))
        return found

    def change(self, source: str, module: str, spot: Spot) -> Change | None:
        """The change at a spot; None where what comes out is no Python, or the same."""
        operator = self._all[spot.operator]
        begins = [begin for node in self._nodes(source) for begin, _ in operator.mutation_positions(node)]
        nth = [number for number, begin in enumerate(begins) if begin == spot.at][spot.nth]
        changed = self._mutate(source, operator, nth)
        try:
            ast.parse(changed)
        except SyntaxError:
            return None
        return change_of_lines(source, changed, module) if changed.splitlines() != source.splitlines() else None


def annotation_spans(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations stand: nothing evaluates them, so a change of one means nothing."""
    for node in ast.walk(ast.parse(source)):
        for one in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(one, ast.expr):
                yield (one.lineno, one.col_offset), (one.end_lineno or one.lineno, one.end_col_offset or one.col_offset)


def code_lines(source: str) -> set[int]:
    """Lines of functions on which an expression or a statement stands, docstrings not."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in (part for statement in node.body for part in ast.walk(statement)):
                if isinstance(part, ast.expr) and not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
                    found.add(part.lineno)
    return found


def drawn(root: Path, lines: Iterable[tuple[Path, int]], places: int | None, seed: int) -> list[Change]:
    """So many places on these lines, the same for the same lines and seed."""
    operators, dice, found = Operators(), random.Random(seed), list[Change]()
    left = sorted(lines)
    dice.shuffle(left)
    for path, line in left:
        if places is not None and len(found) >= places:
            break
        source = (root / path).read_text("utf-8")
        spots = operators.spots(source, line)
        change = operators.change(source, module_of(path), dice.choice(spots)) if spots else None
        if change is not None and change not in found:
            found.append(change)
    return found


def draw(root: Path, places: int, seed: int) -> list[Change]:
    """So many places of the whole product."""
    paths = [path for folder in PACKAGES.values() for path in (root / folder).rglob("*.py")]
    lines = [(path.relative_to(root), line) for path in paths for line in code_lines(path.read_text("utf-8"))]
    return drawn(root, lines, places, seed)


def changed(root: Path, base: str, seed: int) -> list[Change]:
    """A place on each line of the functions of which something differs from where this branch left ``base``."""
    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise TreeError(f"git {command[0]}: {done.stderr.strip()}")
        return done.stdout

    fork = git("merge-base", base, "HEAD").strip()
    lines = list[tuple[Path, int]]()
    folders = map(str, PACKAGES.values())
    for name in git("diff", "--name-only", "--no-renames", "--diff-filter=d", fork, "--", *folders).split():
        if name.endswith(".py"):
            source = (root / name).read_text("utf-8")
            lines += [(Path(name), line) for line in touched(source, git("diff", "-U0", "--no-renames", fork, "--", name))]
    return drawn(root, lines, None, seed)


def touched(source: str, diff: str) -> set[int]:
    """Lines of code of the innermost functions that a diff without context touches."""
    hunks = [(int(first), int(first) + max(int(count or 1), 1)) for first, count in _HUNK.findall(diff)]
    hit = set()
    for begin, end in hunks:
        for line in range(begin, end):
            around = [(first, last) for _, first, last in definitions(source) if first <= line <= last]
            if around:
                first, last = min(around, key=lambda one: one[1] - one[0])
                hit |= set(range(first, last + 1))
    return hit & code_lines(source)
