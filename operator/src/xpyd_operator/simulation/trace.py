"""Requests of a trace: when they come, how long prompt and answer are. Reading is pure: lines in, requests out.

Two forms are known by their first line:

    {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, …}     one JSON object a line
    time,prompt tokens,generated tokens                                                 CSV with a header; ISO 8601 or
    seconds
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import NamedTuple

from xpyd_operator.errors import XpydError

MOST = 5_000_000
"""Requests of one trace."""
Draw = Callable[[], float]
"""A number from 0 to below 1."""


class Arrival(NamedTuple):
    """One request."""

    at: float
    """Seconds since the first."""
    prompt: int
    output: int


Trace = list[Arrival]


def read(lines: Iterable[str], source: str) -> Trace:
    """Requests in the order of their times, the first at 0.

    Raises:
        XpydError: a line is of neither form; names source, line and what is wrong.
    """
    rows = iter(lines)
    first = next(rows, "").strip()
    if not first:
        raise XpydError(f"{source}: no requests")
    parse = _json if first.startswith("{") else _csv
    found = [_checked(_json, first, source, 1)] if parse is _json else []
    for number, line in enumerate(rows, 2):
        if not line.strip():
            continue
        if len(found) >= MOST:
            raise XpydError(f"{source}: more than {MOST} requests")
        found.append(_checked(parse, line, source, number))
    if not found:
        raise XpydError(f"{source}: no requests")
    start = min(at for at, _, _ in found)
    return sorted(Arrival(at - start, prompt, output) for at, prompt, output in found)


def _checked(
    parse: Callable[[str], tuple[float, int, int]], line: str, source: str, number: int
) -> tuple[float, int, int]:
    try:
        at, prompt, output = parse(line)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        what = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise XpydError(f"{source}:{number}: {what}") from None
    if not math.isfinite(at) or prompt < 1 or output < 1:
        raise XpydError(f"{source}:{number}: time {at}, prompt {prompt}, output {output}: lengths must be at least 1")
    return at, prompt, output


def _json(line: str) -> tuple[float, int, int]:
    row = json.loads(line)
    return float(row["timestamp"]) / 1000, int(row["input_length"]), max(1, int(row["output_length"]))


def _csv(line: str) -> tuple[float, int, int]:
    row = next(csv.reader([line]))
    if len(row) < 3:
        raise ValueError(f"{len(row)} columns; time, prompt tokens and generated tokens are needed")
    try:
        at = float(row[0])
    except ValueError:
        at = datetime.fromisoformat(row[0][:26]).timestamp()
    return at, max(1, int(row[1])), max(1, int(row[2]))


def scaled(trace: Trace, factor: float, draw: Draw, *, spread_s: float = 30.0) -> Trace:
    """The same shape of load with ``factor`` times the requests: each comes so often, copies within ``spread_s`` of it."""
    if factor == 1:
        return trace
    found: Trace = []
    for each in trace:
        times = int(factor) + (draw() < factor % 1)
        for copy in range(times):
            moved = (draw() * 2 - 1) * spread_s if copy else 0.0
            found.append(each._replace(at=max(0.0, each.at + moved)))
    return sorted(found)


def cut(trace: Trace, start_s: float, length_s: float) -> Trace:
    """A slice, which begins at 0."""
    return [each._replace(at=each.at - start_s) for each in trace if start_s <= each.at < start_s + length_s]


def sinusoid(
    draw: Draw, *, length_s: float = 7200.0, period_s: float = 3600.0, rate: float = 8.0,
    prompt: tuple[int, int] = (6000, 1500), output: tuple[int, int] = (400, 1600),
) -> Trace:
    """Poisson arrivals whose lengths swing from the first value of each pair to the second and back.

    ``prompt`` and ``output`` swing against each other, so the fleet must go from prefill-heavy to decode-heavy. A single
    request's lengths are exponential around the mean of its time, a tenth of it at least and three times it at most.
    """
    found: Trace = []
    at = 0.0
    while True:
        at += -math.log(1 - draw()) / rate
        if at >= length_s:
            return found
        share = (1 - math.cos(2 * math.pi * at / period_s)) / 2
        lengths = [low ** (1 - share) * high**share for low, high in (prompt, output)]
        drawn = [max(1, int(mean * min(3.0, max(0.1, -math.log(1 - draw()))))) for mean in lengths]
        found.append(Arrival(at, drawn[0], drawn[1]))
