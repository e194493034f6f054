"""Which test files are asked about a module: that of its name, those that import it, and those that reach its package.

Pure but for reading the files. A test that uses a module only through a helper of ``tests/support`` reaches it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = ("unit", "sockets")
"""Of ``tests``: what runs without engines, clusters and browsers."""
USERS = 6
"""So many files that import a module are asked, by name, beside its own."""


@dataclass(frozen=True)
class Suite:
    """The test files of a tree, with what they import."""

    imports: Mapping[Path, frozenset[str]]
    """By test file: dotted names of modules and of what is taken from them."""
    helpers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The same by name of a helper."""

    def own(self, module: str) -> list[Path]:
        """Those that bear the module's name: ``test_kv_pairing.py`` for ``xpyd_sidecar.kv.pairing``."""
        parts = module.split(".")
        names = {f"test_{'_'.join(taken)}.py" for taken in (parts[1:], parts[-2:], parts[2:]) if taken}
        return [path for path in self.imports if path.name in names]

    def users(self, module: str) -> list[Path]:
        """Others that import it."""
        own = self.own(module)
        return [path for path, names in self.imports.items() if path not in own and _uses(names, module)]

    def reaching(self, module: str) -> list[Path]:
        """Files that import the module, themselves or through helpers; then those that import its package."""
        package = ".".join(module.split(".")[:-1])
        near, far = [], []
        for path, names in self.imports.items():
            reached = self._closure(names)
            if _uses(reached, module):
                near.append(path)
            elif any(name == package or name.startswith(f"{package}.") for name in reached):
                far.append(path)
        return near + far

    def _closure(self, names: frozenset[str]) -> frozenset[str]:
        reached, left = set(names), list(names)
        while left:
            new = self.helpers.get(left.pop().partition(".")[0], frozenset()) - reached
            reached |= new
            left += new
        return frozenset(reached)


def _uses(names: frozenset[str], module: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for name in names)


def imported(text: str) -> frozenset[str]:
    """Dotted names that a file imports: the modules, and ``module.name`` for each name taken from one."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(names)


def suite_of(root: Path) -> Suite:
    """Those of a tree; their paths count from its root."""
    files = [path for folder in FOLDERS for path in (root / "tests" / folder).rglob("test_*.py")]
    support = sorted((root / "tests" / "support").glob("*.py"))
    files.sort(key=lambda path: path.name)
    return Suite({path.relative_to(root): imported(path.read_text("utf-8")) for path in files},
                 {path.stem: imported(path.read_text("utf-8")) for path in support})
