"""One step: what is wanted and what is there → what to do now.

Laws
    1. Everything follows from the arguments; nothing is remembered from an earlier step.
    2. Nothing changed: nothing to do.
    3. What serves is drained before it is removed, and only as long as what is asked for keeps serving.
    4. All that exists of a role stays within replicas + surge; what is above that goes away and is never added to.
    5. A process that ended by itself comes back after its back-off, unless it is not wanted any more.
    6. At the end the router goes first, so that no request finds the engines gone.
    7. What serves with one fingerprint in both roles goes on doing so until the whole of it can go (``balance``).
    8. Clients always reach a router that knows the roster, as long as one can (``routers``).
    9. What the platform restarts by itself is left to it; what it never starts again is removed.
   10. Where one role has too many and the other too few, a running instance takes the other role (``switch``).
   11. While an instance has places for a part of itself alone, no other one of several parts is made (``placing``).
   12. Where one role has no place and the other all of them, the other gives some up, also without a router (``stranded``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from xpyd_operator.plan import backoff, balance, names, placing, routers, stranded, switch
from xpyd_operator.plan.absent import Waiting, put_off
from xpyd_operator.plan.actions import (
    Action,
    Create,
    Drain,
    Plan,
    Remove,
    Restart,
    StartRouter,
    StopRouter,
    Switch,
    Undrain,
)
from xpyd_operator.plan.canary import RoleView, is_canary_stage, stage, view
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import UNFINISHED, Instance, ObservedService, ObservedUnit, Phase
from xpyd_operator.plan.rollout import Retire, missing, reason_to_wait, retire, returning
from xpyd_operator.plan.suspension import suspend
from xpyd_sidecar.contract.ids import Role

REPLACE_S = 10.0
"""How long an instance that never runs again stays at least, so that one that always ends at once is no storm."""


def step(desired: DesiredService, observed: ObservedService, now: float) -> Plan:
    """Plan one step; ``now`` is in unix seconds. The order of the actions is the order to apply them in."""
    if desired.stopping:
        return _end(desired, observed, now)
    if desired.suspended_since:
        return suspend(desired, observed, now)
    actions: list[Action] = []
    waits: list[Waiting] = []
    _router(desired, observed, now, actions, waits)
    gone = [_finish(instance, desired, now) for instance in observed.instances]
    actions += [action for action in gone if action]
    going = {action.instance for action in gone if action}
    without, placed = placing.turns(observed.instances, going, now, gang=desired.gang, uid=desired.uid)
    actions += without
    going |= {action.instance for action in without}
    held = placed or _pause(desired, now)

    there = tuple(_seen(instance, now) for instance in observed.instances)
    drains: list[Action] = []
    for instance in there:
        if instance.name not in going and switch.overdue(instance, now, fleet_known=observed.fleet_known):
            drains.append(Drain(instance.name, f"it did not become {instance.role} within {switch.TAKE_S:g} s"))
            going.add(instance.name)
    there = tuple(msgspec.structs.replace(one, phase=Phase.DRAINING) if one.name in going and not one.leaving else one
                  for one in there)
    views = _views(desired, there)
    if stranded.nothing_runs(views[1], now):
        observed = msgspec.structs.replace(observed, fleet_known=True)
    made, stays = switch.switches(desired, observed, views, now)
    given = stranded.give_up(desired, views, observed.freed, now) if not made and not going else ()
    made += [action for action in given if isinstance(action, Switch)]
    leaving = [action for action in given if not isinstance(action, Switch)]
    drains += leaving
    going.update(action.instance for action in leaving)
    actions += made
    there = switch.apply_switches(there, made)
    there = tuple(msgspec.structs.replace(one, phase=Phase.DRAINING) if one.name in going and not one.leaving else one
                  for one in there)
    observed = msgspec.structs.replace(observed, instances=switch.apply_switches(observed.instances, made))
    views = _views(desired, there)
    outs, last = _retire(desired, observed, views, going)
    last = last or stays
    for out in _patient(desired, views, outs, now):
        actions += [Remove(instance.name, reason) for instance, reason in out.remove]
        drains += [Drain(instance.name, reason) for instance, reason in out.drain]
        waits += [put_off(f"draining {instance.name}", why) for instance, why in out.held]
        going.update(instance.name for instance, _ in (*out.remove, *out.drain))

    ordinals = names.free_ordinals([instance.ordinal for instance in observed.instances])
    creates: list[Create] = []
    for mine, other in (views, views[::-1]):
        first = stranded.first_to_others(mine, other, now)
        more, short = _add(desired, (mine, other), going, ordinals, (held, first), fleet_known=observed.fleet_known)
        actions += [action for action in more if not isinstance(action, Create)]
        creates += [action for action in more if isinstance(action, Create)]
        waits += short
    actions += stranded.in_ratio(creates, views, decode_first=desired.decode_first)
    actions += drains
    for instance in observed.instances:
        if instance.name not in going and not instance.leaving:
            _revive(instance, desired, now, actions, waits)
    actions += routers.label(desired, observed, going, last)
    return Plan(tuple(actions), tuple(waits))


def _views(desired: DesiredService, there: tuple[Instance, ...]) -> tuple[RoleView, RoleView]:
    return (view(Role.PREFILL, desired.prefill, there), view(Role.DECODE, desired.decode, there))


def _patient(
    desired: DesiredService, views: tuple[RoleView, RoleView], outs: tuple[Retire, Retire], now: float
) -> Iterator[Retire]:
    """Who goes, but for those that the other role may want; and why they did not switch where it wants some."""
    for mine, other, out in zip(views, views[::-1], outs, strict=True):
        why = switch.waits(desired, views, mine.role, now)
        held = out.hold({instance.name: why for instance, _ in out.drain}) if why else out
        short = len(other.fresh) < other.wanted_count and not mine.stale
        words = f"it cannot become {other.role}: {desired.no_switch}"
        yield held.with_reason(words) if short and desired.no_switch else held


def _retire(
    desired: DesiredService, observed: ObservedService, views: tuple[RoleView, RoleView], going: Collection[str]
) -> tuple[tuple[Retire, Retire], str]:
    """Who goes of prefill and decode, so that what is left can pair and is reached; and the router kept for that."""
    prefill, decode = (
        retire(mine, other, fleet_known=observed.fleet_known) for mine, other in (views, views[::-1])
    )
    last = ""
    if desired.max_sidecars:
        last = routers.last_router(observed, {*going, *(instance.name for instance, _ in decode.drain)})
        decode = decode.hold({last: "clients reach no other router yet"})
    leaving = ([instance for instance, _ in prefill.drain], [instance for instance, _ in decode.drain])
    stay = balance.reasons_to_keep(*views, leaving)
    return (prefill.hold(stay), decode.hold(stay)), last


def _add(
    desired: DesiredService,
    views: tuple[RoleView, RoleView],
    going: Collection[str],
    ordinals: Iterator[int],
    first: tuple[str, str],
    *,
    fleet_known: bool,
) -> tuple[list[Action], list[Waiting]]:
    """Take back and make what is missing of the first of ``views``. ``first``: who finds its places first, in words; where
    the missing ones are of several parts, and of any.
    """
    mine, other = views
    at = stage(mine, other, fleet_known=fleet_known)
    back = [one for one in returning(mine) if one.name not in going] if desired.keep_terminating else []
    actions: list[Action] = [Undrain(instance.name, "asked for again") for instance in back]
    count = missing(mine, len(back), canary=is_canary_stage(at))
    placed, others = first
    if count and placed and mine.target.parts > 1:
        return actions, [put_off(f"creating {count} more of {mine.role}", placed, desired.place_after)]
    if count and others:
        return actions, [put_off(f"creating {count} more of {mine.role}", others)]
    for _, ordinal in zip(range(count), ordinals, strict=False):
        name = names.instance_name(desired.service, ordinal)
        actions.append(Create(name, ordinal, mine.role, mine.target.revision))
    short = mine.wanted_count - len(mine.fresh) - len(back) - count
    if short <= 0:
        return actions, []
    why = f"{len(mine.everything)} exist, surge is {mine.target.max_surge}"
    why = reason_to_wait(mine, other, at) if is_canary_stage(at) else why
    return actions, [put_off(f"creating {short} more of {mine.role}", why)]


def _pause(desired: DesiredService, now: float) -> str:
    """Why no instance of several parts is made although none waits for places; empty where they are made."""
    paused = 0 < desired.place_after - now <= placing.PAUSE_S + placing.SPREAD_S  # later than that: the clock was set back
    return "others can have the places of one that found too few of them" if paused else ""


def _seen(instance: Instance, now: float) -> Instance:
    """An instance that never starts again counts as one whose removal is under way."""
    return msgspec.structs.replace(instance, phase=Phase.STOPPING) if _spent(instance, now) else instance


def _spent(instance: Instance, now: float) -> bool:
    """Its platform never starts it again, and it ended a while ago (or in the future: the clock was set back)."""
    if instance.phase is not Phase.CRASHED or instance.units or not instance.needs_replacement:
        return False
    return not 0 <= now - instance.since < REPLACE_S


def _router(
    desired: DesiredService, observed: ObservedService, now: float, actions: list[Action], waits: list[Waiting]
) -> None:
    there = observed.router
    if desired.router is None:
        if there is not None and not there.stopping:
            actions.append(StopRouter("not asked for"))
    elif there is None:
        actions.append(StartRouter(desired.router, "none runs"))
    elif there.stopping:
        waits.append(put_off("starting the router", "the old one still finishes its streams"))
    elif not there.unit.alive:
        when = _when(there.unit, now, "restarting the router", waits)
        if when:
            actions.append(StartRouter(desired.router, when))
    elif there.revision != desired.router:
        actions.append(StartRouter(desired.router, "its settings changed"))


def _finish(instance: Instance, desired: DesiredService, now: float) -> Remove | None:
    """The removal of an instance that is through with its work, had all the time it gets, or never runs again."""
    if _spent(instance, now) and instance.absent is not None:
        pause_s = placing.pause_s(desired.uid, now) if instance.absent.reason == UNFINISHED else 0.0
        return Remove(instance.name, f"it will never run again: {instance.absent.reason}", pause_s)
    if instance.phase is Phase.DRAINED:
        return Remove(instance.name, "drained")
    if instance.phase is Phase.DRAINING and now - instance.since >= desired.drain_timeout_s:
        return Remove(instance.name, f"not drained within {desired.drain_timeout_s:g} s")
    return None


def _revive(instance: Instance, desired: DesiredService, now: float, actions: list[Action], waits: list[Waiting]) -> None:
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


def _when(unit: ObservedUnit, now: float, what: str, waits: list[Waiting]) -> str:
    """The reason for a restart that is due, else an empty string and a wait."""
    due = backoff.due(unit.crashes, unit.ended, now)
    ended = unit.exit or "it ended"
    if now >= due:
        return ended
    waits.append(put_off(what, f"{ended}, {unit.crashes} in a row", due))
    return ""


def _end(desired: DesiredService, observed: ObservedService, now: float) -> Plan:
    router = observed.router
    if router is not None:
        if not router.stopping:
            return Plan((StopRouter("the service ends"),))
        return Plan((), (put_off("the end", "the router finishes its streams"),))
    actions: list[Action] = []
    for instance in observed.instances:
        if instance.phase in (Phase.STARTING, Phase.CRASHED):
            actions.append(Remove(instance.name, "the service ends"))
        elif instance.ready:
            actions.append(Drain(instance.name, "the service ends"))
        else:
            gone = _finish(instance, desired, now)
            if gone:
                actions.append(gone)
    return Plan(tuple(actions))
