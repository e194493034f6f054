"""``python -m release wheels|build|verify``: progress on standard error, names on standard output. Exit code 1: it failed.

    python -m release wheels DIST                                        the wheels alone
    python -m release build OUT --images FILE --rehearse                all, with a throw-away key
    python -m release build OUT --images FILE --key KEY    the same, from a commit alone, with the release's key
    python -m release verify OUT --signers FILE                          whether a folder is what its signatures say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from images.platforms import NAMES, PLATFORMS, parse
from images.tools import ImageError, need

from release import folder, house, toolbox


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
    out = args.out.absolute()
    if args.command == "wheels":
        return [str(path) for path in house.build(out, parse(args.platforms) if args.platforms else PLATFORMS)]
    if args.command == "verify":
        return [f"{out} is whole, and built from commit {folder.verify(out, args.signers, toolbox.python())}"]
    need(args.kubectl, "kubectl")
    return [str(path) for path in folder.build(out, args.images, args.kubectl, args.key, args.builder)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="release", description="Build and verify what a release of xpyd is made of.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    make = commands.add_parser("wheels", help="build the wheels, the same bytes each time")
    make.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    make.add_argument("--platforms", default="", metavar="NAMES", help=f"of {', '.join(NAMES)} (default: all)")
    whole = commands.add_parser("build", help="build, sign and verify everything")
    whole.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    whole.add_argument("--images", type=Path, required=True, metavar="FILE", help="what `python -m images push` printed")
    who = whole.add_mutually_exclusive_group(required=True)
    who.add_argument("--key", type=Path, metavar="FILE", help="private key of releases (ed25519, OpenSSH's form)")
    who.add_argument("--rehearse", action="store_true", help="with a key that is made for it and thrown away")
    whole.add_argument("--builder", default=folder.default_builder(), metavar="URI", help="who builds (%(default)s)")
    whole.add_argument("--kubectl", default="kubectl", metavar="FILE", help="whose kustomize is used")
    look = commands.add_parser("verify", help="say whether a folder is what its signatures say")
    look.add_argument("out", type=Path, metavar="OUT")
    look.add_argument("--signers", type=Path, required=True, metavar="FILE", help="of one line: release ssh-ed25519 KEY")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
