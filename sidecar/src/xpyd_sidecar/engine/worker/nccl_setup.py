"""What this rank has for the link NCCL: its GPU, and the thread that owns all groups. Needs torch, and nothing of vLLM."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import torch

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.extents import round_up
from xpyd_sidecar.kv.groups import group_bytes
from xpyd_sidecar.kv.manifests import ALIGN
from xpyd_sidecar.kv.session_bodies import Gpu
from xpyd_sidecar.transport.links import RingMemory
from xpyd_sidecar.transport.nccl.driver import fixed_bytes, load
from xpyd_sidecar.transport.nccl.fetch import MakeTcp, NcclFetching
from xpyd_sidecar.transport.nccl.serve import NcclServer
from xpyd_sidecar.transport.nccl.thread import FLIGHT, NcclLimits, NcclThread
from xpyd_sidecar.transport.tcp.serve import TcpServer

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 8 << 20
"""Of one message, and of a slot to send from, unless a run of blocks has more."""
IDLE_S: Final = 60.0
HOST_ID: Final = "NCCL_HOSTID"
"""NCCL's own setting. Whoever sets it apart for two processes of one GPU, to test with one, wants them to form groups."""


class NcclLinks(NamedTuple):
    """The NCCL links of one rank."""

    hub: NcclThread
    gpu: Gpu
    one_gpu: bool
    """Peers may be on the same GPU."""

    def server(self, tcp: Callable[[], TcpServer]) -> NcclServer:
        """Prefill's side. ``tcp``: what serves the same copies over TCP."""
        return NcclServer(self.hub, self.gpu, tcp, one_gpu=self.one_gpu)

    def fetching(self, ring: RingMemory, tcp: MakeTcp) -> NcclFetching:
        """Decode's side. ``ring``: what fetches go into; ``tcp``: makes what they go over where no group takes them."""
        return NcclFetching(self.hub, self.gpu, ring, tcp)


def nccl_links(options: KvOptions, device: torch.device, arrays: Iterable[ArrayLayout],
               environ: Mapping[str, str] = os.environ) -> NcclLinks | None:
    """What this rank has for groups with peers; None: transport is another one, and nothing of NCCL is loaded.

    ``arrays``: of its cache.

    Raises:
        ConfigError: transport is nccl, and NCCL cannot be used here.
    """
    if options.transport != "nccl":
        return None
    run = max((one.heads * one.head_bytes * one.run for one in arrays), default=0)
    driver, version, reason = load(device, ctas=options.nccl_ctas, piece=max(PIECE_BYTES, round_up(run, ALIGN)),
                                   groups=options.nccl_groups, flight=FLIGHT)
    if driver is None:
        raise ConfigError(f"{FIELD}.transport: nccl cannot be used: {reason}")
    logger.info("xpyd: %.1f MiB of %s are taken to send from over NCCL; a group takes up to %.1f MiB",
                fixed_bytes(driver.piece, FLIGHT) / 2**20, device, group_bytes(options.nccl_ctas) / 2**20)
    limits = NcclLimits(options.nccl_groups, 2 * options.peer_timeout_s, options.peer_timeout_s, IDLE_S)
    gpu = Gpu(driver.device.name, version, driver.piece)
    return NcclLinks(NcclThread(driver, limits), gpu, bool(environ.get(HOST_ID)))


def most_bytes(options: KvOptions, piece: int = PIECE_BYTES) -> int:
    """GPU memory that the link takes at most: what it takes at the start, and its groups."""
    return fixed_bytes(piece, FLIGHT) + options.nccl_groups * group_bytes(options.nccl_ctas)
