"""One round of the loop, as a value: what was wanted, found, planned and said."""

from __future__ import annotations

import msgspec

from xpyd_operator.api.status import ServiceStatus
from xpyd_operator.plan.actions import Plan
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import ObservedService
from xpyd_operator.plan.status import status
from xpyd_operator.plan.step import step


class Round(msgspec.Struct, frozen=True):
    """One round of the loop over a service: what was wanted, what was observed, and the plan made of both."""

    desired: DesiredService
    observed: ObservedService
    plan: Plan
    status: ServiceStatus
    failures: tuple[str, ...] = ()
    """What went wrong while it was carried out, in words."""
    postponed: tuple[str, ...] = ()
    """What of it was not begun, since something that it needs is not there yet, in words."""

    @property
    def gone(self) -> bool:
        """Nothing is left of a service that was to end."""
        return self.desired.stopping and not self.observed.instances and self.observed.router is None


def think(desired: DesiredService, observed: ObservedService, now: float) -> Round:
    """The thinking part of a round; ``now`` is in unix seconds."""
    plan = step(desired, observed, now)
    return Round(desired, observed, plan, status(desired, observed, plan, now))
