"""Rosters for unit tests, and what is read of their instructions."""

from __future__ import annotations

from typing import Any

from beats import SERVICE

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.router.fleet import roster as ro
from xpyd_sidecar.router.fleet.member import InstanceLost, ProbeInstance
from xpyd_sidecar.router.fleet.roster import Roster

D0 = InstanceName("d0")
I0 = Incarnation("i-d0")


def make(**options: Any) -> Roster:
    return Roster(SERVICE, **({"started": 0.0, "settle_s": 8.0, "missed_beats": 3} | options))


def names(roster: Roster, role: Role = Role.DECODE) -> list[str]:
    return [member.name for member in roster.pickable(role)]


def probes(out: list[ro.Instruction]) -> list[ProbeInstance]:
    return [i for i in out if isinstance(i, ProbeInstance)]


def losts(out: list[ro.Instruction]) -> list[str]:
    return [i.incarnation for i in out if isinstance(i, InstanceLost)]
