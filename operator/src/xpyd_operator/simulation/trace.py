"""Requests of a trace: when they come, how long prompt and answer are. Reading is pure: lines in, requests out.

Two forms are known by their first line:

    {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [block, …]}
                                                   one JSON object a line; hashes of blocks of 512 tokens are optional
    time,prompt tokens,generated tokens            CSV; ISO 8601 or seconds. A first line without any number is a header

Lines are in the order of their times.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Literal, NamedTuple

from xpyd_operator.errors import XpydError
from xpyd_operator.simulation.prefix import BLOCK, Hashes

MOST = 5_000_000
"""Requests of one trace."""
MANY, SHORT_S, DENSE = 100, 600.0, 100.0
"""So many requests in less time than that, at more a second: their times are probably in another unit."""
SPARSE_S = 3600.0
"""Likewise, where so much lies between two of them on average,"""
LONGEST_S = 8 * 86_400.0
"""or between the first and the last: ten minutes in milliseconds, taken for seconds, are a week."""
MOST_WORDS = 60
"""Characters of what is wrong that are said."""
COPY = 1 << 48
"""Between the hashes of a request and those of its copy."""
Draw = Callable[[], float]
"""A number from 0 to below 1."""
Unit = Literal["s", "ms", "us"]
UNITS: dict[Unit, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class Arrival(NamedTuple):
    """One request."""

    at: float
    """Seconds since the first."""
    prompt: int
    output: int
    hashes: Hashes = ()
    """Of the blocks of its prompt, where they are known."""


Trace = list[Arrival]


def read(lines: Iterable[str], source: str, unit: Unit | None = None) -> Trace:
    """Requests in the order of their times, the first at 0.

    Args:
        lines: of the file.
        source: its name, for errors.
        unit: of numbers that stand for times; default: what the form says, if that is plausible.

    Raises:
        XpydError: a line is of neither form, its time goes back, or times are in another unit; names source, line and what
            would be right.
    """
    found: Trace = []
    parse: Callable[[str, Unit | None], Arrival] | None = None
    start, number = 0.0, 0
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if parse is None:
            parse = _json if text.startswith("{") else _csv
            if parse is _csv and _is_header(text):
                continue
        if len(found) >= MOST:
            raise XpydError(f"{source}: more than {MOST} requests")
        one = _checked(parse, text, unit, f"{source}:{number}")
        if not found:
            start = one.at
        elif one.at - start < found[-1].at:
            raise XpydError(f"{source}:{number}: its time is {found[-1].at + start - one.at:g} s before that of the "
                            "request before it; sort the lines by time")
        found.append(one._replace(at=one.at - start))
    if not found:
        raise XpydError(f"{source}: no requests")
    if unit is None:
        _check_unit(found, f"{source}:{number}", "ms" if parse is _json else "s")
    return found


def _check_unit(found: Trace, where: str, taken: Unit) -> None:
    """Refuse times that are in another unit, by what that makes of the load."""
    count, length = len(found), found[-1].at
    if count < MANY:
        return
    dense = length < SHORT_S and count > DENSE * length
    if dense or length > min(SPARSE_S * count, LONGEST_S):
        right: Unit = "s" if dense and taken == "ms" else "ms" if taken == "s" and not dense else "us"
        if dense and taken == "s":
            raise XpydError(f"{where}: {count} requests in {length:.3g} s: times in CSV are seconds; write them in "
                            "seconds, or say --time-unit s if they are")
        raise XpydError(f"{where}: {count} requests in {length:.3g} s: times are taken for {taken}; say --time-unit "
                        f"{right}, or --time-unit {taken} if they are")


def _is_header(text: str) -> bool:
    """Whether no column is a number or a time."""
    row = next(csv.reader([text]))
    for each in row:
        try:
            _time(each, None)
        except ValueError:
            continue
        return False
    return True


def _checked(parse: Callable[[str, Unit | None], Arrival], line: str, unit: Unit | None, where: str) -> Arrival:
    try:
        one = parse(line, unit)
    except KeyError as error:
        raise XpydError(f"{where}: no field {error}") from None
    except json.JSONDecodeError as error:
        raise XpydError(f"{where}: no JSON object: {error.msg} at column {error.colno}; each line is one") from None
    except (ValueError, TypeError, OverflowError, csv.Error) as error:
        raise XpydError(f"{where}: {error}") from None
    if not math.isfinite(one.at):
        raise XpydError(f"{where}: time is {one.at}; write seconds")
    if one.prompt < 0 or one.output < 0:
        raise XpydError(f"{where}: {one.prompt} prompt tokens and {one.output} generated: lengths are 0 or more")
    one = one._replace(prompt=max(1, one.prompt), output=max(1, one.output))
    if one.hashes and len(one.hashes) != -(-one.prompt // BLOCK):
        raise XpydError(f"{where}: {len(one.hashes)} hash_ids for {one.prompt} prompt tokens; blocks have {BLOCK} tokens, "
                        f"so {-(-one.prompt // BLOCK)} are right")
    return one


def _json(line: str, unit: Unit | None) -> Arrival:
    row = json.loads(line)
    try:
        hashes = tuple(int(each) for each in row.get("hash_ids") or ())
    except (ValueError, TypeError):
        raise ValueError(f"hash_ids are {str(row['hash_ids'])[:MOST_WORDS]}; write a list of whole numbers") from None
    try:
        at = float(row["timestamp"]) * UNITS[unit or "ms"]
    except (ValueError, TypeError):
        raise ValueError(f"timestamp is {row['timestamp']!r}; write milliseconds") from None
    return Arrival(at, _length("input_length", row["input_length"]), _length("output_length", row["output_length"]), hashes)


def _csv(line: str, unit: Unit | None) -> Arrival:
    row = next(csv.reader([line]))
    if len(row) < 3:
        raise ValueError(f"{len(row)} columns; time, prompt tokens and generated tokens are needed")
    return Arrival(_time(row[0], unit), _length("prompt tokens", row[1]), _length("generated tokens", row[2]))


def _length(name: str, given: object) -> int:
    """A number of tokens."""
    try:
        return int(given)  # type: ignore[call-overload, no-any-return]
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} are {str(given)[:MOST_WORDS]!r}; write a whole number") from None


def _time(text: str, unit: Unit | None) -> float:
    try:
        return float(text) * UNITS[unit or "s"]
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text[:26]).timestamp()
    except ValueError:
        raise ValueError(f"time is {text[:MOST_WORDS]!r}; write seconds, or a time as 2023-11-16 18:17:03") from None


def scale_trace(trace: Trace, factor: float, draw: Draw, *, spread_s: float = 30.0) -> Trace:
    """The trace with ``factor`` times the requests in the same shape of load: copies come within ``spread_s`` of theirs.

    A copy shares nothing with what it is a copy of: it is somebody else's prompt.
    """
    if factor == 1:
        return trace
    found: Trace = []
    for each in trace:
        times = int(factor) + (draw() < factor % 1)
        for copy in range(times):
            moved = (draw() * 2 - 1) * spread_s if copy else 0.0
            hashes = tuple(one + copy * COPY for one in each.hashes) if copy else each.hashes
            found.append(each._replace(at=max(0.0, each.at + moved), hashes=hashes))
    return sorted(found)


def cut(trace: Trace, start_s: float, length_s: float) -> Trace:
    """A slice, which begins at 0."""
    return [each._replace(at=each.at - start_s) for each in trace if start_s <= each.at < start_s + length_s]
