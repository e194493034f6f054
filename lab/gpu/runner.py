"""Runs checks one after the other, each in a process group of its own with a deadline, and makes the table and the file.

A check that crashes, hangs or breaks CUDA takes nothing else with it. Free of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

TAIL: Final = 12
"""Lines of what a check printed that are shown where it ended without an answer."""
COMMAND: Final = (sys.executable, "-m", "lab.gpu")


class Outcome(StrEnum):
    """Of a check."""

    OK = "ok"
    BAD = "BAD"
    KNOWN = "known"
    """A fault that is known: it is shown, and is no failure."""
    MENDED = "mended"
    """A fault that was known does not show any more: its row is to say so no longer."""
    LEFT_OUT = "left out"


class Check(NamedTuple):
    """``run``: module of this package and function, and its arguments after the device. ``known``: the fault that it shows
    today.
    """

    name: str
    run: str
    limit_s: float
    arguments: tuple[Any, ...] = ()
    known: str = ""


class Row(NamedTuple):
    """What became of a check."""

    name: str
    outcome: Outcome
    seconds: float
    figures: Mapping[str, Any]
    why: str = ""


def run(check: Check, device: str, environ: Mapping[str, str], command: Sequence[str] = COMMAND) -> Row:
    """One check to its end, or to its deadline.

    ``command``: starts a check's process, which is told by ``--order`` what to run, and where to leave what it finds.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "output")
        order = json.dumps({"run": check.run, "device": device, "arguments": check.arguments, "result": str(result)})
        with log.open("w") as out:
            process = subprocess.Popen([*command, "--order", order], stdin=subprocess.DEVNULL, stdout=out,
                                       stderr=subprocess.STDOUT, start_new_session=True, env=dict(environ))
            try:
                process.wait(check.limit_s)
                ended = f"ended with exit code {process.returncode}" if process.returncode >= 0 else \
                    f"ended by {signal.Signals(-process.returncode).name}"
            except subprocess.TimeoutExpired:
                ended = f"not over after {check.limit_s:.0f} s"
            finally:
                end(process)
        said = json.loads(result.read_text()) if result.exists() else {
            "why": ended + "".join(f"\n{line}" for line in log.read_text(errors="replace").splitlines()[-TAIL:])}
    return judge(check, said, time.monotonic() - began)


def judge(check: Check, said: Mapping[str, Any], seconds: float) -> Row:
    """What its process has said."""
    figures, why = said.get("figures", {}), said.get("why", "")
    if said.get("left_out"):
        return Row(check.name, Outcome.LEFT_OUT, seconds, figures, said["left_out"])
    if not why:
        if check.known and not said.get("no_device"):
            return Row(check.name, Outcome.MENDED, seconds, figures, f"no longer seen: {check.known}")
        return Row(check.name, Outcome.OK, seconds, figures)
    if check.known and figures:  # only what was measured can be the known fault; a crash never is
        return Row(check.name, Outcome.KNOWN, seconds, figures, f"{check.known}: {why}")
    return Row(check.name, Outcome.BAD, seconds, figures, why)


def end(process: subprocess.Popen[bytes]) -> None:
    """Its whole group, whatever it does."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(checks: Sequence[Check], device: str, environ: Mapping[str, str], say: Callable[[str], object],
            command: Sequence[str] = COMMAND) -> list[Row]:
    """All of them; a line for each as soon as it is over."""
    rows = []
    for check in checks:
        row = run(check, device, environ, command)
        say(line(row))
        rows.append(row)
    return rows


def line(row: Row) -> str:
    """Of the table."""
    told = ", ".join(f"{name} {value}" for name, value in row.figures.items())
    why = "".join(f"\n           {each}" for each in row.why.splitlines())
    return f"{row.outcome:8}  {row.name:14}  {row.seconds:6.1f} s  {told}".rstrip() + why


def failures(rows: Sequence[Row]) -> list[str]:
    """Names of the checks that did not hold."""
    return [row.name for row in rows if row.outcome is Outcome.BAD]


def record(rows: Sequence[Row], machine: Mapping[str, Any]) -> dict[str, Any]:
    """For the results file."""
    return {"machine": dict(machine), "checks": {
        row.name: {"outcome": str(row.outcome), "seconds": round(row.seconds, 1), "figures": dict(row.figures),
                   **({"why": row.why} if row.why else {})} for row in rows}}
