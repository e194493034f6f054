"""Lines of Python and C by area, at another commit and in the working tree: ``python -m lab sizes --base REV``

A line is what ``wc -l`` counts; files are those that git tracks, the new and unignored ones of the tree too. Prints a table
in Markdown: each package of the sidecar, each folder of the tests, and sums.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
CODE: Final = (".py", ".c", ".h")
BESIDE: Final = ("bench", "e2e", "lab", "scripts")
"""Folders beside product and tests; most of lab came from the other three, and from tests/campaigns."""
SUMS: Final = {"**product**": ("operator/src", "sidecar/src"), "**beside it**": BESIDE, "**tests**": ("tests",),
               "**all**": ("",)}
"""By name of the row: the areas in it, by how they begin."""


def area(path: str) -> str | None:
    """Where a file is counted; None: nowhere."""
    parts = path.split("/")
    if not path.endswith(CODE):
        return None
    if parts[0] in ("operator", "sidecar"):
        if parts[1:2] != ["src"]:
            return None
        return "operator/src" if parts[0] == "operator" else "/".join(("sidecar/src", *parts[3:-1][:1]))
    if parts[0] == "tests":
        return "/".join(parts[:-1][:2]) if path.endswith(".py") else None
    return parts[0] if parts[0] in BESIDE else None


def lines_at(commit: str, root: Path = ROOT) -> Counter[str]:
    """Of each area, at a commit. Raises subprocess.CalledProcessError: there is no such one."""
    packed = subprocess.run(["git", "archive", "--format=tar", commit], cwd=root, capture_output=True, check=True).stdout
    found: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if (where := area(member.name)) and (file := archive.extractfile(member)):
                found[where] += file.read().count(b"\n")
    return found


def lines_now(root: Path = ROOT) -> Counter[str]:
    """Of each area, as the tree is."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                            capture_output=True, check=True).stdout.decode().split("\0")
    found: Counter[str] = Counter()
    for name in filter(None, listed):
        if (where := area(name)) and (root / name).is_file():
            found[where] += (root / name).read_bytes().count(b"\n")
    return found


def table(before: Counter[str], now: Counter[str]) -> str:
    """In Markdown; what is in neither is left out."""
    rows = [(name, before[name], now[name]) for name in sorted(before.keys() | now.keys())]
    for name, starts in SUMS.items():
        both = [sum(lines for where, lines in side.items() if where.startswith(starts)) for side in (before, now)]
        rows.append((name, both[0], both[1]))
    made = ["| area | before | now | difference |", "|---|---|---|---|"]
    return "\n".join([*made, *(f"| {name} | {old:,} | {new:,} | {new - old:+,} |" for name, old, new in rows)])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="lines of code by area, at another commit and now")
    parser.add_argument("--base", required=True, metavar="REV")
    base = parser.parse_args().base
    try:
        print(table(lines_at(base), lines_now()))
    except subprocess.CalledProcessError as error:
        print(f"{base}: {error.stderr.decode(errors='replace').strip()}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
