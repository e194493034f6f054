"""``POST /wake`` of a router: a long poll by which the operator hears of requests that wait while no instance runs.

    operator ── WakeCall, signed ──▶ router        answered at once while a request is held that may start instances and
             ◀── WakeAnswer, signed ──             none is wanted; else when that comes to be, or after ``POLL_S``

What is told is a level and no edge: a lost answer costs a poll, and two routers that tell the same are one wake. Readers
ignore fields that they do not know, and every field that came later has a default.
"""

from __future__ import annotations

from typing import Final

import msgspec

PATH: Final = "/wake"
POLL_S: Final = 20.0
"""How long a router keeps a poll open, seconds."""
CALL_MAX: Final = 4096
"""Bytes of a call, at most."""
ANSWER_MAX: Final = 4096
"""Bytes of an answer, at most."""
WORDS_MAX: Final = 500
"""Characters of why nobody comes, at most."""


class WakeCall(msgspec.Struct, frozen=True):
    """What the operator says of a service of which nobody decodes."""

    wanted: int
    """Decode instances that are wanted now; 0: a request would have to start them."""
    refused: str = ""
    """Not empty: none comes, and why. Who waits hears that at once."""
    waits: str = ""
    """What those that are wanted wait for; empty: nothing but their start."""


class WakeAnswer(msgspec.Struct, frozen=True):
    """What a router says."""

    router: str
    held: int
    """Requests that wait there and may start instances."""
