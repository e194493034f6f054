"""Several pods that are one instance: how they stand together, and what the planner sees of them. Pure.

Laws
    1. The leader is written last. No leader, and nothing else wrong: the instance is being made, and what is missing is
       made. A leader proves that all were there: then one that is missing makes a hole.
    2. A hole, a pod that never runs again, pods that are of two revisions or layouts, a pod on a node that is away while
       nobody hears that the group serves: the instance is broken, and goes as a whole.
    3. One that ends takes the others along; each of them drains the whole group first.
    4. It is ready when all of them are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.plan.absent import UNPLACED, Absence, Breakage, Waiting
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.observed import BROKEN, UNFINISHED, Instance, Phase
from xpyd_operator.plan.placing import HALF_S
from xpyd_operator.render import labels

INCOMPLETE: Final = "Incomplete"
"""Reason of an instance of which not all pods have been made yet."""


class Standing(NamedTuple):
    """How the pods of one instance stand together."""

    state: Literal["making", "unfinished", "whole", "ending", "broken"]
    why: str = ""


def standing(
    members: Sequence[Facts], now: float, *, current: Collection[Revision] | None = None, serves: bool | None = None
) -> Standing:
    """By the facts of those that are there, at least one.

    Args:
        members: by index.
        now: unix seconds.
        current: the revisions that can still be made; None: not known.
        serves: whether a router hears that the instance is ready; None: no router is heard.
    """
    if any(each.ends_by for each in members):
        return Standing("ending")
    first = members[0]
    name, size = first.instance, first.size
    if bare := [each.name for each in members if each.role is None]:
        return Standing("broken", f"pod {bare[0]} has lost the label {labels.ROLE}")
    if over := [each.name for each in members if each.over]:
        return Standing("broken", f"pod {over[0]} has ended for good")
    other = [each.name for each in members if _made_of(each) != _made_of(first)]
    if other or not size:
        return Standing("broken", f"pod {(other or [first.name])[0]} is of another revision or layout than {first.name}")
    missing = sorted(set(range(size)) - {each.member for each in members})
    if len(members) + len(missing) != size:
        return Standing("broken", f"{len(members)} pods have names of {name}, which has {size}")
    if 0 in missing:
        return _unfinished(members, now, current)
    if missing:
        return Standing("broken", f"pod {name}-{missing[0]} is missing")
    if (away := [each.name for each in members if each.away]) and serves is False:
        return Standing("broken", f"the node of pod {away[0]} does not answer, and the group does not serve")
    return Standing("whole")


def _made_of(fact: Facts) -> tuple[str, ...]:
    return (fact.revision, fact.layout, str(fact.size), fact.key)


def _unfinished(members: Sequence[Facts], now: float, current: Collection[Revision] | None) -> Standing:
    """The leader is not there: not yet, or not any more."""
    first = members[0]
    if began := [each.name for each in members if each.began]:
        return Standing("broken", f"pod {began[0]} was ready, and its leader is missing")
    if current is not None and first.revision not in current:
        return Standing("broken", f"it was being made of revision {first.revision}, which is not in force any more")
    if now - min(each.created for each in members) >= HALF_S:
        return Standing("unfinished", f"not all of its {first.size} pods could be made within {HALF_S:g} s")
    return Standing("making", f"{len(members)} of {first.size} pods of {first.instance} are made")


def merge_parts(parts: Sequence[Instance], members: Sequence[Facts], stands: Standing) -> Instance:
    """An instance of several pods as the planner sees it. ``parts``: each pod as if it were an instance of its own, in the
    order of ``members``.
    """
    lead, fact = parts[0], members[0]
    without = [each.unplaced for each in members if each.unplaced]
    placed = [each.placed for each in members if each.placed]
    phase, since, why = _seen(parts, members, stands)
    return msgspec.structs.replace(
        lead,
        name=fact.instance,
        phase=phase,
        since=since,
        was_ready=phase is Phase.STARTING and any(each.was_ready for each in parts),
        platform_crashes=max(each.platform_crashes for each in parts),
        absent=why,
        roster=lead.roster and fact.leads,
        router=lead.router and fact.leads,
        parts=max(1, fact.size),
        missing=fact.size - len(members) if stands.state == "making" else 0,
        placed=len(placed),
        unplaced=len(without),
        unplaced_since=max(min(without), min(placed, default=0.0)) if without else 0.0,
    )


def _seen(
    parts: Sequence[Instance], members: Sequence[Facts], stands: Standing
) -> tuple[Phase, float, Absence | None]:
    first = min(each.created for each in members)
    match stands.state:
        case "ending":
            lost = next((each for each in parts if each.phase is Phase.LOST), None)
            begun = min((one.asked_to_end for one in members if one.ends_by), default=first)
            return (Phase.STOPPING, begun, None) if lost is None else (Phase.LOST, begun, lost.absent)
        case "broken" | "unfinished":
            words = f"{stands.why}; all pods of {members[0].instance} are made anew"
            reason = BROKEN if stands.state == "broken" else UNFINISHED
            return Phase.CRASHED, max(each.created for each in members), Breakage(reason, words, replaced=True)
        case "making":
            why = _first(parts, members)
            if why is None or not (isinstance(why, Breakage) or why.place):
                why = Waiting(INCOMPLETE, stands.why, since=first)
            return Phase.STARTING, first, why
        case "whole":
            pass
    worst = Phase.CRASHED if any(each.phase is Phase.CRASHED for each in parts) else Phase.STARTING
    if all(each.phase is Phase.READY for each in parts):
        worst = Phase.READY
    since = max(each.since for each in parts if each.phase is worst)
    return worst, since, None if worst is Phase.READY else _first(parts, members)


def _first(parts: Sequence[Instance], members: Sequence[Facts]) -> Absence | None:
    """Those that wait for admission or for a place speak for the others, which wait for them; then the first that is
    broken, the first that ended, the first.
    """
    found = [each.absent for each in parts if each.absent is not None]
    if queued := next((each.absent for each in parts if each.queued), None):
        return queued
    if placing := [each for each in found if isinstance(each, Waiting) and each.reason == UNPLACED]:
        fact = members[0]
        words = f"{len(placing)} of {fact.size} pods of {fact.instance} find no node: {placing[0].message}"
        return msgspec.structs.replace(placing[0], message=words)
    ended = [each.absent for each in parts if each.absent is not None and each.phase is Phase.CRASHED]
    return next((each for each in (*(one for one in found if isinstance(one, Breakage)), *ended, *found)), None)
