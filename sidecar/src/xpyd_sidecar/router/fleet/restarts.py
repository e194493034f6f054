"""Which engine that stands still may be restarted now. Pure; every router decides alike, from what beats say.

Laws
    1. Of a role one at a time: who does not serve any more for that, else who has begun, else who wants it; of several the
       first by name.
    2. None while most of its role stands still, which has a common cause that a restart would not end: a file system, a
       network, a driver. After ``COMMON_S`` of it one at a time all the same, since nothing else would end it then.
    3. An only instance of its role is nobody's peer: it may at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xpyd_sidecar.contract.ids import State
from xpyd_sidecar.contract.liveness import RestartWish
from xpyd_sidecar.router.fleet.member import FleetMember

COMMON_S: Final = 600.0


def holds(now: float, member: FleetMember, members: Sequence[FleetMember]) -> bool:
    """Whether an instance that is to be restarted must wait. ``members``: of all roles."""
    peers = [one for one in members if one.role is member.role]
    still = [one for one in peers if one.restart]
    if member is not min(still, key=lambda one: (one.restart is not RestartWish.BEGUN, one.state is State.READY, one.name)):
        return True
    serving = sum(one.state is State.READY and not one.restart for one in peers)
    return len(still) > 1 and len(still) > serving and now - member.still_since < COMMON_S


def is_stalled(member: FleetMember) -> bool:
    """Whether requests that this router has sent there wait for a core that does not step; of one that is ejected for that,
    which has no requests any more, until a canary is answered.
    """
    return bool(member.stalled_s or (member.ejected and member.hung))
