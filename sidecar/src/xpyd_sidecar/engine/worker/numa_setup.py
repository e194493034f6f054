"""Chooses the NUMA node that a rank's memory and threads for KV are bound to: its GPU's, or, where that is not known, the
one that has all processors which the process may use. Needs torch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from xpyd_sidecar.memory import numa_nodes
from xpyd_sidecar.memory.node_binding import UNBOUND, NodeBinding

logger = logging.getLogger(__name__)


def node_binding(device: torch.device, rank: int, system: Path = numa_nodes.SYSTEM) -> NodeBinding:
    """Choose the NUMA node of the rank whose KV cache is on ``device``; ``UNBOUND`` where fewer than two nodes have
    processors, or none can be chosen. The choice is logged, and so is a GPU without one on a machine with several nodes.
    ``system``: where sysfs is mounted.
    """
    found = numa_nodes.read_nodes(system)
    usable = frozenset(os.sched_getaffinity(0))
    if sum(bool(node.processors) for node in found) < 2:
        return UNBOUND
    address = pci_address(torch.cuda.get_device_properties(device)) if device.type == "cuda" else ""
    at = numa_nodes.read_device_node(address, system) if address else None
    node = numa_nodes.choose_node(found, at, usable, numa_nodes.read_memory_nodes())
    if node is None:
        if device.type == "cuda":
            logger.info("xpyd: rank %d: memory and threads for KV are bound to no NUMA node: the system names none with "
                        "processors for GPU %s", rank, address or device)
        return UNBOUND
    of = f"of GPU {address}" if at is not None else "of this process's processors"
    logger.info("xpyd: rank %d: memory and threads for KV are bound to NUMA node %d, %s%s", rank, node.number, of,
                f": {node.why}" if node.why else "")
    return NodeBinding(node)


def pci_address(properties: Any) -> str:
    """The PCI address of a GPU as sysfs writes it (``0000:3b:00.0``), from torch's properties of the device; empty where
    this torch does not tell it.
    """
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""
