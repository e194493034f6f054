"""What both ends of a session between two ranks have in common."""

from __future__ import annotations

from typing import Final, NamedTuple

from xpyd_sidecar.contract.ids import Incarnation, InstanceName

IDLE_S: Final = 120.0
"""A session that has nothing open is closed after so long; the next transfer begins a new one."""


class LocalRank(NamedTuple):
    """Who this rank is."""

    instance: InstanceName
    incarnation: Incarnation
    rank: int
    key: bytes
    """The service's ``data`` key."""
