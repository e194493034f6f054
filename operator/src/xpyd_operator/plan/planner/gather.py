"""From what routers tell, answer by answer, to the figures of an interval.

Counters only grow, so what happened is the difference of two answers of a router; one that was started again counts from
zero, and one that went takes what it had not told with it. Loads are those of the instances' beats, averaged over all
answers of the interval. All routers hear all beats, so any of them tells the loads; but each counts its own requests, so
all are asked for totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from xpyd_operator.plan.planner.figures import Figures, RoleFigures
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Role, State
from xpyd_sidecar.contract.membership import Drafts
from xpyd_sidecar.contract.totals import Buckets, Totals, middle_of

SIZE_S = 600.0
"""Half-life of what is known of tokens per size."""


class Gather:
    """Makes the figures of an interval of one service from the totals that its routers tell."""

    def __init__(self) -> None:
        self._before: dict[str, Totals] = {}
        self._real = self._size = 0.0
        """Prompt tokens of the last while, exactly and by their size."""
        self._begun = 0.0
        self._samples = 0
        self._roles = {role: _Sums() for role in Role}
        self._drafts: dict[tuple[str, str], Drafts] = {}
        """By instance and life: what it had drafted, when figures were told last."""
        self._per_step = 1.0
        self._received: dict[tuple[str, str], int] = {}
        """Likewise, bytes of KV that came in."""
        self._read: dict[tuple[str, str], tuple[int, int]] = {}
        """Likewise, prompt tokens that a prefill instance read, and those of them that it did not compute."""

    def sample(self, fleet: Fleet) -> None:
        """One router's answer, for the loads."""
        self._samples += 1
        for role in Role:
            self._roles[role].add([each for each in fleet.instances if each.role is role])

    def figures(self, fleets: Mapping[str, Fleet], now: float) -> Figures | None:
        """The interval until ``now`` (unix seconds), by the answers of all routers; None where there was none before it."""
        before, begun, many = self._before, self._begun, max(1, self._samples)
        self._before = {name: fleet.totals for name, fleet in fleets.items()}
        self._begun = now
        roles, self._roles = self._roles, {role: _Sums() for role in Role}
        self._samples = 0
        if not begun or now <= begun or not fleets:
            return None
        parts = [_since(before.get(name), fleet.totals, begun) for name, fleet in fleets.items()]
        ttft, tpot = _together(part.ttft for part in parts), _together(part.tpot for part in parts)
        handovers = sum(part.handovers for part in parts)
        ended, prompts = sum(part.measured for part in parts), sum(part.prompt_tokens for part in parts)
        keep = 0.5 ** ((now - begun) / SIZE_S)
        self._real = keep * self._real + prompts
        self._size = keep * self._size + sum(part.measured_size for part in parts)
        exact = self._real / self._size if self._real and self._size else 1.0
        latest = next(iter(fleets.values())).instances
        prefilling = sum(each.load.running + each.load.waiting for each in latest if each.role is Role.PREFILL)
        # Decode has a request from its beginning, so what prefill has waits at decode, too.
        parked = sum(each.load.waiting for each in latest if each.role is Role.DECODE) - prefilling
        mean = prompts / ended if ended else 0.0
        waiting = sum(_waiting(each, mean) for each in latest if _serves(each, Role.PREFILL))
        return Figures(
            over_s=now - begun,
            arrivals=sum(part.arrivals for part in parts),
            arrived_tokens=exact * sum(part.arrived_tokens for part in parts),
            ended=ended,
            prompt_tokens=prompts,
            prompt_squares=float(sum(part.prompt_squares for part in parts)),
            output_tokens=sum(part.output_tokens for part in parts),
            cached_share=self._cached_share(latest),
            queued=waiting + sum(fleet.queued for fleet in fleets.values()),
            parked=max(0, parked),
            link_bytes=self._link_bytes(latest),
            handover_s=sum(part.handover_s for part in parts) / handovers if handovers else 0.0,
            ttft_p95=quantile(ttft, 0.95),
            tpot_p95=quantile(tpot, 0.95),
            tpot_mean=_mean(tpot),
            tokens_per_step=self._tokens_per_step(latest),
            prefill=roles[Role.PREFILL].figures(many, latest, Role.PREFILL),
            decode=roles[Role.DECODE].figures(many, latest, Role.DECODE),
        )

    def _link_bytes(self, latest: Iterable[FleetInstance]) -> float:
        """What came into decode instances since figures were told last; of one that is new nobody knows since when."""
        before = self._received
        self._received = {
            (each.instance, each.incarnation): sum(count for _, count in each.load.intake.links)
            for each in latest if each.role is Role.DECODE and each.load.intake is not None
        }
        return float(sum(max(0, now - before.get(key, now)) for key, now in self._received.items()))

    def _cached_share(self, latest: Iterable[FleetInstance]) -> float:
        """Of the prompt tokens that prefill read since figures were told last, the share that it did not compute."""
        before = self._read
        self._read = {
            (each.instance, each.incarnation): (told.prompts, told.cached + told.received)
            for each in latest if each.role is Role.PREFILL and (told := each.load.intake) is not None
        }
        grown = [(now[0] - before[key][0], now[1] - before[key][1]) for key, now in self._read.items() if key in before]
        read = sum(each[0] for each in grown)
        return min(1.0, max(0.0, sum(each[1] for each in grown) / read)) if read > 0 else 0.0

    def _tokens_per_step(self, latest: Iterable[FleetInstance]) -> float:
        """A step of a request gives one token, and what is accepted of its drafts; as before, where there was none."""
        now = {(each.instance, each.incarnation): each.load.drafts for each in latest if each.role is Role.DECODE}
        before, self._drafts = self._drafts, {key: drafts for key, drafts in now.items() if drafts is not None}
        both = [(before[key], drafts) for key, drafts in self._drafts.items() if key in before]
        generated = sum(after.generated - earlier.generated for earlier, after in both)
        steps = generated - sum(after.accepted - earlier.accepted for earlier, after in both)
        if not self._drafts:
            self._per_step = 1.0
        elif 0 < steps <= generated:
            self._per_step = generated / steps
        return self._per_step


