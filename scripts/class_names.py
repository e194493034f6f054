"""Names that stand for several classes: a reader who meets one cannot know which is meant.

    python scripts/class_names.py      exit code 1: there is one

Classes of both packages are looked at, those inside others included; tests, benches and scripts may call theirs what they
like.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("operator/src", "sidecar/src")


def classes(files: Iterable[Path]) -> dict[str, list[Path]]:
    """The files that define a class, by its name."""
    found: dict[str, list[Path]] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return found


def shared(root: Path) -> dict[str, list[Path]]:
    """Names of several classes, and where they are."""
    found = classes(path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def main() -> int:
    """The list; its exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = shared(ROOT)
    for name, paths in found.items():
        print(f"{name}: {', '.join(str(path.relative_to(ROOT)) for path in paths)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
