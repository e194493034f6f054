r"""Halves of characters in JSON. UTF-16 has two code units for a character such as an emoji, and who cuts a text between
them (JavaScript's ``slice``) sends one of them alone. It stands for no character, and no decoder takes it.

    "\ud83d\ude00"     a pair: one character
    "\ud83d …"          its first half alone
    "\\ud83d"          a backslash, and five letters
"""

from __future__ import annotations

import re

MAX_LOOKED = 4096
"""Halves that are looked at in a body, and backslashes before one of them."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_SECOND = re.compile(rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def lone_surrogate(body: bytes) -> tuple[int, bytes] | None:
    """Where the first half without its other half stands, in bytes, and how it is written; None where none was found.

    For a body that could not be decoded: words for its client. So it is bounded, and may miss one.
    """
    at = 0
    for _ in range(MAX_LOOKED):
        found = _HALF.search(body, at)
        if found is None:
            return None
        at = found.start()
        before = body[max(0, at - MAX_LOOKED):at]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:
            at += 1  # the backslash is an escaped one
        elif _SECOND.match(body, at) is None and _SECOND.match(body, found.end()) is not None:
            at = found.end() + len(found[0])
        else:
            return at, found[0]
    return None
