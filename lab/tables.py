"""The tables of commands in the documentation, from the catalog: ``python -m lab --docs`` writes them.

In a page such a table stands between two comments of which the first names it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lab.catalog import BENCHES, CAMPAIGNS, ROOT, Command

PAGES: Final = ("docs/development/campaigns.md", "bench/README.md")
PLACE: Final = re.compile(r"(<!-- (\w+): python -m lab --docs -->\n).*?(<!-- end -->\n)", re.DOTALL)


def _table(heads: Sequence[str], commands: Sequence[Command], cells: Callable[[Command], Sequence[str]]) -> str:
    rows = (heads, ["---"] * len(heads), *([f"`python -m lab {each.name}`", *cells(each)] for each in commands))
    return "".join(f"| {' | '.join(row)} |\n" if row[0] != "---" else f"|{'|'.join(row)}|\n" for row in rows)


def _needs(command: Command) -> str:
    return f"{command.about} ({command.needs})" if command.needs else command.about


def campaigns() -> str:
    """What each campaign does, and what of it the tests do."""
    return _table(("command", "what it does", "minutes", "in CI"), CAMPAIGNS,
                  lambda each: (_needs(each), str(each.minutes), each.short or "nothing"))


def benches() -> str:
    """What each bench measures, with links as seen from bench/."""
    return _table(("command", "what", "minutes", "results"), BENCHES, lambda each: (
        _needs(each).replace("](", "](../docs/development/").replace("development/../", ""), str(each.minutes),
        f"`results/{each.result}`"))


def renewed(text: str) -> str:
    """A page with its tables as the catalog has them."""
    made = {"campaigns": campaigns, "benches": benches}
    return PLACE.sub(lambda found: f"{found[1]}\n{made[found[2]]()}\n{found[3]}", text)


def main(*, check: bool, root: Path = ROOT) -> int:
    """Write the pages, or say which are not current; the exit code."""
    stale = [page for page in PAGES if (text := (root / page).read_text()) != renewed(text)]
    for page in stale:
        if check:
            print(f"{page} is not what lab/catalog.py says: run `python -m lab --docs`", file=sys.stderr)
        else:
            (root / page).write_text(renewed((root / page).read_text()))
            print(page)
    return 1 if check and stale else 0
