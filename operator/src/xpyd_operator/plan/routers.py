"""Which decode instances route, where routers run beside engines.

Laws
    1. Up to ``max_sidecars`` decode instances that stay have ``roster``: agents beat to them. Those that could serve
       clients soonest: ready before not ready, then routing, settled, of the wanted revision, on the roster; low ordinals
       among equals. So a router that works is never given up for one that does not.
    2. One of them gets ``router`` once its own router is settled, and keeps it.
    3. What leaves keeps what it has: its streams end through its own router. Prefill instances have neither.
    4. The last settled router that clients reach is not drained while another instance could take over. So with
       ``max_sidecars`` 1 there are two while one hands over to the other.
"""

from __future__ import annotations

from collections.abc import Collection

from xpyd_operator.plan.actions import Label
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import Instance, ObservedService
from xpyd_sidecar.contract.ids import Role


def label(desired: DesiredService, observed: ObservedService, going: Collection[str] = (), last: str = "") -> list[Label]:
    """What to change; ``going`` leave with this step, ``last`` is who ``last_router`` holds."""
    if desired.max_sidecars < 1:
        return []
    staying = [instance for instance in observed.instances if not instance.leaving and instance.name not in going]
    decode = [one for one in staying if one.role is Role.DECODE and one.name != last]
    decode.sort(key=lambda one: _order(one, one.revision != desired.decode.revision))
    slots = max(1, desired.max_sidecars - bool(last))
    chosen = {instance.name for instance in decode[:slots]} | {last}
    labels = []
    for instance in staying:
        roster = instance.name in chosen
        router = roster and (instance.router or (instance.roster and instance.settled))
        if (roster, router) != (instance.roster, instance.router):
            labels.append(Label(instance.name, roster, router))
    return labels


def last_router(observed: ObservedService, going: Collection[str]) -> str:
    """Who of those that would be drained must stay, since clients would reach no router; empty where nobody must."""
    routing = [instance for instance in observed.instances if _routes(instance)]
    if not routing or any(instance.name not in going for instance in routing):
        return ""
    heirs = (one for one in observed.instances if one.role is Role.DECODE and one.ready and one.name not in going)
    if not any(heirs):
        return ""
    return max(routing, key=lambda instance: (instance.load, -instance.ordinal)).name


def _routes(instance: Instance) -> bool:
    """Clients reach its router, and it knows the roster."""
    return instance.role is Role.DECODE and instance.ready and instance.router and instance.settled


def _order(instance: Instance, stale: bool) -> tuple[bool, bool, bool, bool, bool, int]:
    order = (not instance.ready, not instance.router, not instance.settled, stale, not instance.roster)
    return (*order, instance.ordinal)
