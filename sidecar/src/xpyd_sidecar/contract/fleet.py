"""``GET /fleet`` of a router: what it knows, as the operator and ``xpyd status`` read it.

Authenticated with the admin bearer token (``contract.keys.admin_token``).
"""

from __future__ import annotations

import msgspec

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Load


class FleetInstance(msgspec.Struct, frozen=True):
    """One instance as this router sees it."""

    instance: InstanceName
    role: Role
    epoch: int
    state: State
    incarnation: Incarnation
    fingerprint: Fingerprint
    http: tuple[HostPort, ...]
    control: tuple[HostPort, ...]
    model: str
    load: Load
    drained: bool
    in_flight: int
    """Legs of this router that are open on the instance."""
    beat_age_s: float
    """Seconds since the last beat."""
    suspended: str = ""
    """Not empty: not picked at present, and why."""


class Fleet(msgspec.Struct, frozen=True):
    """Everything a router knows."""

    service: ServiceName
    router: str
    uptime_s: float
    settled: bool
    """The router has listened for one beat interval plus the agents' re-resolve interval: the roster is complete."""
    instances: tuple[FleetInstance, ...]
    requests_total: int = 0
    requests_failed: int = 0
