"""What is there: the planner's picture of instances and router, made afresh by a backend for every step."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from xpyd_operator.plan.absent import QUEUED, Absence, Breakage, Waiting
from xpyd_operator.plan.backoff import LOOPING
from xpyd_operator.plan.desired import Revision
from xpyd_sidecar.contract.adapters import AdapterReport
from xpyd_sidecar.contract.ids import Fingerprint, InstanceName, Role
from xpyd_sidecar.contract.intake import Disaggregation


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
    LOST = "lost"
    """It never comes back, and nobody can tell when its name will be free (a pod that ends on a node that is away): it
    counts for nothing but its ordinal."""


LEAVING = frozenset({Phase.DRAINING, Phase.DRAINED, Phase.STOPPING, Phase.LOST})


OUTDATED = "Outdated"
"""Reason of an instance that could not begin with what another release of xpyd brings."""
BROKEN = "Broken"
"""Reason of an instance of several parts that lacks one, or whose parts do not belong together: it goes as a whole."""
UNFINISHED = "Unfinished"
"""Reason of one of which not all parts could be made in time: it gives back what it holds."""


STARTS = "it starts"
"""What is said of an instance of which nobody tells more."""


class ObservedUnit(msgspec.Struct, frozen=True):
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
    units: tuple[ObservedUnit, ...] = ()
    platform_crashes: int = 0
    """Crashes in a row, where the platform restarts by itself and ``units`` is empty."""
    absent: Absence | None = None
    """Why it does not serve, where the platform tells; ``absence`` is of all."""
    fingerprint: Fingerprint = Fingerprint("")
    """What its KV may be exchanged with; empty while unknown."""
    refuses: tuple[tuple[InstanceName, str], ...] = ()
    """Prefill instances whose KV it has found that it cannot take, and why."""
    ejected: str = ""
    """Not empty: routers do not pick it, since it fails or is silent while others are not, and why."""
    adapters: AdapterReport | None = None
    """How far it has followed the order of adapters; None: nothing is known of any."""
    links: tuple[str, ...] = ()
    """Words on links of it that are worse than they could be."""
    roster: bool = False
    """Agents are told to beat to the router beside it."""
    router: bool = False
    """Clients reach the router beside it."""
    settled: bool = False
    """The router beside it answers and knows the roster."""
    cached: int = 0
    """Prompts that a router would rather send here, since their beginning is probably in its prefix cache."""
    epoch: int = 1
    """Of its role; grows by one with each change."""
    switching: bool = False
    """Its role was changed, and not everybody who must know does yet."""
    assigned: float = 0.0
    """When its role was changed last, unix seconds; meaningful while ``switching``."""
    parts: int = 1
    """How many it is made of, each with a place of its own."""
    missing: int = 0
    """Of an instance of several parts that is being made: those that are not there yet."""
    placed: int = 0
    """Of an instance of several parts: those that have a place,"""
    unplaced: int = 0
    """and those that find none; the others are not there, or nobody looked for a place for them yet."""
    unplaced_since: float = 0.0
    """Since when the first of them does not, or since when it is half an instance, where others have places; unix
    seconds.
    """

    @property
    def leaving(self) -> bool:
        """Whether the instance is on its way out, and will not serve again."""
        return self.phase in LEAVING

    @property
    def ready(self) -> bool:
        """Whether the router may send the instance requests."""
        return self.phase is Phase.READY

    @property
    def placeless(self) -> bool:
        """It waits for a place, perhaps for hours, and has begun nothing."""
        return isinstance(self.absent, Waiting) and self.absent.place and not self.leaving

    @property
    def queued(self) -> bool:
        """It waits to be admitted by something outside, such as Kueue."""
        return self.placeless and self.absent is not None and self.absent.reason == QUEUED

    @property
    def needs_replacement(self) -> bool:
        """Whether the platform never starts the instance again, so that another one has to take its place."""
        return isinstance(self.absent, Breakage) and self.absent.replaced

    @property
    def absence(self) -> Absence | None:
        """Why the instance does not serve. None for one that serves, or leaves as it should: there is nothing to wait
        for. None also where only the name is still somebody else's, who ends.
        """
        if self.leaving and self.phase is not Phase.LOST:
            return None
        if self.phase is Phase.LOST or isinstance(self.absent, Breakage):
            return self.absent
        if self.crashes >= LOOPING and self.units:
            worst = max(self.units, key=lambda unit: unit.crashes)
            words = f"{worst.name} crashed {worst.crashes} times in a row ({worst.exit or 'it ended'})"
            return Breakage("CrashLoop", words)
        if self.ready:
            return None
        if self.crashes >= LOOPING:
            last = f" ({self.absent.message})" if self.absent is not None else ""
            return Breakage("CrashLoop", f"it crashed {self.crashes} times in a row{last}")
        if self.absent is not None:
            return self.absent
        if self.phase is Phase.CRASHED:
            ends = next((unit.exit for unit in self.units if not unit.alive and unit.exit), "its engine ended")
            return Waiting("Crashed", f"{ends}, and is started again", since=self.since)
        return Waiting("Starting", STARTS, since=self.since)

    @property
    def serves_soon(self) -> bool:
        """Whether the instance serves, or is likely to serve soon by itself, or another in its place."""
        why = self.absence
        return why is None or why.ends_soon

    @property
    def crashes(self) -> int:
        """Crashes in a row of its worst process."""
        return max((unit.crashes for unit in self.units), default=self.platform_crashes)


class ObservedRouter(msgspec.Struct, frozen=True):
    """The router process of its own."""

    revision: Revision
    unit: ObservedUnit
    ready: bool
    """It answers, and its roster is complete: what it says of the fleet can be relied on."""
    stopping: bool = False


UNKNOWN_FRONT = Waiting("NoRouter", "nothing is known of routers")


class ObservedService(msgspec.Struct, frozen=True):
    """Everything there is of one service, as a step of the planner looks at it."""

    instances: tuple[Instance, ...] = ()
    router: ObservedRouter | None = None
    front: Absence | None = UNKNOWN_FRONT
    """Why a client's request would not be answered, where routers are no process of the planner's own; None: a router that
    clients reach has a settled roster and can pick."""
    absent: tuple[Absence, ...] = ()
    """What is wrong with the service as a whole, or is not there, of no instance: ``TemplateRejected``, a router …"""
    routers: tuple[str, ...] = ()
    """Routers in pods of their own, those that end included; told of a suspended service alone."""
    freed: float = 0.0
    """When an instance last gave its place back, unix seconds, as far as this process has seen."""
    fleet_known: bool = False
    """A settled router told the load and drain state. Without it nothing that serves is drained."""
    disaggregation: Disaggregation | None = None
    """What a router that knows the fleet says of that; None: none does."""
