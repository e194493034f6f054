"""Durations as text: ``500ms``, ``30s``, ``1h30m``. The same that CEL's ``duration()`` reads, without its finest units."""

from __future__ import annotations

import re

_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def seconds(text: str) -> float:
    """What the text says, in seconds.

    Raises:
        ValueError: it is no duration.
    """
    total, end = 0.0, 0
    for part in _PART.finditer(text):
        if part.start() != end:
            break
        total, end = total + float(part[1]) * _SECONDS[part[2]], part.end()
    if end != len(text) or not text:
        raise ValueError(f"{text!r} is not a duration; write a number and a unit (ms, s, m, h), e.g. 30s or 1h30m")
    return total
