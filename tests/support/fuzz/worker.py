"""One target in a process of its own, which a fault ends: ``python -m fuzz.worker TARGET FOLDER --seconds 30 --seed 1``.

The input that is being tried lies in FOLDER/TARGET.now, behind its length as 8 bytes; whoever started the process finds it
there. With ``--input FILE`` that input alone is tried.
"""

from __future__ import annotations

import argparse
import faulthandler
import mmap
import signal
import sys
from importlib import import_module
from pathlib import Path

from fuzz.edges import Edges
from fuzz.mutate import MAX_BYTES
from fuzz.search import Search

LIMIT_S = 20
"""An input that takes longer hangs."""
SIZE = 8


class Notebook:
    """The input that is being tried, in memory that outlives the process."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(SIZE + MAX_BYTES)
            self._memory = mmap.mmap(file.fileno(), SIZE + MAX_BYTES)

    def note(self, data: bytes) -> None:
        """Write it down, and give it its time."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"an input of {len(data)} bytes; the most are {MAX_BYTES}")
        self._memory[:SIZE + len(data)] = len(data).to_bytes(SIZE, "little") + data
        signal.alarm(LIMIT_S)


def noted(path: Path) -> bytes:
    """What was written down last."""
    raw = path.read_bytes()
    return raw[SIZE:SIZE + int.from_bytes(raw[:SIZE], "little")]


def main() -> None:
    """Search, and print the figures."""
    parser = argparse.ArgumentParser(prog="fuzz.worker")
    parser.add_argument("target", help="a module with MODULES, TOKENS, seeds and check")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=Path)
    args = parser.parse_args()
    faulthandler.register(signal.SIGALRM, chain=True)  # says where it hangs, and then it ends
    target = import_module(args.target if "." in args.target else f"fuzz.{args.target}")
    edges = Edges(target.MODULES)
    if args.input is not None:
        signal.alarm(LIMIT_S)
        print(target.check(args.input.read_bytes()))
        return
    notebook = Notebook(args.folder / f"{args.target}.now")
    search = Search(target.check, edges, target.seeds(), target.TOKENS, args.seed, about=notebook.note)
    print(search.run(args.seconds))


if __name__ == "__main__":
    sys.exit(main())