class _Sums:
    """Of one role, over the answers of an interval."""

    def __init__(self) -> None:
        self.busy = self.running = self.kv = 0.0

    def add(self, instances: list[FleetInstance]) -> None:
        for each in instances:
            working = each.load.running + each.load.waiting > 0
            self.busy += working
            self.running += each.load.running
            self.kv += each.load.kv_usage if working else 0.0

    def figures(self, many: int, latest: Iterable[FleetInstance], role: Role) -> RoleFigures:
        return RoleFigures(
            ready=sum(_serves(each, role) for each in latest), busy=self.busy / many, running=self.running / many,
            kv_usage=self.kv / self.busy if self.busy else 0.0,
        )


def _serves(each: FleetInstance, role: Role) -> bool:
    return each.role is role and each.state is State.READY


def _waiting(each: FleetInstance, mean: float) -> int:
    """Prompts that wait there: by their tokens, where it tells them and the mean is known, else by requests. The one that
    it computes does not wait.
    """
    if each.load.prompts is None or not mean:
        return max(0, each.load.running + each.load.waiting - 1)
    return max(0, ceil(each.load.prompts.queued / mean) - 1)


def _since(before: Totals | None, now: Totals, begun: float) -> Totals:
    """What was added; nothing of a router that counted before and is new to us, since nobody knows when."""
    if before is None or before.since != now.since:
        return now if now.since >= begun else Totals(since=now.since)
    return Totals(
        since=now.since, arrivals=now.arrivals - before.arrivals, arrived_tokens=now.arrived_tokens - before.arrived_tokens,
        measured=now.measured - before.measured, prompt_tokens=now.prompt_tokens - before.prompt_tokens,
        measured_size=now.measured_size - before.measured_size,
        prompt_squares=now.prompt_squares - before.prompt_squares, output_tokens=now.output_tokens - before.output_tokens,
        handovers=now.handovers - before.handovers, handover_s=now.handover_s - before.handover_s,
        ttft=_less(now.ttft, before.ttft), tpot=_less(now.tpot, before.tpot),
    )


def _less(now: Buckets, before: Buckets) -> Buckets:
    return {bucket: count - before.get(bucket, 0) for bucket, count in now.items() if count > before.get(bucket, 0)}


def _together(parts: Iterable[Buckets]) -> Buckets:
    found: Buckets = {}
    for part in parts:
        for bucket, count in part.items():
            found[bucket] = found.get(bucket, 0) + count
    return found


def quantile(buckets: Buckets, share: float) -> float:
    """Of durations, seconds; 0 without any."""
    need, seen = share * sum(buckets.values()), 0
    for bucket, count in sorted(buckets.items()):
        seen += count
        if seen >= need:
            return middle_of(bucket)
    return 0.0


def _mean(buckets: Buckets) -> float:
    count = sum(buckets.values())
    return sum(middle_of(bucket) * number for bucket, number in buckets.items()) / count if count else 0.0
