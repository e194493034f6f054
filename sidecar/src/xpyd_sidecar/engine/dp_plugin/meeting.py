"""How the ranks meet, through the store of vLLM's data-parallel group, before any of them runs a step.

    every rank    config/<rank> := hash of all that must be equal          waits for those of the others, compares
    every rank    host/<rank>                                              only if the ranks are on several hosts
    rank 0        place := {epoch, rpc address or path of the lines, handle of the queue}
    every rank    ready/<rank>                                             waits for the others

A rank without the rules, or with other ones, would leave the others in a collective for ever. So nobody starts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from xpyd_sidecar.contract import keys, launch
from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.dp import frames
from xpyd_sidecar.dp.rank import Rank
from xpyd_sidecar.engine.dp_plugin import rpc, shm, spread
from xpyd_sidecar.engine.dp_plugin.links import StepLink
from xpyd_sidecar.engine.dp_plugin.settings import StepSyncSettings
from xpyd_sidecar.engine.dp_plugin.steps import Steps
from xpyd_sidecar.errors import ConfigError

logger = logging.getLogger(__name__)

MEET_S: Final = 120.0
PREFIX: Final = "xpyd/dp"


class Site(NamedTuple):
    """Where a rank is."""

    store: Any
    """torch's: ``set``, ``get`` and ``wait``, shared by all ranks."""
    rank: int
    size: int
    host: str
    """Address of rank 0's host, at which vLLM's own store listens."""
    one_host: bool
    versions: tuple[str, ...]
    """Of vLLM, and hashes of the sources that the rules were written for."""
    here: str = ""
    """What tells this rank's host, and network, from others."""


class MeetingPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What rank 0 tells."""

    epoch: int
    address: HostPort = HostPort("")
    path: str = ""
    handle: bytes = b""


def mode_of(settings: StepSyncSettings, *, one_host: bool) -> Literal["rpc", "shm"]:
    """How the ranks speak.

    Raises:
        ConfigError: shm is asked for, and cannot work.
    """
    if settings.mode == "rpc" or (settings.mode == "auto" and not (one_host and shm.usable())):
        return "rpc"
    if not one_host:
        raise ConfigError("XPYD_DP_SYNC=shm: the DP ranks are on several hosts; write rpc or auto")
    if not shm.usable():
        raise ConfigError("XPYD_DP_SYNC=shm: works on x86-64 alone; write rpc or auto")
    return "shm"


def meet(site: Site, settings: StepSyncSettings, make: Any) -> Steps:
    """Meet the other ranks. ``make(rank)`` gives the ``Steps`` of a rank's first state.

    Raises:
        ConfigError: a rank does not come in time, or has other settings; names it.
    """
    mode = mode_of(settings, one_host=site.one_host)
    key = None if site.one_host else service_key()
    _same_everywhere(site, settings, mode)
    if key is not None:
        site.store.set(f"{PREFIX}/host/{site.rank}", site.here.encode())
    if site.rank == 0:
        steps = _lead(site, settings, mode, make, key)
    else:
        place = msgspec.json.decode(_wait(site, "place", 0), type=MeetingPlace)
        steps = make(Rank(place.epoch, site.rank, settings.policy))
        steps.use(_link(site, settings.timeout_s, place, steps, (None, key)))
    site.store.set(f"{PREFIX}/ready/{site.rank}", b"1")
    for rank in range(site.size):
        _wait(site, f"ready/{rank}", rank)
    steps.link.start()
    state = steps.state
    logger.info("xpyd: DP rank %d of %d runs in step by %s, look-ahead %s, epoch %x", site.rank, site.size,
                mode if site.one_host else f"{mode} over several hosts",
                "adaptive" if settings.policy.fixed is None else settings.policy.fixed, state.epoch)
    return steps


def service_key() -> ServiceKey:
    """The service's key: what ranks say to each other over a network is under it.

    Raises:
        ConfigError: there is none.
    """
    named = os.environ.get(launch.ENV_KEY_FILE)
    if not named:
        raise ConfigError(f"{launch.ENV_KEY_FILE} is not set: DP ranks on several hosts speak under the service's key; "
                          "set it, or XPYD_DP_SYNC=disabled")
    try:
        return keys.read(Path(named))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{launch.ENV_KEY_FILE}: {error}") from None


def _lead(site: Site, settings: StepSyncSettings, mode: str, make: Any, key: ServiceKey | None) -> Steps:
    epoch = secrets.randbits(60)
    steps: Steps = make(Rank(epoch, 0, settings.policy))
    if mode == "rpc":
        coordinator: rpc.CoordinatorThread
        if key is None:
            coordinator = rpc.CoordinatorThread(steps, epoch, site.size, site.host, timeout_s=settings.timeout_s)
            place = MeetingPlace(epoch, address=coordinator.address)
        else:
            hosts = [_wait(site, f"host/{rank}", rank).decode() for rank in range(site.size)]
            coordinator = spread.SpreadCoordinator(steps, epoch, hosts, site.host, timeout_s=settings.timeout_s,
                                                       key=key)
            place = MeetingPlace(epoch, address=coordinator.address, handle=coordinator.handle)
        steps.use(_link(site, settings.timeout_s, place, steps, (coordinator, key)))
        site.store.set(f"{PREFIX}/place", msgspec.json.encode(place))
        return steps
    path = shm.make(site.size)
    try:
        place = MeetingPlace(epoch, path=str(path))
        steps.use(_link(site, settings.timeout_s, place, steps, (None, None)))
        site.store.set(f"{PREFIX}/place", msgspec.json.encode(place))
        for rank in range(1, site.size):
            _wait(site, f"ready/{rank}", rank)
    finally:
        path.unlink()
    return steps


def _link(site: Site, timeout_s: float, place: MeetingPlace, steps: Steps,
          leads: tuple[rpc.CoordinatorThread | None, ServiceKey | None]) -> StepLink:
    coordinator, key = leads
    if place.path:
        return shm.ShmLink(steps, site.rank, site.size, place.epoch, path=Path(place.path), timeout_s=timeout_s)
    if key is None:
        return rpc.RpcLink(steps, site.rank, place.address, coordinator, timeout_s=timeout_s)
    assert coordinator is None or isinstance(coordinator, spread.SpreadCoordinator)
    return spread.SpreadLink(steps, site.rank, place.address, coordinator, timeout_s=timeout_s, handle=place.handle,
                             key=key)


def _same_everywhere(site: Site, settings: StepSyncSettings, mode: str) -> None:
    policy = settings.policy.fixed
    equal = [str(frames.VERSION), mode, str(policy), f"{settings.timeout_s:g}", str(site.size), *site.versions]
    ours = hashlib.sha256("\n".join(equal).encode()).hexdigest().encode()
    site.store.set(f"{PREFIX}/config/{site.rank}", ours)
    for rank in range(site.size):
        if _wait(site, f"config/{rank}", rank) != ours:
            raise ConfigError(f"XPYD_DP_*: DP rank {rank} runs with other settings, another vLLM or another xpyd than rank "
                              f"{site.rank} ({', '.join(equal[:5])}); give all ranks the same")


def _wait(site: Site, key: str, rank: int) -> bytes:
    try:
        site.store.wait([f"{PREFIX}/{key}"], timedelta(seconds=MEET_S))
    except RuntimeError:  # torch's DistStoreError
        raise ConfigError(f"XPYD_DP_SYNC: DP rank {rank} has not come to {key} within {MEET_S:g} s; is XPYD_DP_SYNC set "
                          "there, and the plugin xpyd_dp on its path?") from None
    value: bytes = site.store.get(f"{PREFIX}/{key}")
    return value
