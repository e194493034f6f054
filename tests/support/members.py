"""Members for tests of policies."""

from __future__ import annotations

from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.membership import Drafts, Load
from xpyd_sidecar.router.fleet.member import FleetMember


def member(name: str, role: Role = Role.DECODE, *, running: int = 0, waiting: int = 0, in_flight: int = 0,
           at_beat: int = 0, drafts: Drafts | None = None) -> FleetMember:
    """A member with a load."""
    made = FleetMember(InstanceName(name))
    made.role = role
    made.load = Load(running=running, waiting=waiting, drafts=drafts)
    made.in_flight, made.in_flight_at_beat = in_flight, at_beat
    return made
