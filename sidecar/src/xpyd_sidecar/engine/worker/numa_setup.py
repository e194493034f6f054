"""Which NUMA node memory and threads of a rank are bound to: its GPU's, else that of all its processors. Needs torch."""

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
    """Choose a NUMA node for the rank whose cache is on a device. The choice, or what is lacking for one, is logged,
    but not where there is one node alone.
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
    """The PCI address of a device, as sysfs writes it, from torch's properties of it; empty where torch has none."""
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""
