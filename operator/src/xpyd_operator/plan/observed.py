"""What is there: the planner's picture of instances and router, made afresh by a backend for every step."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from xpyd_operator.plan.desired import Revision
from xpyd_sidecar.contract.ids import InstanceName, Role


class Phase(StrEnum):
    """What an instance is doing, as seen now; never written down and read again."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Takes nothing new; work is left."""
    DRAINED = "drained"
    """Takes nothing new, and no work is left."""
    STOPPING = "stopping"
    """Its removal is under way."""
    CRASHED = "crashed"
    """Its engine ended without being asked."""


LEAVING = frozenset({Phase.DRAINING, Phase.DRAINED, Phase.STOPPING})


class Unit(msgspec.Struct, frozen=True):
    """One process that the backend keeps alive on request (a backend whose platform restarts by itself lists none)."""

    name: str
    """``engine``, ``agent`` or ``router``."""
    alive: bool
    crashes: int = 0
    """Ends without being asked, in a row (``backoff.count_crash``)."""
    ended: float = 0.0
    """When it last ended, unix seconds; meaningful while it is not alive."""
    exit: str = ""
    """How it last ended, in words."""
    outdated: bool = False
    """It runs with other settings than are wanted now, and can be restarted without harm to what is served."""


class Instance(msgspec.Struct, frozen=True):
    """One engine with what belongs to it."""

    name: InstanceName
    ordinal: int
    role: Role
    revision: Revision
    phase: Phase
    since: float = 0.0
    """Since when it is in this phase, unix seconds."""
    load: int = 0
    """Requests and transfers in it."""
    was_ready: bool = False
    """Its engine served before and does not any more: it hangs, rather than that it takes long to start."""
    units: tuple[Unit, ...] = ()

    @property
    def leaving(self) -> bool:
        """It will not come back to serve."""
        return self.phase in LEAVING

    @property
    def ready(self) -> bool:
        """It takes requests."""
        return self.phase is Phase.READY

    @property
    def crashes(self) -> int:
        """Crashes in a row of its worst process."""
        return max((unit.crashes for unit in self.units), default=0)


class Router(msgspec.Struct, frozen=True):
    """The router process of its own."""

    revision: Revision
    unit: Unit
    ready: bool
    """It answers, and its roster is complete: what it says of the fleet can be relied on."""
    stopping: bool = False


class Observed(msgspec.Struct, frozen=True):
    """Everything a step looks at."""

    instances: tuple[Instance, ...] = ()
    router: Router | None = None
    fleet_known: bool = False
    """A settled router told the load and drain state. Without it nothing that serves is drained."""
