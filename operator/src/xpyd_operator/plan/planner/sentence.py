"""A decision in one sentence: what changes, for what load and need, what is kept in hand and why, what clients saw.

    4P3D to 5P2D (switch 1 to prefill): LOAD; DEMAND; WAITING; needs 5P2D now and 5P2D in 180 s; KEPT; REGRET; SEEN; FLOOR
"""

from __future__ import annotations

import msgspec

from xpyd_operator.plan.planner.capacity import Capacity
from xpyd_operator.plan.planner.demand import Demand
from xpyd_operator.plan.planner.figures import Figures, Goals
from xpyd_operator.plan.planner.hindsight import Floor
from xpyd_operator.plan.planner.need import tpot_goal
from xpyd_operator.plan.planner.worth import RemovalPatience

Pair = tuple[int, int]
ROLES = ("prefill", "decode")
SHOWN = 0.01
"""With a smaller share of cached tokens nothing is said of them."""


class Reasons(msgspec.Struct, frozen=True):
    """All values that a decision of the planner rests on, for the sentence that explains it."""

    figures: Figures
    goals: Goals
    known: Capacity
    demand: Demand
    wanted: tuple[int | None, int | None]
    """Needed for the present; None: not known."""
    soon: tuple[int | None, int | None]
    """Needed when an instance that is added now would serve."""
    grown: Pair
    """Needed if the demand rises as it did before."""
    patience: tuple[RemovalPatience, RemovalPatience]
    floor: Floor | None
    now_s: float


def sentence(reasons: Reasons, before: Pair, after: Pair, switched: int) -> str:
    """Why counts go from ``before`` to ``after``; ``switched``: instances that go to prefill, below 0: to decode."""
    clauses = (
        _load(reasons), _kept(reasons, after), _regret(reasons, 0), _regret(reasons, 1), _measured(reasons),
        _floor(reasons),
    )
    return f"{_what(before, after, switched)}: {'; '.join(each for each in clauses if each)}"


def shape(counts: tuple[int | None, int | None]) -> str:
    """Counts as text, such as ``3P2D``, with ``?`` for one that is not known."""
    return "".join(f"{'?' if count is None else count}{letter}" for count, letter in zip(counts, "PD", strict=True))


def _what(before: Pair, after: Pair, switched: int) -> str:
    if before == after:
        return f"{shape(after)} stays"
    parts = []
    more = (after[0] - before[0] - switched, after[1] - before[1] + switched)
    if switched:
        parts.append(f"switch {abs(switched)} to {ROLES[switched < 0]}")
    if added := sum(max(0, each) for each in more):
        parts.append(f"add {added}")
    if removed := sum(max(0, -each) for each in more):
        parts.append(f"remove {removed}")
    return f"{shape(before)} to {shape(after)} ({', '.join(parts)})"


def _load(reasons: Reasons) -> str:
    known, figures, goals = reasons.known, reasons.figures, reasons.goals
    rate = figures.arrivals / figures.over_s
    if not known.ended:
        return f"{rate:.1f} requests/s, none has ended yet" if figures.arrivals else "no request has ended yet"
    prompts, outputs = reasons.demand.level
    each = f"{known.prefill_rate:.0f}" if known.prefill_rate else "an unknown rate"
    cached = f" ({known.cached_share:.0%} cached)" if known.cached_share >= SHOWN else ""
    batch = known.batch(tpot_goal(goals.tpot_s))
    return (
        f"{rate:.1f} requests/s of {known.prompt:.0f} prompt and {known.output:.0f} output tokens; "
        f"{prompts:.0f} prompt tokens/s{cached} at {each} per instance, "
        f"{outputs:.0f} output tokens/s at batches of {f'{batch:.0f}' if batch else 'unknown size'}{_link(reasons)}; "
        f"{figures.queued} waiting; "
        f"needs {shape(reasons.wanted)} now and {shape(reasons.soon)} in {goals.cold_start_s:.0f} s"
    )


def _link(reasons: Reasons) -> str:
    """What goes over the link, where that was seen to be what others wait for."""
    known = reasons.known
    if not known.link:
        return ""
    asked = reasons.demand.level[0] * known.token_bytes
    return f", {asked / 1e9:.3g} GB/s of KV at {known.link / 1e9:.3g} per instance"


def _kept(reasons: Reasons, after: Pair) -> str:
    """The demand may grow: that is why some of what is there is not spare."""
    parts = []
    for role in (0, 1):
        most = max(reasons.wanted[role] or 0, reasons.soon[role] or 0)
        kept = min(after[role], reasons.grown[role]) - most
        if most and kept > 0:
            parts.append(f"{kept}{'PD'[role]}")
    return f"keeps {' and '.join(parts)} in hand, as the load may rise again" if parts else ""


def _regret(reasons: Reasons, role: int) -> str:
    one, goals = reasons.patience[role], reasons.goals
    if one.times <= 1 or not one.regrets:
        return ""
    ago, waits = (reasons.now_s - one.regretted_s) / 60, one.seconds(goals.late_cost, goals.cold_start_s) / 60
    return f"{ROLES[role]} was short after a removal (regret {one.regrets}, {ago:.0f} min ago): fewer after {waits:.0f} min"


def _floor(reasons: Reasons) -> str:
    one = reasons.floor
    if one is None:
        return ""
    return (f"min: {one.count} for {ROLES[one.role]} would have had {one.saved} requests of the last hour in time, "
            f"for {one.hours:.1f} instance-hours")


def _measured(reasons: Reasons) -> str:
    figures, goals = reasons.figures, reasons.goals
    said = []
    for name, value, goal, unit in (
        ("TTFT", figures.ttft_p95, goals.ttft_s, 1.0), ("TPOT", figures.tpot_p95, goals.tpot_s, 1000.0),
    ):
        if value and goal is not None:
            what = "s" if unit == 1.0 else "ms"
            said.append(f"{name} p95 {value * unit:.3g} {what} of {goal * unit:.3g} {what}")
    return ", ".join(said)
