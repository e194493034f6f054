"""Whether copies of this rank are read over NIXL: what is set, and what the host and the image can do.

``rdma`` is refused at start where it cannot be, with what is missing and what to do. ``auto`` looks for an RDMA device
first, and does without NIXL where there is none: nothing is loaded then. Nobody who asked for RDMA gets TCP instead.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.nixl import driver as nixl_driver
from xpyd_sidecar.transport.nixl.prefill import PIECE_BYTES, PIECES, NixlReading
from xpyd_sidecar.transport.nixl.session import ReadLimits
from xpyd_sidecar.transport.nixl.thread import NixlThread

logger = logging.getLogger(__name__)

Make = Callable[[int], Chunk]
DEVICES: Final = Path("/dev/infiniband")
STATUS: Final = Path("/proc/self/status")
IPC_LOCK: Final = 14
"""Number of the capability that lifts the limit (capabilities(7))."""


def prepare(options: KvOptions, ways: LinkOptions, largest_frame: int, keep: int, copies: Make,  # noqa: PLR0917  # what it is made of
            environ: Mapping[str, str] = os.environ, folder: Path = DEVICES
            ) -> tuple[LinkOptions, NixlReading | None, Make]:
    """What this rank offers its peers beside ``ways``; and what makes the memory for copies, ``keep`` bytes of it.

    Raises:
        ConfigError: transport is rdma, and NIXL cannot be used here.
    """
    if options.transport not in {"auto", "rdma"}:
        return ways, None, copies
    insists = options.transport == "rdma"
    piece = max(PIECE_BYTES, largest_frame)
    reason = _host(keep + ReadLimits().sessions * PIECES * piece, environ, folder, insists=insists)
    reading: NixlReading | None = None
    whole: Chunk | None = None
    if not reason:
        reading, whole, reason = _start(options, piece, keep, copies, environ)
    if reading is None or whole is None:
        if insists:
            raise ConfigError(f"{FIELD}.transport: rdma cannot be used: {reason}; mend that, or write kv.transport: auto "
                              "or tcp")
        logger.info("xpyd: no RDMA between hosts: %s", reason)
        return ways._replace(no_nixl=reason), None, copies
    logger.info("xpyd: %d MiB of copies can be read over NIXL %s", keep >> 20, reading.hub.version)
    held = whole  # for as long as peers may read it, whoever drops the store
    return ways._replace(nixl=reading.ours()), reading, lambda _: held


def _host(locked: int, environ: Mapping[str, str], folder: Path, *, insists: bool) -> str:
    """Why this host cannot do it; empty: nothing speaks against it."""
    chosen = insists and bool(environ.get(nixl_driver.CHOICE))
    missing = no_device(folder)
    if missing:
        more = f"; give the engine one (resources: rdma/…), or choose what to take instead in {nixl_driver.CHOICE}"
        return "" if chosen else missing + (more if insists else "")
    return unlocked(locked)


def _start(options: KvOptions, piece: int, keep: int, copies: Make,
           environ: Mapping[str, str]) -> tuple[NixlReading | None, Chunk | None, str]:
    driver, reason = nixl_driver.load(environ)
    if driver is None:
        return None, None, f"{reason} (add it to engine.image)"
    timeout_s = options.peer_timeout_s
    limits = ReadLimits(open_s=timeout_s / 2, silence_s=timeout_s)
    reading = NixlReading(NixlThread(driver, limits), piece, timeout_s=timeout_s)
    try:
        whole = copies(keep)
        reading.register(whole.view)
    except Exception as error:  # noqa: BLE001  # NIXL's own have no common root
        reading.hub.stop()
        return None, None, f"NIXL {driver.version}: {type(error).__name__}: {error}"
    return reading, whole, ""


def no_device(folder: Path = DEVICES) -> str:
    """Why this process sees no RDMA device (a device plugin puts some into a pod, or the host has them); empty: it does."""
    return "" if any(folder.glob("uverbs*")) else f"no RDMA device is here (no {folder}/uverbs*)"


def unlocked(needed: int, status: Path = STATUS, limit: int | None = None) -> str:
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
