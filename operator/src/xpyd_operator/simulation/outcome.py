"""What a controller of instance counts sees of a simulated fleet, what it answers, and the results of a simulation. Times
are seconds since the first arrival of the trace; a ``Pair`` is (prefill, decode).
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from xpyd_operator.plan.planner.figures import Figures
from xpyd_operator.simulation.trace import Trace

Pair = tuple[int, int]


class ControllerLook(NamedTuple):
    """What a controller sees of the fleet at the time ``now``, in seconds since the first arrival."""

    now: float
    figures: Figures
    """Since it was asked last."""
    counts: Pair
    """Wanted now."""
    queues: tuple[int, int]
    """Requests that wait for or are in prefill and decode instances."""


class Controller(Protocol):
    """Decides how many instances of each role are wanted; asked every ``interval_s`` seconds. ``switching``: instances may
    take the other role.
    """

    interval_s: float
    switching: bool

    def want(self, look: ControllerLook) -> Pair:
        """The wanted numbers of prefill and decode instances from ``look.now`` on."""


class Mark(NamedTuple):
    """Wanted and ready instances of the fleet ``at`` seconds after the first arrival, when the controller was asked."""

    at: float
    prefill: int
    """Wanted."""
    decode: int
    ready_prefill: int
    ready_decode: int
    queued: int
    """Requests that wait for prefill."""


class Run:
    """The results of one simulated run over a trace.

    ``ttft`` (seconds) and ``tpot`` (seconds per token) are by request, infinite where it was refused or not answered before
    the end. Each of ``changes`` is (time, wanted counts before, after). ``ends_at``: when the last request arrived.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ttft = [math.inf] * len(trace)
        self.tpot = [math.inf] * len(trace)
        self.marks: list[Mark] = []
        self.instance_s = self.gpu_s = 0.0
        """Until the last arrival: of instances, and of their devices."""
        self.refused = 0
        """Requests that waited too long, or found the queue full."""
        self.failed_starts = 0
        self.link_peak = 0.0
        """Bytes a second into the busiest decode instance, on average over the trace."""
        self.computed_tokens = self.cached_tokens = 0
        """Of prompts, by whoever prefilled them."""
        self.switches = self.added = self.removed = 0
        self.changes: list[tuple[float, Pair, Pair]] = []
        self.ends_at = 0.0

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """Share of requests, 0 to 1, with at most ``ttft_s`` seconds to the first token and ``tpot_s`` seconds per further
        token; 0 for an empty trace.
        """
        met = sum(a <= ttft_s and b <= tpot_s for a, b in zip(self.ttft, self.tpot, strict=True))
        return met / max(1, len(self.ttft))

    @property
    def hours(self) -> float:
        """GPU-hours of all instances until the last arrival."""
        return self.gpu_s / 3600


def p95(values: list[float]) -> float:
    """The 95th percentile by nearest rank: the least value that at least 95 % of all values do not exceed; 0 for none."""
    return sorted(values)[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)] if values else 0.0
