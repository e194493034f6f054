"""NUMA nodes of this machine, as sysfs describes them, and which of them a rank's memory and threads belong to.

    /sys/devices/system/node/online, has_memory         which nodes there are, and which have memory
    /sys/devices/system/node/nodeN/cpulist              their processors that are online
    /sys/bus/pci/devices/ADDRESS/numa_node              where a device is attached; -1: the firmware does not say
    /proc/self/status, Mems_allowed_list                nodes whose memory this process may have (cpuset)

A copy engine or a NIC that crosses from one node to another shares that way with everybody, and a thread that looks after
it waits longer for each word. On a machine with one node, or one that says nothing, there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

SYSTEM: Final = Path("/sys")
STATUS: Final = Path("/proc/self/status")
THREADS_LEAST: Final = 4
"""Processors of a node below which threads stay where they may run: they would wait for each other there."""
NUMBER_MAX: Final = 1 << 16
"""Above all numbers of nodes and processors that a kernel gives."""


class NumaNode(NamedTuple):
    """A node that is online. ``processors``: of those that are online, which are its own."""

    number: int
    processors: frozenset[int]
    memory: bool
    """It has some."""


class BoundNode(NamedTuple):
    """The node of a rank."""

    number: int
    memory: bool
    """This process may have memory there."""
    processors: frozenset[int]
    """That the rank's threads are to be bound to; empty: they stay where they may run."""
    why: str = ""
    """Why one of the two is not to be had; empty: nothing is lacking."""


def read_nodes(system: Path = SYSTEM) -> tuple[NumaNode, ...]:
    """All nodes that are online; empty where that cannot be read."""
    folder = system / "devices/system/node"
    try:
        with_memory = read_numbers((folder / "has_memory").read_text(encoding="ascii"))
        return tuple(NumaNode(number, read_numbers((folder / f"node{number}/cpulist").read_text(encoding="ascii")),
                              number in with_memory)
                     for number in sorted(read_numbers((folder / "online").read_text(encoding="ascii"))))
    except (OSError, ValueError):  # no sysfs, or none of this form: the machine does not say
        return ()


def read_device_node(address: str, system: Path = SYSTEM) -> int | None:
    """The node of a PCI device (``0000:3b:00.0``); None where that is not known."""
    try:
        number = int((system / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def read_memory_nodes(status: Path = STATUS) -> frozenset[int] | None:
    """Nodes whose memory this process may have; None where that is not known."""
    try:
        lines = status.read_text(encoding="ascii").splitlines()
        return next((read_numbers(line.split(":", 1)[1]) for line in lines if line.startswith("Mems_allowed_list:")), None)
    except (OSError, ValueError):
        return None


def read_numbers(listed: str) -> frozenset[int]:
    """Numbers as the kernel lists them: ``0-3,8``; nothing is the empty set.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in listed.strip().split(",") if listed.strip() else ():
        first, dash, last = part.partition("-")
        begin, end = int(first), int(last if dash else first)
        if not 0 <= begin <= end < NUMBER_MAX:
            raise ValueError(f"{part!r} is no range of numbers")
        found.update(range(begin, end + 1))
    return frozenset(found)


def choose_node(found: Sequence[NumaNode], device: int | None, usable: frozenset[int],
                memory_of: frozenset[int] | None) -> BoundNode | None:
    """The node of a rank; None where there is nothing to choose.

    Args:
        found: all nodes.
        device: the node of the rank's device; None: it has none, or that is not known. Then it is the node which all
            processors are of that the process may use, if there is one.
        usable: processors that the process may use.
        memory_of: nodes whose memory it may have; None: all.
    """
    with_processors = [node for node in found if node.processors]
    if len(with_processors) < 2:
        return None
    if device is None:
        node = next((one for one in with_processors if usable and usable <= one.processors), None)
    else:
        node = next((one for one in with_processors if one.number == device), None)
    if node is None:
        return None
    near, reasons = node.processors & usable, list[str]()
    few = near != usable and len(near) < min(THREADS_LEAST, len(node.processors))
    if few:
        reasons.append(f"this process may use {len(near)} of its processors, so threads stay where they are")
    memory = node.memory and (memory_of is None or node.number in memory_of)
    if not memory:
        reasons.append("this process may have none of its memory (cpuset.mems)" if node.memory else "it has no memory")
    return BoundNode(node.number, memory, frozenset() if few or near == usable else near, "; ".join(reasons))
