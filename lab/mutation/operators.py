"""Places at which one comparison or one ``and``/``or`` is turned round: few operators, hardly a place without a meaning.

Each operator has one counterpart, so a place needs no second draw. The modules are those that decide: planners, protocols
and state machines, without what talks to sockets and devices alone.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from lab.mutation.functions import Change, change_of_lines, module_of

SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}
MODULES = ("operator/src/xpyd_operator/plan/**/*.py", "operator/src/xpyd_operator/render/*.py",
           "operator/src/xpyd_operator/kube/**/*.py", "operator/src/xpyd_operator/api/*.py",
           "sidecar/src/xpyd_sidecar/kv/*.py", "sidecar/src/xpyd_sidecar/router/*/*.py",
           "sidecar/src/xpyd_sidecar/session/*.py", "sidecar/src/xpyd_sidecar/agent/*.py")


def changes_in(source: str, module: str) -> Iterator[Change]:
    """All places of a module."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        kind: type[ast.AST]
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right, kind = node.left, node.comparators[0], type(node.ops[0])
        elif isinstance(node, ast.BoolOp):
            left, right, kind = node.values[0], node.values[1], type(node.op)
        else:
            continue
        text, other = SWAPS[kind]
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            continue
        line = lines[right.lineno - 1].encode()
        between = line[left.end_col_offset:right.col_offset].decode()
        if text not in between:
            continue
        changed = line[:left.end_col_offset].decode() + between.replace(text, other, 1) + line[right.col_offset:].decode()
        yield change_of_lines(source, "\n".join([*lines[:right.lineno - 1], changed, *lines[right.lineno:]]), module)


def draw(root: Path, places: int, seed: int, without: tuple[str, ...] = ()) -> list[Change]:
    """So many places of a tree, the same for the same tree and seed.

    Args:
        root: the tree.
        places: how many.
        seed: of the draw.
        without: modules that are left out, by patterns of a shell.
    """
    paths = sorted({path for pattern in MODULES for path in root.glob(pattern)})
    found = [change for path in paths for change in changes_in(path.read_text("utf-8"), module_of(path.relative_to(root)))]
    random.Random(seed).shuffle(found)
    return [one for one in found if not any(fnmatch(one.module, pattern) for pattern in without)][:places]
