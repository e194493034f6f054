"""``xpyd logs``: the output of engines, agents, router and supervisor."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from xpyd_operator.cli.choose import choose
from xpyd_operator.errors import NotFound
from xpyd_operator.local.logs import Follower, tail
from xpyd_operator.local.paths import ServiceFolder, matching, services

POLL_S = 0.3


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "logs",
        help="print logs of a service of this host",
        description="Print logs. INSTANCE is an instance (its engine and agent), NAME-eN/engine, NAME-eN/agent, router or "
        "supervisor; without it all are printed, each line with its origin.",
        epilog="Exit codes: 0 printed, 2 no such service or instance.",
    )
    parser.add_argument("what", nargs="*", metavar="NAME INSTANCE", help="service and instance; each may be left out")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")
    parser.add_argument("--tail", type=int, default=50, metavar="N", help="last lines of each log (default 50)")


def run(args: argparse.Namespace) -> int:
    """0: printed."""
    name, instance = split(args.what)
    folder = choose(name)
    found = sources(folder, instance)
    followers = {label: Follower(path, from_end=True) for label, path in found.items()}
    for label, path in found.items():
        for line in tail(path, args.tail):
            _print(label, line, alone=len(found) == 1)
    while args.follow:
        for label, path in sources(folder, instance).items():
            follower = followers.setdefault(label, Follower(path, from_end=False))
            for line in follower.read():
                _print(label, line, alone=len(followers) == 1)
        sys.stdout.flush()
        time.sleep(POLL_S)
    return 0


def split(words: list[str]) -> tuple[str | None, str | None]:
    """Service and instance out of at most two words; a single word that is no service is an instance.

    Raises:
        NotFound: more than two words.
    """
    if len(words) > 2:
        raise NotFound(f"logs takes a service and an instance, not {len(words)} words")
    if len(words) == 2:
        return words[0], words[1]
    if words and words[0] not in services():
        owner = next((name for name in services() if words[0].startswith(f"{name}-e")), None)
        return owner, words[0]
    return (words[0] if words else None), None


def sources(folder: ServiceFolder, instance: str | None) -> dict[str, Path]:
    """Log files by label. Instances that are gone keep their last logs.

    Raises:
        NotFound: nothing has this name.
    """
    every = {"supervisor": folder.log, "router": folder.router / "router.log"}
    for parent in (folder.path / "previous", folder.instances):
        for entry in matching(parent, "*"):
            others = sorted(path.stem for kind in ("engine", "agent") for path in matching(entry, f"{kind}-*.log"))
            for part in ("engine", "agent", *others):
                every[f"{entry.name}/{part}"] = entry / f"{part}.log"
    if instance is None:
        return {label: path for label, path in every.items() if path.is_file() and path.parent.parent.name != "previous"}
    found = {label: path for label, path in every.items() if label == instance or label.startswith(f"{instance}/")}
    if not found:
        known = sorted({label.partition("/")[0] for label in every})
        raise NotFound(f"{folder.service} has no instance {instance}; there are {', '.join(known)}")
    return found


def _print(label: str, line: str, *, alone: bool) -> None:
    sys.stdout.write(f"{line}\n" if alone else f"{label} | {line}\n")
