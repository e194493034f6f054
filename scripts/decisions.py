"""The index of decisions, from the files themselves.

    python scripts/decisions.py write        docs/decisions/README.md
    python scripts/decisions.py check        whether it is that, and each decision has its form; exit code 1 where not

A decision is ``docs/decisions/NNNN-title.md``: a first line ``# NNNN Title``, and before its first section one line that
says how it stands:

    Status: accepted.
    Status: accepted; superseded in part by [0059](0059-….md) and [0075](0075-….md): what of it.
    Status: superseded by [0058](0058-….md): why.

``accepted;`` may be followed by any other words. Only Python's own library is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "decisions"
INDEX = "README.md"
HEAD = """# Decisions

Why xpyd is as it is: one page for each decision that several packages rest on, with the alternatives that were not taken.
Numbers say in which order they were made. A page that a later one supersedes stays, since its alternatives still hold; its
status names the later one.

This page is made by `python scripts/decisions.py write`. A new decision takes the next free number
([CONTRIBUTING](../../CONTRIBUTING.md#rules)).

| number | decision | status |
|---|---|---|
"""
_NAME = re.compile(r"(\d{4})-[a-z0-9-]+\.md")
_STATUS = re.compile(r"^Status: (?P<word>accepted|superseded by \[\d{4}\]\([^)]+\))(?P<rest>[.,:;].*)?$", re.MULTILINE)
_IN_PART = re.compile(r"^; superseded in part by ((?:\[\d{4}\]\([^)]+\)(?:, | and )?)+)")
_NUMBER_OF_LINK = re.compile(r"\[(\d{4})\]\(([^)]+)\)")


class Decision(NamedTuple):
    """One page. ``by``: those that supersede it; ``whole``: nothing of it stands."""

    number: str
    file: str
    title: str
    by: tuple[str, ...]
    whole: bool


def read(path: Path) -> Decision:
    """A page of the folder. ValueError: what its form lacks."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError(f"{path.name}: its name is not NNNN-title.md")
    text = path.read_text("utf-8")
    title = re.match(rf"# {name[1]} (\S.*)\n", text)
    if title is None:
        raise ValueError(f"{path.name}: it does not begin with '# {name[1]} Title'")
    head = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]
    found = _STATUS.findall(head)
    status = _STATUS.search(head)
    if status is None or len(found) > 1:
        raise ValueError(f"{path.name}: before its first section one line says 'Status: accepted.' or "
                         "'Status: superseded by [NNNN](NNNN-title.md)'")
    whole = status["word"] != "accepted"
    part = _IN_PART.match(status["rest"] or "")
    links = _NUMBER_OF_LINK.findall(status["word"] if whole else part[1] if part else "")
    for number, file in links:
        if number <= name[1] or not file.startswith(f"{number}-") or not (path.parent / file).exists():
            raise ValueError(f"{path.name}: its status names [{number}]({file}), which is no later decision")
    return Decision(name[1], path.name, title[1], tuple(number for number, _ in links), whole)


def read_all(folder: Path = FOLDER) -> list[Decision]:
    """All pages by number. ValueError: one has not the form, or two have one number."""
    every = [read(path) for path in sorted(folder.glob("*.md")) if path.name != INDEX]
    for one, other in pairwise(every):
        if one.number == other.number:
            raise ValueError(f"{one.file} and {other.file} have one number")
    return every


def index(decisions: Sequence[Decision]) -> str:
    """The page that lists them."""
    files = {each.number: each.file for each in decisions}
    rows = []
    for each in decisions:
        links = ", ".join(f"[{number}]({files[number]})" for number in each.by)
        how = "superseded by" if each.whole else "accepted; in part superseded by"
        status = f"{how} {links}" if links else "accepted"
        rows.append(f"| {each.number} | [{each.title}]({each.file}) | {status} |\n")
    return HEAD + "".join(rows)


def main(arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Exit code 2: another word than write and check."""
    if list(arguments) not in (["write"], ["check"]):
        print("usage: python scripts/decisions.py write|check")
        return 2
    try:
        page = index(read_all(folder))
    except ValueError as error:
        print(error)
        return 1
    path = folder / INDEX
    if arguments[0] == "write":
        path.write_text(page, "utf-8")
        return 0
    if path.exists() and path.read_text("utf-8") == page:
        return 0
    print("docs/decisions/README.md is not what the decisions say: python scripts/decisions.py write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
