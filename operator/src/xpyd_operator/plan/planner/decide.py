"""One decision: memory and figures in, memory, counts and a sentence out.

Laws
  * More is asked for as soon as the need is there, seen a cold start ahead; fewer only when fewer were enough for the
  whole of
    ``scale_down_s``.
  * A role that is short takes an instance of the other one, if that has had one to spare for ``SPARE`` intervals: a switch
    takes seconds, a new instance a cold start. A switch back waits ``BACK`` intervals, so counts do not flap.
  * What is not known is not acted on: without figures the counts stay.
"""

from __future__ import annotations

import math

import msgspec

from xpyd_operator.plan.planner import need
from xpyd_operator.plan.planner.capacity import NO_ROOM_S, Capacity
from xpyd_operator.plan.planner.figures import Bounds, Figures, Goals
from xpyd_operator.plan.planner.forecast import Series

SPARE = 3
BACK = 8
SHORTEST_S = 1e-6
"""A decode step that is shorter is no measurement."""
HISTORY = 4096
"""Intervals that are remembered for scaling down, at most."""
Pair = tuple[int, int]


class Memory(msgspec.Struct, frozen=True):
    """What a planner keeps from one decision to the next. It may be lost: then counts stay until enough is known again."""

    at: int = 0
    """Intervals seen."""
    known: Capacity = Capacity()
    prompts: Series = Series()
    """Prompt tokens a second."""
    outputs: Series = Series()
    """Generated tokens a second."""
    queued: int = 0
    """As it was seen last."""
    needs: tuple[Pair, ...] = ()
    """What each interval needed, the latest last."""
    switched: tuple[int, int] = (-BACK, 0)
    """Interval of the last switch, and its direction: 1 towards prefill, -1 towards decode."""


class Decision(msgspec.Struct, frozen=True):
    """What one interval led to."""

    prefill: int
    decode: int
    added: int = 0
    removed: int = 0
    switched: int = 0
    """Instances that go to prefill; below 0: to decode."""
    sentence: str = ""

    @property
    def changes(self) -> bool:
        """Whether the counts change."""
        return bool(self.added or self.removed or self.switched)


def decide(memory: Memory, figures: Figures, now: Pair, goals: Goals, bounds: Bounds) -> tuple[Memory, Decision]:
    """One interval is over; ``now`` are the counts that are wanted at present."""
    memory = _learn(memory, figures, goals.cold_start_s + goals.interval_s)
    known = memory.known
    wanted, soon = _needs(memory, figures, goals, now)
    if (not wanted[0] and bounds.prefill[1]) or not wanted[1]:
        return memory, Decision(*now, sentence=f"{_shape(now)} stays: {_unknown(known)}")
    memory = msgspec.structs.replace(memory, needs=(*memory.needs[-(HISTORY - 1) :], soon))
    counts, switched = list(now), 0
    asked = (max(wanted[0], soon[0]), max(wanted[1], soon[1]))
    short = [max(0, _within(asked[i], _range(bounds, i)) - now[i]) for i in (0, 1)]
    if goals.switching:
        counts, switched = _switch(memory, counts, asked, bounds)
        if switched:
            memory = msgspec.structs.replace(memory, switched=(memory.at, 1 if switched > 0 else -1))
    added = removed = 0
    calm = _calm(memory, goals)
    for role in (0, 1):
        low, high = _range(bounds, role)
        goal = _within(soon[role], (low, high))
        if goal > counts[role]:
            room = bounds.total - sum(counts) if bounds.total is not None else goal
            more = min(goal - counts[role], max(0, room))
            counts[role] += more
            added += more
        elif calm is not None and not short[role] and not switched:
            fewer = max(goal, _within(max(calm[role], asked[role]), (low, high)))
            if fewer < counts[role]:
                removed += counts[role] - fewer
                counts[role] = fewer
    found = Decision(counts[0], counts[1], added, removed, switched)
    return memory, msgspec.structs.replace(found, sentence=_sentence(memory, figures, goals, (now, wanted, soon), found))


def _learn(memory: Memory, figures: Figures, ahead_s: float) -> Memory:
    before = memory.known
    mean = figures.arrived_tokens / figures.arrivals if figures.arrivals else before.prompt
    done = max(0.0, figures.arrived_tokens + (memory.queued - figures.queued) * mean)
    known = before.seen(figures, done)
    token_s = known.token(figures.decode.batch)
    written = figures.decode.running / token_s if token_s > SHORTEST_S else figures.output_tokens / figures.over_s
    noise = mean * math.sqrt(figures.arrivals * (1 + known.spread)) / figures.over_s
    return msgspec.structs.replace(
        memory, at=memory.at + 1, known=known, queued=figures.queued,
        prompts=memory.prompts.seen(figures.arrived_tokens / figures.over_s, noise, figures.over_s, ahead_s),
        outputs=memory.outputs.seen(written, written / max(1.0, figures.decode.running) ** 0.5, figures.over_s, ahead_s),
    )


