"""What was read, as plain values: of a host, of a service by its router. Everything that is found follows from this."""

from __future__ import annotations

import msgspec

from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Role, State
from xpyd_sidecar.contract.sample import Sample


class HostReading(msgspec.Struct, frozen=True):
    """One host, as the process that looks sees it: its own limits and its own container's. Sizes in bytes."""

    files: int = 1 << 20
    """Files that a process may have open."""
    memlock: int = -1
    """Memory that a process may lock; -1: as much as there is."""
    memory: int = 0
    """0: not known; so for the next three."""
    memory_free: int = 0
    shm: int = 0
    """Size of /dev/shm."""
    shm_free: int = 0
    gpus: int = 0
    rdma: tuple[str, ...] = ()
    """RDMA devices whose port is up."""
    nixl: bool = True
    """Whether this Python has NIXL."""
    clock: str = ""
    """Why the clock is not kept right; empty where it is, or nobody knows."""


class ServiceReading(msgspec.Struct, frozen=True):
    """One service, by its router."""

    fleet: Fleet
    sample: Sample | None = None
    """None: the router is of a version that keeps none."""
    prefill_wanted: bool = True
    """Whether the document asks for prefill instances; True where nobody knows."""

    def instances_of(self, role: Role) -> tuple[FleetInstance, ...]:
        """The instances of a role, in whatever state."""
        return tuple(one for one in self.fleet.instances if one.role is role)

    def serving(self, role: Role) -> tuple[FleetInstance, ...]:
        """Those that routers pick."""
        there = self.instances_of(role)
        return tuple(one for one in there if one.state is State.READY and not one.suspended and not one.ejected)


class Examination(msgspec.Struct, frozen=True):
    """All that was read; None: it was not looked at."""

    host: HostReading | None = None
    service: ServiceReading | None = None
