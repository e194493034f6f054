"""``python -m images build|push|paths``: JSON on standard output, progress on standard error. Exit code 1: it failed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from images import inputs
from images.build import build
from images.hosts import host_paths
from images.platforms import NAMES, parse
from images.push import check, push
from images.tools import ImageError, default_cache, say


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = _parse(argv)
    try:
        result: object
        if args.command == "paths":
            result = host_paths()
        else:
            os.nice(10)
            cache, registry = args.cache.absolute(), check(args.registry) if args.command == "push" else ""
            platforms = args.platforms or (",".join(NAMES) if registry else "")
            built = build(cache, args.base or None, args.only, parse(platforms))
            result = push(cache, built, registry, args.tag or inputs.version(), args.insecure) if registry else built
    except ImageError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=1))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="images", description="Build and push the container images of xpyd.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    making = argparse.ArgumentParser(add_help=False)
    making.add_argument("--base", help="base of operator and sidecar, with python3 ≥ 3.11 (default: our own Debian)")
    making.add_argument("--platforms", default="", metavar="NAMES",
                        help=f"of {', '.join(NAMES)}; several make one index (default: this machine's; to push: all)")
    making.add_argument("--cache", type=Path, default=default_cache(), help="folder of archives and layers (%(default)s)")
    make = commands.add_parser("build", parents=[making], help="build what is not there yet")
    names = [kind.name for kind in inputs.KINDS]
    make.add_argument("only", nargs="*", metavar="IMAGE", help=f"of {', '.join(names)} (default: all)")
    send = commands.add_parser("push", parents=[making], help="push operator and sidecar")
    send.set_defaults(only=[kind.name for kind in inputs.KINDS if kind.published])
    send.add_argument("registry", help="host[:port][/path]")
    send.add_argument("--tag", help="default: the version of xpyd")
    send.add_argument("--insecure", action="store_true", help="allow plain HTTP")
    commands.add_parser("paths", help="print what a pod of engine-cpu mounts from the host")
    args = parser.parse_args(argv)
    for name in getattr(args, "only", ()):
        if name not in names:
            parser.error(f"no image {name!r}; there are {', '.join(names)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
