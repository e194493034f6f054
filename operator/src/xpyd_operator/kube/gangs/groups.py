"""Instances of several pods, one of them the leader: the state of all pods together, and what the planner sees. Pure.

Laws
    1. The leader is created last. While it is missing and nothing else is wrong, the instance is being made, and missing
       pods are created. Once there is a leader, all pods have been there, so a missing one is lost.
    2. The instance is broken, and removed as a whole, when a pod is lost or never runs again, when pods are of different
       revisions or layouts, and when a pod's node does not answer while routers are heard and none says that it serves.
    3. A pod that is being deleted ends the whole instance; each of its pods drains the whole group first.
    4. The instance is ready when all its pods are.
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
    """The state of one instance's pods, taken together; ``why`` explains it, and is empty for ``whole`` and ``ending``.

    ``making``: pods are still to be created. ``unfinished``: they were not created in time. ``whole``: all are there.
    ``ending``: one is being deleted. ``broken``: they cannot serve together any more.
    """

    state: Literal["making", "unfinished", "whole", "ending", "broken"]
    why: str = ""


def standing(
    members: Sequence[Facts], now: float, *, current: Collection[Revision] | None = None, serves: bool | None = None
) -> Standing:
    """What state the pods of one instance are in together.

    Args:
        members: the pods that are there, at least one, by index: the leader first, where it is there.
        now: unix seconds.
        current: the revisions of which pods can still be created; None: not known.
        serves: whether routers hear that the instance is ready; None: no router answers.
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
    """The state of an instance that has no leader pod: being made, not made in time, or broken."""
    first = members[0]
    if began := [each.name for each in members if each.began]:
        return Standing("broken", f"pod {began[0]} was ready, and its leader is missing")
    if current is not None and first.revision not in current:
        return Standing("broken", f"it was being made of revision {first.revision}, which is not in force any more")
    if now - min(each.created for each in members) >= HALF_S:
        return Standing("unfinished", f"not all of its {first.size} pods could be made within {HALF_S:g} s")
    return Standing("making", f"{len(members)} of {first.size} pods of {first.instance} are made")


def merge_parts(parts: Sequence[Instance], members: Sequence[Facts], stands: Standing) -> Instance:
    """Merge the pods of one instance into the one instance that the planner sees.

    Args:
        parts: each pod as if it were an instance of its own, in the order of ``members``.
        members: the pods that are there, at least one, by index.
        stands: their state together, as ``standing`` returns it.
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
    """Why an instance does not serve: the reason of one of its pods, None where no pod has one.

    The first of these: a pod waits for admission; pods find no node; a pod is broken; one has ended; any other reason.
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
