"""Names that stand for several classes: a reader who meets one cannot know which is meant.

    python scripts/class_names.py [--only sidecar/src/xpyd_sidecar/router]      exit code 1: there is a new one

Classes of both packages are looked at, those inside others included; tests, benches and scripts may call theirs what they
like. ``KNOWN`` can only shrink: a name that stands for one thing again has to leave it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("operator/src", "sidecar/src")
KNOWN = frozenset({
    "Blueprint", "Busy", "Cache", "Drain", "Ended", "Gone", "Group", "Heartbeat",
    "Hello", "Instance", "Kind", "Leg", "Link", "Load", "Look", "Lost", "Offer", "Outcome", "Part", "Place", "Rank",
    "Refuse", "Router", "Settings", "Side", "State", "Store", "Taken", "Target", "Told", "Unit", "Verdict", "Wait",
    "Watch", "Welcome", "XpydError", "_List",
})
"""What stands for several things today."""


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of which one class is below this folder")
    only = parser.parse_args().only
    found = shared(ROOT)
    for name, paths in found.items():
        places = [str(path.relative_to(ROOT)) for path in paths]
        if any(place.startswith(only) for place in places):
            print(f"{name}: {', '.join(places)}")
    return int(bool(found.keys() - KNOWN))


if __name__ == "__main__":
    sys.exit(main())
