"""Instances of several parts find their places one at a time, so that two halves never wait for each other.

    no half is there                            all are made at once
    some instance has places for a part alone,  that one alone goes on: the one with most places, then with most parts;
    or a part could not be made for ``MADE_S``  the others of which a part has no place go, and none is made
    half of it has places, for ``HALF_S``       it goes too, and for ``pause_s`` none is made, so that others can have them

An instance none of whose parts has a place holds nothing: it may wait for a node as long as it takes, and nobody waits for
it. Instances of one part are not looked at: they hold nothing while they wait.

Where a scheduler places whole instances (``gang``), all are made at once whatever waits for a place, and none goes for it:
but for halves that are there for ``BOUND_S``, by which it is seen that the scheduler does not, and the rule above holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Final

from xpyd_operator.plan.actions import Remove
from xpyd_operator.plan.observed import Instance
from xpyd_sidecar.contract.ids import InstanceName

HALF_S: Final = 600.0
"""How long an instance may hold places for a part of itself alone; a new node has come by then, if one comes."""
PAUSE_S: Final = 60.0
SPREAD_S: Final = 120.0
"""A pause is up to so much longer: two services that give back halves at once do not try again at once."""
MADE_S: Final = 60.0
"""All parts of an instance are made within seconds, where nothing is in the way."""
BOUND_S: Final = 30.0
"""A scheduler that places whole instances binds the parts of one within seconds."""


def turns(
    instances: Collection[Instance], going: Collection[InstanceName], now: float, *, gang: bool = False, uid: str = ""
) -> tuple[list[Remove], str]:
    """Which go, and who is placed now, in words; empty where nobody waits for a place. ``uid``: of the service."""
    late = [one for one in instances if _waits(one, now) and not one.leaving and one.name not in going]
    holding = [one for one in late if _holds(one)]
    if gang:
        holding = [one for one in holding if one.missing or now - one.unplaced_since >= BOUND_S]
    if not holding:
        return [], ""
    first = min(holding, key=_order)
    what, count = ("could not be made yet", first.missing) if first.missing else ("find no place", first.unplaced)
    held = f"{count} of {first.parts} parts of {first.name} {what}"
    others = [one for one in sorted(late, key=_order) if one is not first]
    gone = [Remove(one.name, f"{first.name} is placed first") for one in others]
    if first.unplaced and not first.missing and now - first.unplaced_since >= HALF_S:
        reason = f"{held} within {HALF_S:g} s, and what the others hold is of no use"
        gone.append(Remove(first.name, reason, pause_s=pause_s(uid, now)))
    return gone, held


def pause_s(uid: str, now: float) -> float:
    """``PAUSE_S`` and a part of ``SPREAD_S``, another one for each service and time."""
    digest = hashlib.sha256(f"{uid} {now:.0f}".encode()).digest()
    return PAUSE_S + SPREAD_S * int.from_bytes(digest[:4]) / 2**32


def _waits(one: Instance, now: float) -> bool:
    """A part of it finds no place, or is not there for longer than the making of one takes."""
    return one.unplaced > 0 or (one.missing > 0 and now - one.since >= MADE_S)


def _holds(one: Instance) -> bool:
    """It has what others may wait for: places, or a part of a quota."""
    return one.missing > 0 or one.placed > 0


def _order(one: Instance) -> tuple[int, int, int]:
    """The one with most places first, then the one with most parts."""
    return -one.placed, one.missing - one.parts, one.ordinal
