"""What a router's fleet says of instances."""

from __future__ import annotations

from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, State


def serving(fleet: Fleet) -> dict[InstanceName, Incarnation]:
    """The instances that the router would send requests to, and which life of each.

    Who was suspended says that it is ready before the router's probe has found so.
    """
    return {one.instance: one.incarnation for one in fleet.instances if one.state is State.READY and not one.suspended}
