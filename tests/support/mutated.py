"""A small tree whose one module is broken by tests of ``lab/mutation``."""

from __future__ import annotations

import subprocess
from pathlib import Path

CODE = '''\
"""Doubles."""

LIMIT = 100


def double(number: int) -> int:
    """Twice a number, up to a bound."""
    if number > LIMIT:
        number = LIMIT
    return number * 2


class Counter:
    def count(self, seen: int) -> int:
        return seen + 1 if seen >= 0 and seen < LIMIT else 0

    @property
    def size(self) -> int:
        return 1

    @size.setter
    def size(self, value: int) -> None:
        self.value = value + 1
'''
TEST = """\
from xpyd_sidecar.kv.toy import Counter, double


def test_it_doubles():
    assert double(3) == 6


def test_it_counts():
    assert [Counter().count(seen) for seen in (-1, 0, 7)] == [0, 1, 8]
"""
MODULE = "xpyd_sidecar.kv.toy"


def tree(root: Path) -> Path:
    """A repository with that module, and a test of it in tests/unit."""
    files = {"sidecar/src/xpyd_sidecar/__init__.py": "", "sidecar/src/xpyd_sidecar/kv/__init__.py": "",
             "sidecar/src/xpyd_sidecar/kv/toy.py": CODE, "tests/unit/test_kv_toy.py": TEST, ".gitignore": "*.so\n",
             "sidecar/src/xpyd_sidecar/part.so": "compiled",
             "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q'\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    identity = ("-c", "user.name=x", "-c", "user.email=x@x")
    for command in (("init", "-q", "-b", "main"), ("add", "."), (*identity, "commit", "-qm", "toy")):
        subprocess.run(["git", "-C", str(root), *command], check=True, timeout=60)
    return root


def state(root: Path) -> dict[str, bytes]:
    """All files of a tree, without what git keeps."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and ".git" not in path.relative_to(root).parts}
