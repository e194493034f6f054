"""``python -m release wheels OUT``: progress on standard error, names on standard output. Exit code 1: it failed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from images.platforms import NAMES, PLATFORMS, parse
from images.tools import ImageError

from release import house


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = _parse(argv)
    try:
        lines = _run(args)
    except ImageError as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return 0


def _run(args: argparse.Namespace) -> list[str]:
    return [str(path) for path in house.build(args.out.absolute(), parse(args.platforms) if args.platforms else PLATFORMS)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="release", description="Build and verify what a release of xpyd is made of.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    make = commands.add_parser("wheels", help="build the wheels, the same bytes each time")
    make.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    make.add_argument("--platforms", default="", metavar="NAMES", help=f"of {', '.join(NAMES)} (default: all)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
