"""The sources of vLLM's methods, as hashes: what replaces a method was written for certain ones, and serves no others."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Mapping
from functools import cache
from types import ModuleType


@cache
def hashes(module: ModuleType) -> dict[str, str]:
    """The hash of every class (``Class``), every method of one (``Class.method``) and every function (``function``)."""
    text = inspect.getsource(module)
    lines = text.splitlines()

    def digest(node: ast.ClassDef | ast.FunctionDef) -> str:
        return hashlib.sha256("\n".join(lines[node.lineno - 1:node.end_lineno]).encode()).hexdigest()[:16]

    found: dict[str, str] = {}
    for owner in ast.parse(text).body:
        if isinstance(owner, ast.ClassDef | ast.FunctionDef):
            found[owner.name] = digest(owner)
        if isinstance(owner, ast.ClassDef):
            found |= {f"{owner.name}.{method.name}": digest(method) for method in owner.body
                      if isinstance(method, ast.FunctionDef)}
    return found


def differing(module: ModuleType, pinned: Mapping[str, str]) -> list[str]:
    """What is not as it is pinned, by name."""
    found = hashes(module)
    return [name for name, digest in pinned.items() if found.get(name) != digest]
