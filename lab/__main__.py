"""``python -m lab NAME``: run a bench, a campaign or a tool of the catalog.

    python -m lab --list                  what there is
    python -m lab NAME                    as it is recorded
    python -m lab NAME ARGUMENT…          with these arguments alone, which are its own (NAME --help tells them)
    python -m lab --fresh NAME            begin anew what would go on where it ended
    python -m lab --docs [--check]        write the tables of the documentation (or say whether they are current)

Settings of the environment reach it. Exit code: that of what ran; 1 something is missing; 2 there is no such command.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence

from lab import extras, tables
from lab.catalog import COMMANDS, ROOT, Command

WIDTH = 120
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def listing() -> str:
    """A line for each command: name, minutes, what it is, what it needs."""
    rows = []
    for command in COMMANDS.values():
        head, needs = f"{command.name:28} {command.minutes:4} min  ", f" [{command.needs}]" if command.needs else ""
        about = textwrap.shorten(LINK.sub(r"\1", command.about), WIDTH - len(head) - len(needs), placeholder=" …")
        rows.append(head + about + needs)
    return "\n".join(rows)


def settings(command: Command, folders: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: what is set stays, but for PYTHONPATH, before which its own goes."""
    own = {name: value.format(**folders) for name, value in command.env.items()}
    path = os.pathsep.join(filter(None, (own.pop("PYTHONPATH", ""), environ.get("PYTHONPATH"))))
    return {**own, **environ} | ({"PYTHONPATH": path} if path else {})


def runs(command: Command, given: Sequence[str], folders: Mapping[str, str], *, fresh: bool) -> list[list[str]]:
    """The processes to start, one for each of its runs."""
    argv = [part.format(**folders) for part in command.argv]
    anew = [command.anew] if fresh and command.anew.startswith("--") else []
    return [[*command.prefix, sys.executable, *argv, *arguments, *anew]
            for arguments in ([tuple(given)] if given else command.usual)]


def run(command: Command, given: Sequence[str], *, fresh: bool = False) -> int:
    """Have what it needs, and run it; its exit code."""
    if command.root and os.geteuid() != 0:
        print(f"{command.name} needs root", file=sys.stderr)
        return 1
    try:
        folders = {name: str(extras.install(name)) for name in command.extras}
    except extras.ExtraError as error:
        print(f"{command.name}: {error}", file=sys.stderr)
        return 1
    if fresh and command.anew and not command.anew.startswith("--"):
        (ROOT / command.anew).unlink(missing_ok=True)
    if command.profile and (code := run(COMMANDS["cluster-build"], ["--profile", command.profile])):
        return code
    env, processes = settings(command, folders, os.environ), list[subprocess.Popen[bytes]]()
    for argv in runs(command, given, folders, fresh=fresh):
        processes.append(subprocess.Popen(argv, cwd=ROOT, env=env))
        if not command.together and (code := _wait(processes)):
            return code
    return _wait(processes)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """The worst exit code. Ctrl-C reaches them as well: they end what they have begun, and are waited for."""
    while True:
        try:
            return max((abs(process.wait()) for process in processes), default=0)
        except KeyboardInterrupt:
            continue


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    first = arguments[0] if arguments else ""
    if first in {"--help", "-h"}:
        print(__doc__)
        return 0
    if first == "--list":
        print(listing())
        return 0
    if first == "--docs":
        return tables.main(check="--check" in arguments)
    fresh = first == "--fresh"
    name, *given = arguments[fresh:] or [""]
    if name in COMMANDS:
        return run(COMMANDS[name], given, fresh=fresh)
    close = difflib.get_close_matches(name, COMMANDS) or [each for each in COMMANDS if name and name in each]
    print(listing(), file=sys.stderr)
    print(f"\nno such command: {name}" + (f"; did you mean {' or '.join(close)}?" if close else "") if name
          else "\nusage: python -m lab NAME [ARGUMENT…]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
