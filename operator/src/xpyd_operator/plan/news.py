"""What is worth telling of a round: the Events of a service.

News is what differs between two rounds, so a round like the last one has none. After a start (no round before) only what
holds now and a person should know is told: nobody was seen to come or go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeGuard

import msgspec

from xpyd_operator.api.status import Condition
from xpyd_operator.plan.absent import Absence, Breakage
from xpyd_operator.plan.actions import Create, Drain, Remove, Switch
from xpyd_operator.plan.conditions import shorten
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.disaggregating import KIND, is_news
from xpyd_operator.plan.observed import Instance, ObservedService, Phase
from xpyd_operator.plan.round import Round
from xpyd_operator.plan.status import is_true
from xpyd_operator.plan.suspension import SUSPENDED, SUSPENDING
from xpyd_sidecar.contract.ids import InstanceName, Role

NORMAL: Literal["Normal"] = "Normal"
WARNING: Literal["Warning"] = "Warning"
_GOOD = {"Ready": "True", "Progressing": "False", "Degraded": "False", "Compatible": "True", KIND: "True"}


class News(msgspec.Struct, frozen=True):
    """One thing that happened to a service, to be told as an Event and in the log."""

    type: Literal["Normal", "Warning"]
    reason: str
    """One word that a program can compare."""
    message: str
    """At most 1,000 characters."""
    instance: InstanceName | None = None
    """Of whom; None: of the service."""


def news(before: Round | None, after: Round) -> list[News]:
    """What to tell after a round, in the order in which it came about: first what was found, then what was done."""
    told: list[News] = []
    if before is not None:
        told += _instances(before.observed, after.observed)
        told += _rollouts(before, after)
    told += _suspension(before, after)
    told += _actions(after)
    told += _conditions(before, after)
    held = after.desired.held
    if held and (before is None or before.desired.held != held):
        told.append(News(NORMAL, "LimitsHeld", held))
    told += _failures(before, after)
    return [msgspec.structs.replace(one, message=shorten(one.message)) for one in told]


def _suspension(before: Round | None, after: Round) -> Iterator[News]:
    """A service that is suspended or resumed."""
    was, now = (bool(each and each.desired.suspended_since) for each in (before, after))
    if before is not None and was != now:
        yield News(NORMAL, SUSPENDING if now else "Resumed", f"spec.suspend is {'true' if now else 'false'}")
    rests = next((each for each in after.status.conditions if each.type == SUSPENDED and each.status == "True"), None)
    if before is not None and rests is not None and not is_true(before.status, SUSPENDED):
        yield News(NORMAL, SUSPENDED, rests.message)


def _actions(after: Round) -> Iterator[News]:
    """What the round did; what failed is told by ``_failures``."""
    for action in after.plan.actions:
        if any(failure.startswith(f"{action}: ") for failure in after.failures):
            continue
        match action:
            case Create():
                yield News(NORMAL, "Created", f"as {action.role}, revision {action.revision}", action.instance)
            case Drain():
                yield News(NORMAL, "Draining", action.reason, action.instance)
            case Switch():
                yield News(NORMAL, "Switched", f"to {action.role}: {action.reason}", action.instance)
            case Remove():
                yield News(NORMAL, "Removed", action.reason, action.instance)
            case _:
                pass


def _instances(before: ObservedService, after: ObservedService) -> Iterator[News]:
    old = {instance.name: instance for instance in before.instances}
    new = {instance.name: instance for instance in after.instances}
    for name, instance in new.items():
        yield from _instance(old.get(name), instance)
    for name, instance in old.items():
        if name not in new:
            kind = NORMAL if instance.leaving else WARNING
            yield News(kind, "Gone", f"{instance.role}, it was {instance.phase}", name)


def _instance(was: Instance | None, now: Instance) -> Iterator[News]:
    phase = was.phase if was is not None else None
    if now.phase is Phase.READY and phase is not Phase.READY:
        yield News(NORMAL, "InstanceReady", f"it serves as {now.role}", now.name)
    elif phase is Phase.READY and now.phase is Phase.STARTING:
        yield News(WARNING, "InstanceNotReady", "it served and does not any more", now.name)
    elif now.phase is Phase.LOST and phase is not Phase.LOST:
        yield News(WARNING, "Lost", now.absence.message if now.absence else "its node is away", now.name)
    before = was.ejected if was is not None else ""
    if now.ejected and not before:
        yield News(WARNING, "Ejected", f"routers send it nothing: {now.ejected}", now.name)
    elif before and not now.ejected and now.phase is Phase.READY:
        yield News(NORMAL, "Readmitted", "routers send it requests again", now.name)
    why, known = now.absence, was.absence if was is not None else None
    if now.placeless and why is not None and not why.person and (known is None or known.reason != why.reason):
        yield News(NORMAL, why.reason, why.message, now.name)
    if _warns(why) and now.phase is not Phase.LOST and not (_warns(known) and known.reason == why.reason):
        yield News(WARNING, why.reason, why.message, now.name)
    elif now.phase is Phase.CRASHED and phase is not Phase.CRASHED:
        ends = next((unit.exit for unit in now.units if not unit.alive and unit.exit), "")
        yield News(WARNING, "Crashed", ends or (why.message if why is not None else "its engine ended"), now.name)


def _warns(why: Absence | None) -> TypeGuard[Absence]:
    """It is broken, or has waited for too long."""
    return why is not None and (isinstance(why, Breakage) or why.person)


def _rollouts(before: Round, after: Round) -> Iterator[News]:
    was, now = _rolling(before), _rolling(after)
    for role in Role:
        revision = after.desired.target(role).revision
        if role in now and now[role] != was.get(role):
            yield News(NORMAL, "RolloutStarted", f"{role} to revision {revision}")
        elif role in was and role not in now and after.desired.target(role).replicas:
            yield News(NORMAL, "RolloutFinished", f"{role} is at revision {revision}")


def _rolling(round_: Round) -> Mapping[Role, str]:
    """Roles of which something old is there, with the revision that they roll to."""
    desired: DesiredService = round_.desired
    if desired.stopping:
        return {}
    return {
        one.role: desired.target(one.role).revision
        for one in round_.observed.instances
        if one.phase is not Phase.LOST and one.revision != desired.target(one.role).revision
    }


def _conditions(before: Round | None, after: Round) -> Iterator[News]:
    """Conditions that turned over. One that is good from the start, or unknown, is no news."""
    old = {condition.type: condition for condition in before.status.conditions} if before is not None else {}
    for condition in after.status.conditions:
        was = old.get(condition.type)
        if condition.type == SUSPENDED or condition.reason == SUSPENDING:
            continue  # told by ``_suspension``
        if condition.type == "Progressing" or condition.status == "Unknown" or _same(was, condition):
            continue
        if condition.type == KIND and not is_news(was, condition):
            continue
        good = condition.status == _GOOD[condition.type]
        if was is None and (good or condition.type == "Ready"):
            continue
        name = condition.type if condition.status == "True" else f"Not{condition.type}"
        yield News(NORMAL if good else WARNING, name, f"{condition.reason}: {condition.message}")


def _same(was: Condition | None, now: Condition) -> bool:
    """Its status is the same, and of what is bad also its reason."""
    if was is None or was.status != now.status:
        return False
    return now.status == _GOOD[now.type] or now.type == "Ready" or was.reason == now.reason


def _failures(before: Round | None, after: Round) -> Iterator[News]:
    known = set(before.failures) if before is not None else set()
    fresh = [failure for failure in after.failures if failure not in known]
    if fresh:
        more = f", and {len(fresh) - 3} more" if len(fresh) > 3 else ""
        yield News(WARNING, "Failed", "; ".join(fresh[:3]) + more)
