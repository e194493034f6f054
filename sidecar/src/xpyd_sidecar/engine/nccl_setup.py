"""How the blocks of this rank may travel: what is set, and what its GPU can do. Needs torch, and nothing of vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.bodies import Gpu
from xpyd_sidecar.kv.groups import group_bytes
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.nccl.decode import NcclGrouping
from xpyd_sidecar.transport.nccl.driver import TRAILER, fixed_bytes, load, padded
from xpyd_sidecar.transport.nccl.thread import FLIGHT, NcclLimits, NcclThread

PIECE_BYTES: Final = 8 << 20
RECEIVES: Final = 8
"""Slots to receive into: twice what is received at once, since a slot is held until its blocks are in their places."""
IDLE_S: Final = 60.0
HOST_ID: Final = "NCCL_HOSTID"
"""NCCL's own setting. Whoever sets it apart for two processes of one GPU, to test with one, wants them to form groups."""


def choose(options: KvOptions, device: torch.device, largest_frame: int,
           environ: Mapping[str, str] = os.environ) -> tuple[LinkOptions, NcclGrouping | None]:
    """What this rank offers its peers. ``largest_frame``: bytes; a block is no larger.

    Raises:
        ConfigError: transport is nccl, and NCCL cannot be used here.
    """
    folder = Path(options.shared_folder) if options.shared_folder else None
    if options.transport != "nccl":
        return LinkOptions(options.transport, folder), None
    driver, version, reason = load(device, ctas=options.nccl_ctas, piece=max(PIECE_BYTES, largest_frame),
                                   groups=options.nccl_groups, flight=FLIGHT)
    if driver is None:
        raise ConfigError(f"{FIELD}.transport: nccl cannot be used: {reason}")
    limits = NcclLimits(options.nccl_groups, 2 * options.peer_timeout_s, options.peer_timeout_s, IDLE_S)
    gpu = Gpu(driver.device.name, version, driver.piece)
    ways = LinkOptions(options.transport, folder, gpu, one_gpu=bool(environ.get(HOST_ID)))
    return ways, NcclGrouping(NcclThread(driver, limits), RECEIVES)


def most_bytes(options: KvOptions, piece: int = PIECE_BYTES) -> int:
    """GPU memory that the link takes at most: what it takes at the start, and its groups."""
    start = fixed_bytes(piece, options.nccl_groups, FLIGHT) + RECEIVES * (padded(piece) + TRAILER)
    return start + options.nccl_groups * group_bytes(options.nccl_ctas)

