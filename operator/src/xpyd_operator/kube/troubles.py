"""What is wrong with a service as a whole, and its status while nothing can be planned for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from xpyd_operator.api.status import Condition, ServiceStatus
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.gangs import Gangs
from xpyd_operator.kube.master import KeyTrouble
from xpyd_operator.kube.status import stalled
from xpyd_operator.plan.conditions import bounded
from xpyd_operator.plan.observed import Problem


def troubles(taken: Iterable[str], valid: Condition, lacking: KeyTrouble | None) -> tuple[Problem, ...]:
    """Of no instance.

    Args:
        taken: objects of others whose names the service needs.
        valid: what is said of the newest document.
        lacking: why the master of all keys may be lost.
    """
    found = [
        Problem("NameTaken", f"{each} is somebody else's; rename or delete it, since this service needs the name")
        for each in taken
    ]
    if valid.status == "False":
        found.append(Problem(valid.reason, valid.message))
    if lacking is not None:
        found.append(Problem(lacking.reason, str(lacking)))
    return tuple(found)


def gang_troubles(gangs: Gangs, *, ungrouped: bool) -> tuple[Problem, ...]:
    """Why instances of several pods are not placed as a whole though somebody asked for it. ``ungrouped``: the API server
    takes pods without the group that they were to be in.
    """
    found = [Problem("GangNotServed", gangs.trouble)] if gangs.trouble else []
    if ungrouped:
        words = ("the API server serves PodGroups and takes no spec.schedulingGroup of pods: turn on the feature gate "
                 "GenericWorkload for it and the scheduler, or start the operator with --gang none")
        found.append(Problem("GangNotServed", words))
    return tuple(found)


def refused(before: ServiceStatus, valid: Condition, error: XpydError) -> ServiceStatus | None:
    """Nothing was ever accepted while this process lives: say why. What runs goes on, so its Ready is left alone.

    None where it cannot be told at present, and will be.
    """
    there = {each.type for each in before.conditions}
    if valid.status != "False":
        if "Valid" in there:
            return None
        valid = Condition(type="Valid", status="Unknown", reason="NotReached", message=str(error))
    conditions = [each for each in before.conditions if each.type not in ("Valid", "Stalled")]
    if "Ready" not in there:
        conditions.append(Condition(type="Ready", status="False", reason=valid.reason, message=valid.message))
    return msgspec.structs.replace(before, conditions=(*conditions, valid, *stalled(conditions, valid)))


def keyless(before: ServiceStatus, error: KeyTrouble) -> ServiceStatus:
    """The key of its pods is not known, so nothing can be done. What runs goes on, so its Ready is left alone."""
    words = bounded(str(error))
    conditions = [each for each in before.conditions if each.type not in ("Degraded", "Stalled")]
    if not any(each.type == "Ready" for each in conditions):
        conditions.append(Condition(type="Ready", status="False", reason=error.reason, message=words))
    stuck = (Condition(type=kind, status="True", reason=error.reason, message=words) for kind in ("Degraded", "Stalled"))
    return msgspec.structs.replace(before, conditions=(*conditions, *stuck))
