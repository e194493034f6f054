"""``python -m lab campaigns``: all campaigns one after the other, and a table of their figures against their goals.

    python -m lab campaigns [--only NAMES] [--fresh] [--table]

It keeps on after a failure, and goes on where it was ended: what has ended on this code does not run again. Output and what
is kept: .cache/campaigns. Exit code: 0 all has ended well and met its goals; 1 not so; 130 it was ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lab.campaigns.campaign_plan import chosen, good, table
from lab.campaigns.campaign_rows import ROWS
from lab.campaigns.campaign_runs import Runner, code_of

ROOT = Path(__file__).resolve().parents[2]


def _ended(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with commas or blanks between")
    parser.add_argument("--fresh", action="store_true", help="run again what has ended")
    parser.add_argument("--table", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    try:
        rows = chosen(ROWS, given.only)
    except ValueError as error:
        parser.error(str(error))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    is_root = os.geteuid() == 0
    runner = Runner(ROOT, ROOT / ".cache/campaigns", code_of(ROOT), is_root=is_root, say=_say)
    ended = False
    try:
        if not given.table:
            runner.run(rows, fresh=given.fresh)
    except KeyboardInterrupt:
        ended = True
        _say("ended; `python -m lab campaigns` goes on from here")
    _say("\n" + table(rows, runner.state, root=is_root))
    if ended:
        return 130
    return 0 if good(rows, runner.state, root=is_root) else 1


if __name__ == "__main__":
    sys.exit(main())