def _needs(memory: Memory, figures: Figures, goals: Goals, now: Pair) -> tuple[Pair, Pair]:
    """What is needed now, what waits included, and a cold start from now."""
    known, step, burst = memory.known, goals.interval_s, memory.prompts.burst
    backlog = figures.queued * known.prompt
    parked = figures.arrivals / figures.over_s * max(0.0, figures.handover_s - NO_ROOM_S) * known.output
    rates = [each.now.level for each in (memory.prompts, memory.outputs)]
    wanted = (
        need.prefill(rates[0], backlog, max(step, goals.ttft_s or step), known, goals.ttft_s, burst=burst),
        need.decode(rates[1] + parked / step, known, goals.tpot_s),
    )
    ahead = goals.cold_start_s + step
    later = [each.ahead(ahead) for each in (memory.prompts, memory.outputs)]
    capacity = known.prefill_rate * max(now[0], 1)
    left = max(0.0, backlog + (rates[0] - capacity) * goals.cold_start_s)
    soon = (
        need.prefill(later[0], left, max(step, goals.cold_start_s), known, goals.ttft_s, burst=burst),
        need.decode(later[1] + parked / max(step, goals.cold_start_s), known, goals.tpot_s),
    )
    return wanted, soon


def _switch(memory: Memory, counts: list[int], asked: Pair, bounds: Bounds) -> tuple[list[int], int]:
    """Move instances from the role that can spare some to the one that is short."""
    for to, towards in ((0, 1), (1, -1)):
        other = 1 - to
        missing = min(asked[to], _range(bounds, to)[1]) - counts[to]
        held = max([asked[other], *(each[other] for each in memory.needs[-SPARE:])])
        spare = counts[other] - max(held, _range(bounds, other)[0], 1)
        back = memory.switched[1] == -towards and memory.at - memory.switched[0] < BACK
        moved = min(missing, spare)
        if moved > 0 and not back and len(memory.needs) >= SPARE:
            counts = list(counts)
            counts[to] += moved
            counts[other] -= moved
            return counts, moved * towards
    return counts, 0


def _calm(memory: Memory, goals: Goals) -> Pair | None:
    """The most that any interval of the delay needed; None while fewer intervals were seen."""
    steps = max(1, math.ceil(goals.scale_down_s / goals.interval_s))
    if len(memory.needs) < min(steps, HISTORY):
        return None
    seen = memory.needs[-steps:]
    return max(each[0] for each in seen), max(each[1] for each in seen)


def _range(bounds: Bounds, role: int) -> Pair:
    return bounds.prefill if role == 0 else bounds.decode


def _within(value: int, bounds: Pair) -> int:
    return min(bounds[1], max(bounds[0], value))


def _shape(counts: Pair) -> str:
    return f"{counts[0]}P{counts[1]}D"


def _unknown(known: Capacity) -> str:
    return "no request has ended yet" if not known.ended else "what an instance can do is not known yet"


def _sentence(memory: Memory, figures: Figures, goals: Goals, counts: tuple[Pair, Pair, Pair], found: Decision) -> str:
    """``counts``: as they were, as the present needs them, as the time after a cold start does."""
    known, (now, wanted, soon) = memory.known, counts
    parts = []
    if found.switched:
        role = "prefill" if found.switched > 0 else "decode"
        parts.append(f"switch {abs(found.switched)} to {role}")
    if found.added:
        parts.append(f"add {found.added}")
    if found.removed:
        parts.append(f"remove {found.removed}")
    after = _shape((found.prefill, found.decode))
    what = f"{_shape(now)} to {after} ({', '.join(parts)})" if parts else f"{after} stays"
    rate = figures.arrivals / figures.over_s
    why = (
        f"{rate:.1f} requests/s of {known.prompt:.0f} prompt and {known.output:.0f} output tokens; "
        f"{memory.prompts.now.level:.0f} prompt tokens/s at {known.prefill_rate:.0f} per instance, "
        f"{memory.outputs.now.level:.0f} output tokens/s at batches of {known.batch(_goal(goals)):.0f}; "
        f"{figures.queued} waiting; "
        f"needs {_shape(wanted)} now and {_shape(soon)} in {goals.cold_start_s:.0f} s"
    )
    return f"{what}: {why}{_measured(figures, goals)}"


def _goal(goals: Goals) -> float | None:
    return need.SLACK * goals.tpot_s if goals.tpot_s is not None else None


def _measured(figures: Figures, goals: Goals) -> str:
    said = []
    for name, value, goal, unit in (
        ("TTFT", figures.ttft_p95, goals.ttft_s, 1.0), ("TPOT", figures.tpot_p95, goals.tpot_s, 1000.0),
    ):
        if value and goal is not None:
            what = "s" if unit == 1.0 else "ms"
            said.append(f"{name} p95 {value * unit:.3g} {what} of {goal * unit:.3g} {what}")
    return f"; {', '.join(said)}" if said else ""
