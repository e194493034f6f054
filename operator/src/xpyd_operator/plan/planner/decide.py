"""One decision: memory and figures in, memory, counts and a sentence out.

Laws
  * More is asked for as soon as the need is there, seen a cold start ahead.
  * Fewer only as ``worth`` says: when they were enough for the role's patience, would be if the demand rises as it did
    before, and then in parts.
  * A role that is short takes an instance of the other one, if that has had one to spare for ``SPARE`` intervals: a switch
    takes seconds, a new instance a cold start. A switch back waits ``BACK`` intervals, so counts do not flap.
  * What is not known of a role leaves its count as it is, and holds the other one in nothing. A role without instances is
    given one when requests come.
"""

from __future__ import annotations

import math

import msgspec

from xpyd_operator.plan.planner import hindsight, need, worth
from xpyd_operator.plan.planner.capacity import Capacity
from xpyd_operator.plan.planner.demand import Demand
from xpyd_operator.plan.planner.figures import Bounds, Figures, Goals
from xpyd_operator.plan.planner.sentence import Reasons, sentence
from xpyd_operator.plan.planner.worth import RemovalPatience

SPARE = 3
BACK = 8
HISTORY = 4096
"""Intervals whose need is remembered, at most."""
Pair = tuple[int, int]
Needs = tuple[int | None, int | None]
"""Instances of each role; None: not known."""


