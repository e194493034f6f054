"""Whether the store of this rank is read over NIXL: what is set, and what the host and the image can do.

``rdma`` is refused at start where it cannot be, with what is missing and what to do. ``auto`` looks for an RDMA device
first, and does without NIXL where there is none, and where KV is encrypted, which NIXL does not do: nothing is loaded then.
Nobody who asked for RDMA gets TCP instead.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from xpyd_sidecar.contract.launch import NIXL_SLOT_BYTES, KvOptions
from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.extents import round_up
from xpyd_sidecar.kv.reads import READ_BYTES, ReadLimits
from xpyd_sidecar.kv.session_bodies import NO_RDMA, LinkName
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.allocation import Allocation
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.session.link_trial import OtherLink
from xpyd_sidecar.transport.links import LinkServer, NoLink
from xpyd_sidecar.transport.nixl import driver as nixl_driver
from xpyd_sidecar.transport.nixl.driver import LandingMemory
from xpyd_sidecar.transport.nixl.fetch import NixlFetcher
from xpyd_sidecar.transport.nixl.serve import NixlServer
from xpyd_sidecar.transport.nixl.thread import NixlThread

logger = logging.getLogger(__name__)

Make = Callable[[int], Chunk]
DEVICES: Final = Path("/dev/infiniband")
STATUS: Final = Path("/proc/self/status")
IPC_LOCK: Final = 14
"""Number of the capability that lifts the limit (capabilities(7))."""
ORDERS: Final = 4
"""Orders that there are slots for, where one is large."""


class NixlMemorySizes(NamedTuple):
    """Bytes of one rank that an RDMA device reads or fills."""

    store: int
    order: int
    """The most that is fetched at once."""
    ring: int
    """Memory of the rank's own that orders may name ranges of; 0: it has none."""

    @property
    def slots(self) -> int:
        """For orders that have no such memory."""
        return max(NIXL_SLOT_BYTES, ORDERS * round_up(self.order, READ_BYTES))


class NixlSetup(NamedTuple):
    """What a rank has of NIXL."""

    hub: NixlThread | None
    """The thread that owns its agents; None: there is no NIXL."""
    servers: Mapping[str, LinkServer]
    """Prefill's side of the link, or why there is none; empty: nobody wants it."""
    store: Make
    """Makes the memory of the store."""
    insists: bool = False
    """There is no other link."""
    lacks: str = ""
    """Why there is no NIXL although an RDMA device is here, in words; empty: nothing is lacking, or there is none."""

    @property
    def version(self) -> str:
        """The version of NIXL; empty: there is none."""
        return self.hub.version if self.hub is not None else ""

    def link_sides(self, ring: Allocation | None) -> dict[LinkName, OtherLink]:
        """Decode's side of the link. ``ring``: memory that orders name ranges of; made now, as agents have to know it."""
        if self.hub is None:
            return {}
        landing = None
        if ring is not None:
            ring.prepare()
            memory = ring.chunk_at(0, ring.size).view
            landing = LandingMemory(address_of(memory), len(memory))
        return {"nixl": NixlFetcher(self.hub, insists=self.insists, ring=landing)}


def prepare(options: KvOptions, sizes: NixlMemorySizes, store: Make, *, held: Callable[[], bool],
            environ: Mapping[str, str] = os.environ, folder: Path = DEVICES) -> NixlSetup:
    """What this rank has of NIXL. ``store``: makes the memory of its store; ``held``: whether there are copies in it.

    Raises:
        ConfigError: transport is rdma, and NIXL cannot be used here.
    """
    if options.transport not in {"auto", "rdma"} or options.encryption == "enabled":
        return NixlSetup(None, {}, store)
    insists = options.transport == "rdma"
    reason = _host(sizes.store + sizes.slots + sizes.ring, environ, folder, insists=insists)
    server: NixlServer | None = None
    if not reason:
        server, reason = _start(options, sizes, store, environ)
    if server is None:
        if insists:
            raise ConfigError(f"{FIELD}.transport: rdma cannot be used: {reason}; mend that, or write kv.transport: auto "
                              "or tcp")
        lacks = "" if no_device(folder) else f"an RDMA device is here and is not used: {reason}"
        logger.log(logging.WARNING if lacks else logging.INFO, "xpyd: no RDMA between hosts: %s", lacks or reason)
        return NixlSetup(None, {"nixl": NoLink(f"nixl: {reason} at prefill")}, store, lacks=lacks)
    server.hub.held = held
    logger.info("xpyd: %d MiB of copies can be read over NIXL %s", sizes.store >> 20, server.hub.version)
    memory = server.memory
    return NixlSetup(server.hub, {"nixl": server}, lambda _: memory, insists)


def _host(locked: int, environ: Mapping[str, str], folder: Path, *, insists: bool) -> str:
    """Why this host cannot do it; empty: nothing speaks against it."""
    chosen = insists and bool(environ.get(nixl_driver.CHOICE))
    missing = no_device(folder)
    if missing:
        more = f"; give the engine one (resources: rdma/…), or choose what to take instead in {nixl_driver.CHOICE}"
        return "" if chosen else missing + (more if insists else "")
    return lock_refusal(locked)


def _start(options: KvOptions, sizes: NixlMemorySizes, store: Make,
           environ: Mapping[str, str]) -> tuple[NixlServer | None, str]:
    driver, reason = nixl_driver.load(environ)
    if driver is None:
        return None, f"{reason} (add it to engine.image)"
    timeout_s = options.peer_timeout_s
    hub = NixlThread(driver, ReadLimits(open_s=timeout_s / 2, silence_s=timeout_s), sizes.slots)
    try:
        return NixlServer(hub, store(sizes.store), timeout_s=timeout_s), ""
    except Exception as error:  # noqa: BLE001  # NIXL's own have no common root
        hub.stop()
        return None, f"NIXL {driver.version}: {type(error).__name__}: {error}"


def no_device(folder: Path = DEVICES) -> str:
    """Why this process sees no RDMA device (a device plugin puts some into a pod, or the host has them); empty: it does."""
    return "" if any(folder.glob("uverbs*")) else f"{NO_RDMA} (no {folder}/uverbs*)"


def lock_refusal(needed: int, status: Path = STATUS, limit: int | None = None) -> str:
    """Why ``needed`` bytes cannot be locked, which an RDMA device wants of memory that it reads; empty: they can.

    ``limit``: of memory that may be locked, in bytes; None: this process's own.
    """
    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if allowed in {resource.RLIM_INFINITY, -1} or needed <= allowed or _unlimited(status):
        return ""
    return (f"{-(-needed >> 20)} MiB must be locked, and the limit (memlock) is {allowed >> 20} MiB: raise it for the "
            "container runtime, or add the capability IPC_LOCK")


def _unlimited(status: Path) -> bool:
    try:
        lines = status.read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    held = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(held, 16) >> IPC_LOCK & 1)
