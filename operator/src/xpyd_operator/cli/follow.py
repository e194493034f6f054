"""Showing how a service comes up, changes or ends: a live table on a terminal, one line per change elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console
from rich.live import Live

from xpyd_operator.cli.table import render
from xpyd_operator.errors import XpydError
from xpyd_operator.local.logs import tail
from xpyd_operator.local.view import Snapshot, Viewer
from xpyd_operator.plan.backoff import LOOPING

logger = logging.getLogger(__name__)
POLL_S = 0.5


class WaitFailed(XpydError):
    """What was waited for did not come, or cannot come any more."""


class _Console(Console):
    """Leaves it to its user what is done when nobody reads any more; rich would end the program."""

    def on_broken_pipe(self) -> None:
        """As rich calls it while it handles the error."""
        raise BrokenPipeError("nobody reads")


class Show:
    """Shows snapshots on standard error; the progress of starting engines comes from their logs.

    Once nobody reads any more, as the terminal is gone or the other end of a pipe, nothing more is said: whoever shows has
    something to look after.
    """

    def __init__(self) -> None:
        self._console = _Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        self._began = time.monotonic()
        self._said: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._safely(self._live.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._safely(self._live.stop)

    def print_line(self, text: str) -> None:
        """Print a line on standard error."""
        self._safely(lambda: self._console.print(text, highlight=False, markup=False, soft_wrap=True))

    def answer(self, text: str) -> None:
        """Print a line of the answer on standard output, as far as anybody reads."""
        self._safely(lambda: print_answer(text))

    def _safely(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            logger.warning("nobody reads any more: %s", error)
            nothing = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(nothing, stream.fileno())
            os.close(nothing)

    def update(self, snapshot: Snapshot) -> None:
        """Show a snapshot."""
        if self._live is not None:
            live = self._live
            self._safely(lambda: live.update(render(snapshot), refresh=True))
            return
        for view in (*snapshot.instances, *((snapshot.router,) if snapshot.router else ())):
            problem = f" ({view.problem})" if view.state in ("crashed", "draining") and view.problem else ""
            progress = f": {view.progress}" if view.progress else ""
            self._line(view.name, f"{view.name} ({view.role}) {view.state}{problem}{progress}")
        names = {view.name for view in snapshot.instances}
        for name in self._said.keys() - names - {"router"}:
            del self._said[name]
            self.print_line(f"[{self._elapsed()}] {name} is gone")

    def _line(self, name: str, text: str) -> None:
        if self._said.get(name) != text:
            self._said[name] = text
            self.print_line(f"[{self._elapsed()}] {text}")

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began:4.0f} s"


async def wait_for(
    viewer: Viewer, show: Show, condition: Callable[[Snapshot], bool], timeout_s: float, *, what: str
) -> Snapshot:
    """Show snapshots until one satisfies the condition.

    Raises:
        WaitFailed: the deadline passes, an instance is in a crash loop, or nobody is there any more to work on it.
    """
    end = time.monotonic() + timeout_s
    alone = 0
    while True:
        snapshot = await viewer.take_snapshot(time.time())
        show.update(snapshot)
        if condition(snapshot):
            return snapshot
        alone = 0 if snapshot.supervisor else alone + 1
        if alone > 10:
            raise WaitFailed(f"the supervisor of {snapshot.service} has ended:\n{_last(viewer.folder.log, 10)}")
        looping = [view for view in snapshot.instances if view.restarts >= LOOPING and view.state == "crashed"]
        if looping and any(c.type == "Degraded" and c.status == "True" for c in snapshot.status.conditions):
            view = looping[0]
            why = f"{view.name} crashes again and again ({view.problem})"
            raise WaitFailed(f"{why}; the end of {view.log}:\n{_last(Path(view.log))}")
        if snapshot.router is not None and snapshot.router.state == "crashed" and snapshot.router.restarts >= LOOPING:
            log = snapshot.router.log
            raise WaitFailed(f"the router crashes again and again; the end of {log}:\n{_last(Path(log))}")
        if time.monotonic() >= end:
            raise WaitFailed(f"{snapshot.service} was not {what} within {timeout_s:g} s: {_missing(snapshot)}")
        await asyncio.sleep(POLL_S)


def _missing(snapshot: Snapshot) -> str:
    late = [view for view in snapshot.instances if not view.ready and view.log]
    text = "; ".join(c.message for c in snapshot.status.conditions if c.type == "Ready") or "nothing is known"
    return text + "".join(f"\nthe end of {view.log}:\n{_last(Path(view.log))}" for view in late[:1])


def _last(log: Path, lines: int = 20) -> str:
    return "\n".join(tail(log, lines)) or "(empty)"


def to_json(value: msgspec.Struct) -> str:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def print_answer(text: str) -> None:
    """Print a line of the answer on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
