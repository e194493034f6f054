"""The outline of a client's body: how many names its object has, and how deep it goes, judged before anything is built.

    { "model": … , "messages": [ { "role": … } ] , … }
      1 name       2 names     2 3                 3 names        MAX_NAMES, MAX_DEPTH

Theory: ``msgspec`` makes an object for every name at the top level, and skips what is nested. So a body of names alone
costs 25 times its size, and a nested one recursion. vLLM 0.32 knows 68 names of a chat.

Nearly all bodies have so few brackets, and commas or colons, that they cannot be beyond the bounds, whatever stands where;
the others are read in one pass. Whether they are JSON says who decodes them, and it reads no more names and no more depth
than were counted here: both take a body from its beginning, and agree as long as it is JSON.
"""

from __future__ import annotations

import re
from enum import IntEnum

MAX_NAMES = 256
MAX_DEPTH = 64
"""The body's own braces are the first."""
SHORTEST = len('"":1,')
"""Bytes of a name with its value."""


class Outline(IntEnum):
    """What is found of a body."""

    WITHIN = 0
    NAMES = 1
    DEPTH = 2


_OBJECT = re.compile(rb"[ \t\r\n]*\{")
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = rb'[\[{][^"\[\]{}]*+(?:%b[^"\[\]{}]*+)*+[\]}]' % _TEXT
"""A list or an object that holds no other."""
_SHALLOW = re.compile(rb'[^"\[\]{},]*+(?:%b[^"\[\]{},]*+)*+' % _TEXT, re.DOTALL)
"""Up to the next bracket or comma that no string holds."""
_DEEP = re.compile(rb'[^"\[\]{}]*+(?:(?:%b|%b)[^"\[\]{}]*+)*+' % (_TEXT, _FLAT), re.DOTALL)
"""Up to the next bracket, but over what is flat: the messages of a long chat are."""
_DEEPEST = re.compile(rb'[^"\[\]{}]*+(?:%b[^"\[\]{}]*+)*+' % _TEXT, re.DOTALL)
"""Up to the next bracket."""


def few(body: bytes, mark: bytes, most: int) -> int:
    """How many marks are left of so many; -1: there are more. Finding a few costs a tenth of counting."""
    at = body.find(mark)
    while at >= 0 <= most:
        most -= 1
        at = body.find(mark, at + 1)
    return most


def shallow(body: bytes, depth: int) -> bool:
    """Whether there are so few brackets that it cannot go deeper, whatever stands where."""
    left = few(body, b"{", depth)
    return left >= 0 and few(body, b"[", left) >= 0


def judged(body: bytes, names: int, depth: int) -> Outline:
    """The outline of a body that may have so many names and go so deep. What is no object is within."""
    if shallow(body, depth) and (
            len(body) < SHORTEST * names or few(body, b":", names) >= 0 or few(body, b",", names - 1) >= 0):
        return Outline.WITHIN
    begin = _OBJECT.match(body)
    if begin is None:
        return Outline.WITHIN
    if depth < 1:
        return Outline.DEPTH
    at, level, more = begin.end(), 1, names
    while True:
        skipped = (_SHALLOW if level == 1 else _DEEP if level < depth else _DEEPEST).match(body, at)
        assert skipped is not None  # it may be empty
        at = skipped.end() + 1
        mark = body[at - 1:at]
        if mark == b",":
            more -= 1
            if more < 1:
                return Outline.NAMES
        elif mark in {b"[", b"{"}:
            level += 1
            if level > depth:
                return Outline.DEPTH
        elif mark in {b"]", b"}"}:
            level -= 1
            if level == 0:
                return Outline.WITHIN
        else:  # the end, or a string without one
            return Outline.WITHIN
