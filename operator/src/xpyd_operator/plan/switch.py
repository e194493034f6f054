"""One role has an instance too many and the other one too few: which instances change their role, so that nothing ends here
and starts cold there.

                    surplus of mine                     deficit of other
    switched now    min( ready - wanted,                wanted - (fresh - young),         room of other )

``young`` are instances of the other role that began to start within the switch window, or wait for a place and did not
begin at all: one that switches serves at once, and they are surplus then. ``room`` keeps the other role within wanted +
surge.

Not while a revision is replaced (what is old goes anyway), not without a router that tells the load, and not where prefill
and decode differ in more than the role (``DesiredService.no_switch``). Who goes is chosen as for a drain. Who stays: the
last of a fingerprint that the other role still has (``balance``), and the last router that clients reach (``routers``).

A surplus that the other role does not want yet waits for the switch window, where the counts are set one by one. While an
instance switches nothing that serves is drained; one that has not switched in time is drained and replaced.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from xpyd_operator.plan import balance, routers
from xpyd_operator.plan.actions import Switch
from xpyd_operator.plan.canary import RoleView
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.drain import victims
from xpyd_operator.plan.observed import Instance, ObservedService, Phase
from xpyd_sidecar.contract.ids import Role

TAKE_S = 180.0
"""Within this an instance has its new role, also if its pod's volume alone tells it, which takes up to two minutes."""


def switches(
    desired: DesiredService, observed: ObservedService, views: tuple[RoleView, RoleView], now: float
) -> tuple[list[Switch], str]:
    """Who takes the other role now; and the router that must stay for a moment, empty where none must."""
    alike = desired.switches and desired.prefill.revision == desired.decode.revision
    if not alike or not observed.fleet_known or any(view.stale for view in views):
        return [], ""
    for index, (mine, other) in enumerate((views, views[::-1])):
        able = [one for one in victims(mine.fresh) if one.ready and not one.switching]
        count = min(mine.ready - mine.wanted_count, _deficit(desired, other, now), _room(other))
        chosen = able[: max(0, count)]
        if not chosen:
            continue
        last = ""
        if mine.role is Role.DECODE and desired.max_sidecars:
            last = routers.last_router(observed, {instance.name for instance in chosen})
        chosen = [instance for instance in chosen if instance.name != last]
        leaving: tuple[list[Instance], list[Instance]] = ([], chosen) if index else (chosen, [])
        stay = balance.reasons_to_keep(*views, leaving)
        theirs = f"{other.role} {other.fresh_ready} of {other.wanted_count}"
        why = f"{mine.role} has {mine.ready} of {mine.wanted_count}, {theirs}"
        return [Switch(one.name, other.role, one.epoch + 1, why) for one in chosen if one.name not in stay], last
    return [], ""


def apply_switches(instances: tuple[Instance, ...], made: Collection[Switch]) -> tuple[Instance, ...]:
    """The instances as they will be once these switches are done."""
    by_name = {switch.instance: switch for switch in made}
    return tuple(
        msgspec.structs.replace(
            instance, role=by_name[instance.name].role, epoch=by_name[instance.name].epoch, switching=True,
            roster=False, router=False,
        ) if instance.name in by_name else instance
        for instance in instances
    )


def overdue(instance: Instance, now: float, *, fleet_known: bool) -> bool:
    """It should have its new role by now (or in the future: the clock was set back)."""
    waits = instance.switching and not instance.leaving and fleet_known
    return waits and not 0 <= now - instance.assigned < TAKE_S


def waits(desired: DesiredService, views: tuple[RoleView, RoleView], mine: Role, now: float) -> str:
    """Why what ``mine`` has too many is not drained yet; empty where nothing speaks against it."""
    busy = [one.name for view in views for one in view.serving if one.switching]
    if busy:
        return f"{', '.join(busy[:3])} takes another role at present"
    if any(view.stale for view in views) or not desired.switches:
        return ""
    if 0 <= now - desired.counts_since < desired.switch_window_s:
        other = Role.DECODE if mine is Role.PREFILL else Role.PREFILL
        return f"{other} may want it within {desired.switch_window_s:g} s (rollout.switchWindow)"
    return ""


def _deficit(desired: DesiredService, other: RoleView, now: float) -> int:
    young = sum(1 for one in other.fresh if _young(one, now, desired.switch_window_s))
    return other.wanted_count - (len(other.fresh) - young)


def _young(instance: Instance, now: float, window_s: float) -> bool:
    if instance.placeless:
        return True
    return instance.phase is Phase.STARTING and not instance.was_ready and 0 <= now - instance.since < window_s


def _room(other: RoleView) -> int:
    return other.wanted_count + other.target.max_surge - len(other.everything)
