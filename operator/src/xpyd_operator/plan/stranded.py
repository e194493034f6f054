"""No state that only a person can leave, where places are short.

Prefill alone serves nobody, and routers live beside decode; so where prefill has all the places no router tells a load, and
a rule that waits for one would wait for ever. A role is *stranded* when it serves nothing, and none of its instances has
had a place for ``STRANDED_S``. Then

    what the other role has too many goes without a router's word: without decode nothing can run in prefill
    of the other role nothing more is made, so that the next place is for who has none
    where counts are as asked for and both could have the same places, the other role gives one up, or one that serves takes
    the stranded role: ``STRANDED_S`` after a place was given back last, and never its last one; those of it that wait for a
    place go, too, since they would take what was given up

What is given up is made anew only when the stranded role has a place. So nothing goes back and forth: each such step leaves
the other role with fewer, and once both have a place neither is stranded. Decode, which serves without prefill too, waits
``AGAIN_S`` before it gives up another one. Instances are made in the ratio that is wanted (``in_ratio``), so that what is
placed first can serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xpyd_operator.plan.absent import Waiting
from xpyd_operator.plan.actions import Create, Drain, Remove, Switch
from xpyd_operator.plan.canary import RoleView
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.drain import victims
from xpyd_operator.plan.observed import Instance
from xpyd_sidecar.contract.ids import Role

STRANDED_S: Final = 120.0
"""A scheduler that could place a pod has done so by then, also after others have gone."""
AGAIN_S: Final = 600.0
"""And by then it is not likely that somebody else takes this one, too."""


def is_stranded(view: RoleView, now: float) -> bool:
    """Whether a role is wanted and none of its instances has had a place for minutes, or is about to."""
    return view.wanted_count > 0 and bool(view.everything) and all(_waited(one, now) for one in view.everything)


def nothing_runs(decode: RoleView, now: float) -> bool:
    """There is no decode, or it is stranded: no request can be running, and no router need tell that there is no load."""
    return decode.wanted_count > 0 and (not decode.everything or is_stranded(decode, now))


def _waited(one: Instance, now: float) -> bool:
    why = one.absent
    return not _holds(one) and isinstance(why, Waiting) and 0 < why.since <= now - STRANDED_S


def _holds(one: Instance) -> bool:
    """It has a place, or a part of it has."""
    return not one.placeless or one.placed > 0


def first_to_others(mine: RoleView, other: RoleView, now: float) -> str:
    """Why no more of ``mine`` is made; empty where nothing speaks against it."""
    if mine.stale or not is_stranded(other, now) or not any(_holds(one) for one in mine.everything):
        return ""
    return f"{other.role} serves nothing and finds no place, so the next one is for {other.role}"


def give_up(
    desired: DesiredService, views: tuple[RoleView, RoleView], freed: float, now: float
) -> tuple[Switch | Drain | Remove, ...]:
    """Who gives its place to a stranded role, one at a time, and who would take it; ``freed``: when a place was given back
    last.
    """
    for mine, other in (views, views[::-1]):
        holding = [one for one in mine.fresh if _holds(one)]
        busy = mine.stale or other.stale or any(one.leaving or one.switching for one in mine.everything)
        stays = not desired.same_places or not is_stranded(other, now) or len(mine.fresh) > mine.wanted_count
        if busy or not holding or stays:
            continue
        why = f"{other.role} serves nothing and finds no place, {mine.role} has {len(holding)}"
        waiting = tuple(Remove(one.name, why) for one in mine.fresh if not _holds(one))
        if len(holding) == 1:
            return waiting
        again = mine.role is Role.DECODE and len(mine.fresh) < mine.wanted_count
        if 0 <= now - freed < (AGAIN_S if again else STRANDED_S):
            continue
        one = victims(holding)[0]
        if one.ready and desired.switches and desired.prefill.revision == desired.decode.revision:
            return (*waiting, Switch(one.name, other.role, one.epoch + 1, why))
        return (*waiting, Drain(one.name, why) if one.ready else Remove(one.name, why))
    return ()


def in_ratio(made: Sequence[Create], views: tuple[RoleView, RoleView], *, decode_first: bool = False) -> list[Create]:
    """The same, in the order in which the wanted ratio is kept best: of the role of which the smaller share is there;
    prefill among equals, or decode as long as nobody is there (``decode_first``).
    """
    left = {view.role: [each for each in made if each.role is view.role] for view in views}
    there = {view.role: len(view.fresh) for view in views}
    wanted = {view.role: max(1, view.wanted_count) for view in views}
    found: list[Create] = []
    while len(found) < len(made):
        equals = (Role.DECODE, Role.PREFILL) if decode_first and not any(there.values()) else tuple(Role)
        role = min((role for role in equals if left[role]), key=lambda role: there[role] / wanted[role])
        found.append(left[role].pop(0))
        there[role] += 1
    return found
