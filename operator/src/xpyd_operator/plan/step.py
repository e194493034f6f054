"""One step: what is wanted and what is there → what to do now.

Laws
    1. Everything follows from the arguments; nothing is remembered from an earlier step.
    2. Nothing changed: nothing to do.
    3. What serves is drained before it is removed, and only as long as what is asked for keeps serving.
    4. All that exists of a role stays within replicas + surge; what is above that goes away and is never added to.
    5. A process that ended by itself comes back after its back-off, unless it is not wanted any more.
    6. At the end the router goes first, so that no request finds the engines gone.
"""

from __future__ import annotations

from xpyd_operator.plan import backoff, names
from xpyd_operator.plan.actions import (
    Action,
    Create,
    Drain,
    Plan,
    Remove,
    Restart,
    StartRouter,
    StopRouter,
    Undrain,
    Wait,
)
from xpyd_operator.plan.desired import Desired
from xpyd_operator.plan.observed import Instance, Observed, Phase, Unit
from xpyd_operator.plan.rollout import missing, retire, returning, view
from xpyd_sidecar.contract.ids import Role


def step(desired: Desired, observed: Observed, now: float) -> Plan:
    """Plan one step; ``now`` is in unix seconds. The order of the actions is the order to apply them in."""
    if desired.stopping:
        return _end(desired, observed, now)
    actions: list[Action] = []
    waits: list[Wait] = []
    _router(desired, observed, now, actions, waits)
    going: set[str] = set()
    for instance in observed.instances:
        gone = _finish(instance, desired.drain_timeout_s, now)
        if gone:
            actions.append(gone)
            going.add(instance.name)

    prefill = view(Role.PREFILL, desired.prefill, observed.instances)
    decode = view(Role.DECODE, desired.decode, observed.instances)
    drains: list[Action] = []
    for mine, other in ((prefill, decode), (decode, prefill)):
        out = retire(
            mine,
            other,
            max_surge=desired.max_surge,
            max_unavailable=desired.max_unavailable,
            fleet_known=observed.fleet_known,
        )
        actions += [Remove(instance.name, reason) for instance, reason in out.remove]
        drains += [Drain(instance.name, reason) for instance, reason in out.drain]
        waits += [Wait(f"draining {instance.name}", out.why) for instance in out.held]
        going.update(instance.name for instance, _ in (*out.remove, *out.drain))

    ordinals = names.free_ordinals([instance.ordinal for instance in observed.instances])
    for mine in (prefill, decode):
        back = [instance for instance in returning(mine) if instance.name not in going]
        actions += [Undrain(instance.name, "asked for again") for instance in back]
        count = missing(mine, len(back), desired.max_surge)
        for _, ordinal in zip(range(count), ordinals, strict=False):
            name = names.instance_name(desired.service, ordinal)
            actions.append(Create(name, ordinal, mine.role, mine.target.revision))
        short = mine.wanted - len(mine.fresh) - len(back) - count
        if short > 0:
            why = f"{len(mine.everything)} exist, surge is {desired.max_surge}"
            waits.append(Wait(f"creating {short} more of {mine.role}", why))
    actions += drains
    for instance in observed.instances:
        if instance.name not in going and not instance.leaving:
            _revive(instance, desired, now, actions, waits)
    return Plan(tuple(actions), tuple(waits))


def _router(desired: Desired, observed: Observed, now: float, actions: list[Action], waits: list[Wait]) -> None:
    there = observed.router
    if desired.router is None:
        if there is not None and not there.stopping:
            actions.append(StopRouter("not asked for"))
    elif there is None:
        actions.append(StartRouter(desired.router, "none runs"))
    elif there.stopping:
        waits.append(Wait("starting the router", "the old one still finishes its streams"))
    elif not there.unit.alive:
        when = _when(there.unit, now, "restarting the router", waits)
        if when:
            actions.append(StartRouter(desired.router, when))
    elif there.revision != desired.router:
        actions.append(StartRouter(desired.router, "its settings changed"))


def _finish(instance: Instance, drain_timeout_s: float, now: float) -> Remove | None:
    """The removal of an instance that is through with its work, or had all the time it gets."""
    if instance.phase is Phase.DRAINED:
        return Remove(instance.name, "drained")
    if instance.phase is Phase.DRAINING and now - instance.since >= drain_timeout_s:
        return Remove(instance.name, f"not drained within {drain_timeout_s:g} s")
    return None


def _revive(instance: Instance, desired: Desired, now: float, actions: list[Action], waits: list[Wait]) -> None:
    for unit in instance.units:
        if not unit.alive:
            reason = _when(unit, now, f"restarting {unit.name} of {instance.name}", waits)
            if reason:
                actions.append(Restart(instance.name, unit.name, reason))
        elif unit.outdated:
            actions.append(Restart(instance.name, unit.name, "its settings changed"))
    limit_s = desired.hang_timeout_s if instance.was_ready else desired.startup_timeout_s
    stuck = instance.phase is Phase.STARTING and now - instance.since >= limit_s
    if stuck and instance.units and all(unit.alive for unit in instance.units):
        state = "not healthy for" if instance.was_ready else "not ready within"
        actions.append(Restart(instance.name, instance.units[0].name, f"{state} {limit_s:g} s"))


def _when(unit: Unit, now: float, what: str, waits: list[Wait]) -> str:
    """The reason for a restart that is due, else an empty string and a wait."""
    due = backoff.due(unit.crashes, unit.ended, now)
    ended = unit.exit or "it ended"
    if now >= due:
        return ended
    waits.append(Wait(what, f"{ended}, {unit.crashes} in a row", due))
    return ""


def _end(desired: Desired, observed: Observed, now: float) -> Plan:
    router = observed.router
    if router is not None:
        if not router.stopping:
            return Plan((StopRouter("the service ends"),))
        return Plan((), (Wait("the end", "the router finishes its streams"),))
    actions: list[Action] = []
    for instance in observed.instances:
        if instance.phase in (Phase.STARTING, Phase.CRASHED):
            actions.append(Remove(instance.name, "the service ends"))
        elif instance.ready:
            actions.append(Drain(instance.name, "the service ends"))
        else:
            gone = _finish(instance, desired.drain_timeout_s, now)
            if gone:
                actions.append(gone)
    return Plan(tuple(actions))
