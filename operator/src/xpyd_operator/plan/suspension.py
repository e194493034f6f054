"""Plans for a suspended service (``spec.suspend``): its pods end, and everything that it needs to run again stays.

Laws
    1. Routers in pods of their own end first, so that the engines that write their streams are still there. Instances end
       when no router is left, or ``drain.timeout`` and ``MARGIN_S`` after the service was suspended.
    2. All instances end at once, each as when its pod is deleted: its requests may finish, up to its own deadline.
    3. Nothing is created, restarted, switched to another role or labelled.
    4. Once nothing of the service is left there is no condition ``Ready``: programs that wait until a document has taken
       effect (kstatus, so Flux) take its absence for success. Until then it is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xpyd_operator.api.status import Condition
from xpyd_operator.plan.absent import Waiting, put_off
from xpyd_operator.plan.actions import Drain, Plan, Remove
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import Instance, ObservedService, Phase

SUSPENDED: Final = "Suspended"
"""The condition, and its reason while it holds."""
SUSPENDING: Final = "Suspending"
"""Reason while something still ends."""
MARGIN_S: Final = 60.0
"""What routers have beside ``drain.timeout``: until they are told, and to end."""
_NAMED: Final = 3


def suspend(desired: DesiredService, observed: ObservedService, now: float) -> Plan:
    """Plan one step of a suspended service: wait for routers to end, then end instances. ``now`` is in unix seconds."""
    until = desired.suspended_since + desired.drain_timeout_s + MARGIN_S
    begun = desired.suspended_since - MARGIN_S  # a round begins before its document is read, so ``now`` may be earlier
    if observed.routers and begun <= now < until:
        return Plan((), (put_off("draining the instances", f"streams end first in {_list(observed.routers)}", until),))
    why = "the service is suspended"
    return Plan(tuple(Drain(one.name, why) if one.ready else Remove(one.name, why)
                      for one in observed.instances if not one.leaving))


def suspension_conditions(
    observed: ObservedService, plan: Plan, degraded: Condition, after: Sequence[object]
) -> tuple[Condition, ...]:
    """Return the conditions of a suspended service: which parts of it still end, or that nothing is left.

    ``degraded`` is added unchanged. ``after``: what the operator could not do in this step, or put off (``plan.absent``).
    """
    left = [*observed.routers, *(one.name for one in _left(observed))]
    if not left and plan.settled and not after:
        words = "spec.suspend is true, and nothing runs"
        return (Condition(type=SUSPENDED, status="True", reason=SUSPENDED, message=words),
                Condition(type="Progressing", status="False", reason=SUSPENDED, message=words), degraded)
    words = "; ".join([f"spec.suspend is true, and these end: {_list(left)}" if left else "spec.suspend is true",
                       *(each.message for each in after if isinstance(each, Waiting))])
    return (Condition(type="Ready", status="False", reason=SUSPENDING, message=words),
            Condition(type=SUSPENDED, status="False", reason=SUSPENDING, message=words),
            Condition(type="Progressing", status="True", reason=SUSPENDING, message=words), degraded)


def _left(observed: ObservedService) -> list[Instance]:
    """Instances that are still to end: all but lost ones, of which nobody can tell when they are gone."""
    return [one for one in observed.instances if one.phase is not Phase.LOST]


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
