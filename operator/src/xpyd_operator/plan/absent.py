"""Why something is not there: it waits, or it is broken. One value for instances, routers, documents and rounds.

    Waiting    it is on its way, as far as anybody knows: for what, since when, and until when that is usual
    Breakage   it does not come by itself: of what, what is wrong, and what to do

Laws
    1. What is not there has exactly one of them, and what is there has none (``Instance.absence``).
    2. Who waits for a place (a node, a quota, an admission) is never stuck: somebody outside may give it one at any time.
    3. The only measure of a wait on the way up is the time that the document gives a start (``engine.startupTimeout``).

Conditions, Events and what commands show are folds over these (``conditions``, ``news``).
"""

from __future__ import annotations

import msgspec

QUEUED = "Queued"
"""Reason of what waits to be admitted by something outside, such as Kueue."""
PUT_OFF = "Waiting"
"""Reason of what the operator wants to do and puts off."""
UNPLACED = "Unschedulable"
"""Reason of a pod that finds no node."""


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Why an instance or another part of a service is not there yet, though it is on its way."""

    reason: str
    """One word that a program can compare: ``Starting``, ``Creating``, ``Unschedulable`` …"""
    message: str
    """What it waits for, of whom, and what helps where it lasts. The same words as long as nothing changes."""
    of: str = ""
    """The container that is not up; empty: not one of them, but the whole."""
    since: float = 0.0
    """Unix seconds; 0: not known."""
    until: float = 0.0
    """After this, unix seconds, a person should look; 0: it may take as long as it takes."""
    late: bool = False
    """``until`` has passed, as seen now."""
    place: bool = False
    """It waits for a place, and has begun nothing."""

    def __str__(self) -> str:
        return self.message

    @property
    def person(self) -> bool:
        """Whether a person should look, since ``until`` has passed."""
        return self.late

    @property
    def ends_soon(self) -> bool:
        """Whether what waits is likely to come by itself, in the time that this usually takes."""
        return not self.late and not self.place


class Breakage(msgspec.Struct, frozen=True, tag="broken"):
    """Why an instance or another part of a service is not there, and will not come by itself."""

    reason: str
    """One word that a program can compare: ``ImagePull``, ``OutOfMemory``, ``CrashLoop`` …"""
    what: str
    """What is wrong and of whom, with the last log line of a crash."""
    do: str = ""
    """What a person can do; empty where the words before say it."""
    of: str = ""
    """The container that is broken; empty: the whole."""
    replaced: bool = False
    """Its platform never starts it again, and the planner makes another one in its place."""

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """What is wrong and what to do about it, as one text."""
        return f"{self.what}; {self.do}" if self.do else self.what

    @property
    def person(self) -> bool:
        """Whether a person should act, since nothing replaces it."""
        return not self.replaced

    @property
    def ends_soon(self) -> bool:
        """Whether another one comes in the place of what is broken."""
        return self.replaced


Absence = Waiting | Breakage


def put_off(what: str, why: str, until: float = 0.0) -> Waiting:
    """Something that the planner wants to do and does not do yet: ``what``, and why."""
    return Waiting(PUT_OFF, f"{what} waits: {why}", what, until=until)


def waits(
    reason: str, message: str, now: float, *, since: float, limit_s: float, of: str = "", place: bool = False
) -> Waiting:
    """A wait since ``since`` (unix seconds; 0: not known) that usually takes ``limit_s`` seconds at most (0: as long as it
    takes), as seen at ``now``.
    """
    until = since + limit_s if since and limit_s else 0.0
    return Waiting(reason, message, of, since, until, late=0 < until <= now, place=place)