class Memory(msgspec.Struct, frozen=True):
    """What a planner keeps from one decision to the next. It may be lost: then counts stay until enough is known again."""

    at: int = 0
    """Intervals seen."""
    now_s: float = 0.0
    """Seconds of them."""
    known: Capacity = Capacity()
    demand: Demand = Demand()
    needs: tuple[Pair, ...] = ()
    """What arrived in each interval needed, the latest last; the count that was there, where that is not known."""
    forecasts: tuple[Pair, ...] = ()
    """Likewise, a cold start ahead."""
    switched: Pair = (-BACK, 0)
    """Interval of the last switch, and its direction: 1 towards prefill, -1 towards decode."""
    patience: tuple[RemovalPatience, RemovalPatience] = (RemovalPatience(), RemovalPatience())
    past: tuple[hindsight.Interval, ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """The counts that the planner decided on at the end of an interval, and why."""

    prefill: int
    decode: int
    added: int = 0
    removed: int = 0
    switched: int = 0
    """Instances that go to prefill; below 0: to decode."""
    sentence: str = ""

    @property
    def changes(self) -> bool:
        """Whether this decision adds, removes or switches instances."""
        return bool(self.added or self.removed or self.switched)


def decide(memory: Memory, figures: Figures, now: Pair, goals: Goals, bounds: Bounds) -> tuple[Memory, Decision]:
    """One interval is over; ``now`` are the counts that are wanted at present."""
    memory = _learn(memory, figures, goals.cold_start_s + goals.interval_s)
    steady, wanted, soon = _needs(memory, figures, goals, now)
    if figures.arrivals:
        wanted = (_first(wanted[0], now[0], bounds.prefill), _first(wanted[1], now[1], bounds.decode))
    asked = _filled((_most(wanted[0], soon[0]), _most(wanted[1], soon[1])), now)
    goal = _filled((soon[0] or wanted[0], soon[1] or wanted[1]), now)
    memory = _look(memory, figures, goals, now, (_filled(steady, now), goal))
    counts, switched = list(now), 0
    if goals.switching:
        counts, switched = _switch(memory, counts, asked, (figures.prefill.ready, figures.decode.ready), bounds)
        if switched:
            memory = msgspec.structs.replace(memory, switched=(memory.at, 1 if switched > 0 else -1))
    grown = _grown(memory, goals, now)
    added = removed = 0
    for role in (0, 1):
        low, high = _range(bounds, role)
        aim = _within(goal[role], (low, high))
        if aim > counts[role]:
            room = bounds.total - sum(counts) if bounds.total is not None else aim
            more = min(aim - counts[role], max(0, room))
            counts[role] += more
            added += more
        elif not switched and soon[role] is not None:
            floor = max(aim, _within(max(_calm(memory, goals, role), asked[role], grown[role]), (low, high)))
            if floor < counts[role] and not memory.patience[role].is_resting(memory.now_s, goals.interval_s):
                left = worth.part(counts[role], floor)
                memory = _removed(memory, role, counts[role])
                removed += counts[role] - left
                counts[role] = left
    reasons = Reasons(
        figures, goals, memory.known, memory.demand, wanted, soon, grown, memory.patience,
        hindsight.floor(memory.past, (bounds.prefill, bounds.decode)), memory.now_s)
    words = sentence(reasons, now, (counts[0], counts[1]), switched)
    return memory, Decision(counts[0], counts[1], added, removed, switched, words)


def _learn(memory: Memory, figures: Figures, ahead_s: float) -> Memory:
    demand = memory.demand
    mean = figures.arrived_tokens / figures.arrivals if figures.arrivals else memory.known.prompt
    done = max(0.0, figures.arrived_tokens + (demand.queued - figures.queued) * mean)
    known = memory.known.with_interval(figures, done)
    return msgspec.structs.replace(
        memory, at=memory.at + 1, now_s=memory.now_s + figures.over_s, known=known,
        demand=demand.with_interval(figures, known, ahead_s))


def _needs(memory: Memory, figures: Figures, goals: Goals, now: Pair) -> tuple[Needs, Needs, Needs]:
    """What arrives needs now, what is needed now with what waits, and what a cold start from now."""
    known, demand, step, burst = memory.known, memory.demand, goals.interval_s, memory.demand.prompts.burst
    level, later = demand.level, demand.forecast(goals.cold_start_s + step)
    waits, parked = demand.backlog
    cold = max(step, goals.cold_start_s)
    left = max(0.0, waits + (level[0] - known.prefill_rate * max(now[0], 1)) * goals.cold_start_s)
    # What waits for prefill comes to decode as fast as prefill reads it.
    answers = known.output / known.prompt if known.prompt else 0.0
    passing = min(waits / step, max(0.0, known.prefill_rate * figures.prefill.ready - level[0])) * answers
    # What waits at decode waits for its room, or for the link: then it has prompts yet to come.
    coming, parked = (parked / answers, 0.0) if known.link_waits and answers else (0.0, parked)
    steady = (
        need.prefill(level[0], 0.0, step, known, goals.ttft_s, burst=burst), need.decode(level[1], known, goals.tpot_s),
    )
    wanted = (
        need.prefill(level[0], waits, max(step, goals.ttft_s or step), known, goals.ttft_s, burst=burst),
        need.decode(level[1] + passing + parked / step, known, goals.tpot_s),
    )
    soon = (
        need.prefill(later[0], left, cold, known, goals.ttft_s, burst=burst),
        need.decode(later[1] + (left * answers + parked) / cold, known, goals.tpot_s),
    )
    links = (
        need.link(level[0], known), need.link(level[0] + coming / step, known), need.link(later[0] + coming / cold, known),
    )
    return _known(_linked(steady, links[0])), _known(_linked(wanted, links[1])), _known(_linked(soon, links[2]))


def _look(memory: Memory, figures: Figures, goals: Goals, now: Pair, needs: tuple[Pair, Pair]) -> Memory:
    """Remember what was needed and what is forecast to be, and what came of removals."""
    steady, soon = needs
    pays_s = goals.late_cost * goals.cold_start_s
    first, second = (memory.patience[role].with_interval(memory.now_s, now[role], steady[role], pays_s) for role in (0, 1))
    missed = goals.ttft_s is not None and figures.ttft_p95 > goals.ttft_s
    missed = missed or (goals.tpot_s is not None and figures.tpot_p95 > goals.tpot_s)
    one = hindsight.Interval(
        figures.over_s, figures.arrivals, missed, steady, (figures.prefill.ready, figures.decode.ready), now)
    return msgspec.structs.replace(
        memory, needs=(*memory.needs[-(HISTORY - 1) :], steady),
        forecasts=(*memory.forecasts[-(HISTORY - 1) :], soon), patience=(first, second),
        past=hindsight.append_interval(memory.past, one))


def _grown(memory: Memory, goals: Goals, now: Pair) -> Pair:
    """What is needed if the demand rises as it did before, until an instance that is asked for then serves."""
    known, demand = memory.known, memory.demand
    rates = demand.grown_rates(math.ceil(goals.cold_start_s / goals.interval_s) + 1, goals.late_cost)
    burst = demand.prompts.burst
    grown = (
        need.prefill(rates[0], 0.0, goals.interval_s, known, goals.ttft_s, burst=burst),
        need.decode(rates[1], known, goals.tpot_s),
    )
    return _filled(_known(_linked(grown, need.link(rates[0], known))), now)


def _calm(memory: Memory, goals: Goals, role: int) -> int:
    """The most that any interval of the role's patience needed; ``need.MOST`` while fewer intervals were seen."""
    steps, first = (
        min(HISTORY, max(1, math.ceil(one.seconds(goals.late_cost, goals.cold_start_s) / goals.interval_s)))
        for one in (memory.patience[role], RemovalPatience())
    )
    if len(memory.needs) < steps:
        return need.MOST
    return max(each[role] for each in (*memory.needs[-steps:], *memory.forecasts[-first:]))


def _removed(memory: Memory, role: int, count: int) -> Memory:
    patience = list(memory.patience)
    patience[role] = patience[role].with_removal(memory.now_s, count)
    return msgspec.structs.replace(memory, patience=(patience[0], patience[1]))


def _switch(memory: Memory, counts: list[int], asked: Pair, ready: Pair, bounds: Bounds) -> tuple[list[int], int]:
    """Move instances from the role that can spare some to the one that is short; what starts can take no other role yet."""
    for to, towards in ((0, 1), (1, -1)):
        other = 1 - to
        missing = min(asked[to], _range(bounds, to)[1]) - counts[to]
        held = max([asked[other], *(each[other] for each in memory.needs[-SPARE:])])
        spare = min(counts[other], ready[other]) - max(held, _range(bounds, other)[0], 1)
        back = memory.switched[1] == -towards and memory.at - memory.switched[0] < BACK
        moved = min(missing, spare)
        if moved > 0 and not back and len(memory.needs) >= SPARE:
            counts = list(counts)
            counts[to] += moved
            counts[other] -= moved
            return counts, moved * towards
    return counts, 0


def _linked(counts: Pair, links: int) -> Pair:
    """With as many of each role as the link needs, where that is known and so is the role."""
    return (max(counts[0], links) if counts[0] else 0, max(counts[1], links) if counts[1] else 0)


def _known(counts: Pair) -> Needs:
    """Of ``need``'s answers, in which 0 means that nothing is known."""
    return counts[0] or None, counts[1] or None


def _first(needed: int | None, now: int, bounds: Pair) -> int | None:
    """Where requests come, a role without instances is given one, though nothing is known of it."""
    return 1 if needed is None and not now and bounds[1] else needed


def _most(one: int | None, other: int | None) -> int | None:
    known = [each for each in (one, other) if each is not None]
    return max(known) if known else None


def _filled(needs: Needs, now: Pair) -> Pair:
    """The count that is there stands in for a need that is not known."""
    return now[0] if needs[0] is None else needs[0], now[1] if needs[1] is None else needs[1]


def _range(bounds: Bounds, role: int) -> Pair:
    return bounds.prefill if role == 0 else bounds.decode


def _within(value: int, bounds: Pair) -> int:
    return min(bounds[1], max(bounds[0], value))
