"""The planner of one service from round to round: when it decides, on what, and what it says. Time is an argument.

The memory lives as long as the process. After a start the counts stay until enough is known, and nothing is taken away
before the first patience is over (``worth``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from xpyd_operator.api.durations import seconds
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.counts import counts
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_operator.plan.planner.decide import Decision, Memory, decide
from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.plan.planner.gather import Gather
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import InstanceName, Role

COLD_START_S = 180.0
"""Until one instance was seen to start."""
COLD_SHARE = 0.3
"""Weight of the newest cold start."""
Pair = tuple[int, int]
Kind = Literal["switch", "add", "remove", "stay"]


class PlannerVerdict(msgspec.Struct, frozen=True):
    """A decision, as it is told."""

    prefill: int
    decode: int
    kind: Kind
    sentence: str
    acts: bool
    """The mode is auto: the counts are to be set."""
    news: bool
    """It says something else than the one before, so it is worth an Event."""


class Planning:
    """See the module."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._gather = Gather()
        self._due = 0.0
        self._cold_s = 0.0
        self._starting: dict[InstanceName, float] = {}
        self._told: Pair | None = None
        self.sentence = ""
        """Of the last decision, with the mode before it; empty before the first one."""

    def observe(self, fleet: Fleet | None, instances: tuple[Instance, ...], now: float) -> None:
        """Take in what a round saw: loads of the instances, and how long they take to start. ``now`` is in unix seconds."""
        if fleet is not None:
            self._gather.sample(fleet)
        there = set()
        for each in instances:
            there.add(each.name)
            if each.phase is Phase.STARTING and not each.was_ready:
                self._starting.setdefault(each.name, now)
            elif (begun := self._starting.pop(each.name, None)) is not None and each.ready:
                took = max(1.0, now - begun)
                self._cold_s = took if not self._cold_s else (1 - COLD_SHARE) * self._cold_s + COLD_SHARE * took
        for name in self._starting.keys() - there:
            del self._starting[name]

    @property
    def cold_start_s(self) -> float:
        """What a start takes, as seen, or as is usual."""
        return self._cold_s or COLD_START_S

    def is_due(self, service: DisaggService, now: float) -> bool:
        """Whether an interval is over; switches off what was said when the planner is."""
        if service.spec.planner.mode == "disabled":
            self.sentence, self._due, self._told = "", 0.0, None
            return False
        return now >= self._due

    def conclude(
        self, service: DisaggService, fleets: Mapping[str, Fleet], wanted: Pair, now: float
    ) -> PlannerVerdict | None:
        """Decide on the interval that is over; ``fleets`` are the answers of all routers, ``wanted`` the counts as they
        are.

        None while nothing can be told: the first interval, or no router answered.
        """
        planner = service.spec.planner
        self._due = now + planner.interval_s
        figures = self._gather.figures(fleets, now)
        if figures is None:
            return None
        goals = goals_of(service, self.cold_start_s)
        self._memory, found = decide(self._memory, figures, wanted, goals, bounds_of(service))
        found = _within_limits(service, found, wanted)
        counts_ = (found.prefill, found.decode)
        self.sentence = f"planner ({planner.mode}): {found.sentence}"
        news = found.changes and counts_ != self._told
        self._told = counts_ if found.changes else None
        return PlannerVerdict(*counts_, kind_of(found), found.sentence, planner.mode == "auto", news)


def goals_of(service: DisaggService, cold_start_s: float) -> Goals:
    """The goals of the planner as the document states them, in seconds."""
    planner = service.spec.planner
    ttft, tpot = planner.slo.ttft_p95, planner.slo.tpot_p95
    return Goals(
        ttft_s=seconds(ttft) if ttft is not None else None,
        tpot_s=seconds(tpot) if tpot is not None else None,
        interval_s=planner.interval_s,
        late_cost=planner.late_cost,
        cold_start_s=cold_start_s,
        switching=service.spec.rollout.switch_window_s > 0
        and service.spec.prefill.scaling is not None and service.spec.decode.scaling is not None
        and _instance(service.spec.prefill) == _instance(service.spec.decode),
    )


def _instance(role: RoleSpec) -> RoleSpec:
    """Without its count: instances of roles that differ in the rest do not switch (``render/switch`` has the last word)."""
    return msgspec.structs.replace(role, replicas=None, scaling=None)


def bounds_of(service: DisaggService) -> Bounds:
    """Bounds of the counts as the document states them; a role without ``scaling`` keeps its count."""
    spec = service.spec
    return Bounds(
        prefill=(spec.prefill.min_instances, spec.prefill.max_instances),
        decode=(max(1, spec.decode.min_instances), max(1, spec.decode.max_instances)),
        total=spec.limits.max_instances,
    )


def kind_of(found: Decision) -> Kind:
    """What kind of decision it is, in one word for the metric; the first that applies."""
    if found.switched:
        return "switch"
    if found.added:
        return "add"
    return "remove" if found.removed else "stay"


def _within_limits(service: DisaggService, found: Decision, wanted: Pair) -> Decision:
    """Limits hold whoever asks; what they change is said."""
    held = counts(service, {Role.PREFILL: found.prefill, Role.DECODE: found.decode})
    if (held.prefill, held.decode) == (found.prefill, found.decode):
        return found
    more = [held.prefill - wanted[0], held.decode - wanted[1]]
    moved = int(math.copysign(min(abs(more[0]), abs(more[1])), more[0])) if more[0] * more[1] < 0 else 0
    total = sum(more)
    return Decision(
        held.prefill, held.decode, max(0, total), max(0, -total), moved, f"{found.sentence}; {held.held}"
    )
