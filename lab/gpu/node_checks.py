"""Where a rank's memory for copies is, and where its threads run, on a machine with several NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from lab.gpu.findings import Figures, require
from lab.gpu.link_ranks import Rank
from lab.gpu.page_nodes import page_nodes
from xpyd_sidecar.memory import numa_nodes
from xpyd_sidecar.memory.numa_nodes import BoundNode
from xpyd_sidecar.memory.registration import host_memory

SIZE: Final = 64 << 20
BLOCK: Final = 16 << 10
SHARE: Final = 0.99
"""Of the pages that must be at the node: a node that is full gives the rest to others."""


def nodes(device: torch.device) -> Figures:
    """The store is at the GPU's node, what ring and lookup buffer are made of, too, and the rank's threads run there.

    On a machine with one node everything is there, and nothing is bound.
    """
    rank = Rank(device, BLOCK, "shm", SIZE)
    bound = rank.binding.node
    lease = rank.plane.store.lease(SIZE // 2)
    assert lease is not None
    memory = {"store": lease.chunk, "ring": host_memory(SIZE, pinned=device.type == "cuda", binding=rank.binding)}
    figures: Figures = {"nodes": len(numa_nodes.read_nodes()), "node": bound.number if bound else "none bound"}
    faults = list[str]()
    for name, chunk in memory.items():
        chunk.tensor.fill_(1)
        found = page_nodes(chunk.view)
        figures |= {f"{name}_mib": {node: size >> 20 for node, size in sorted(found.sizes.items())},
                    f"{name}_policy": ", ".join(sorted(found.policies))}
        faults += misplaced(name, found.sizes, len(chunk.view), bound)
    running = dict(threads(rank))
    figures["threads"] = {name: listed(processors) for name, processors in running.items()}
    faults += astray(running, bound)
    for one in rank.plane.threads:
        one.stop()
    return require(figures, *faults)


def threads(rank: Rank) -> Iterator[tuple[str, set[int]]]:
    """Those of a rank that run, each with the processors that it may run on."""
    for one in rank.plane.threads:
        if one.thread.native_id is not None and one.thread.is_alive():
            yield one.thread.name, os.sched_getaffinity(one.thread.native_id)


def misplaced(name: str, sizes: Mapping[int, int], size: int, bound: BoundNode | None) -> Iterator[str]:
    """What is wrong with memory of so many bytes whose pages are there."""
    if sum(sizes.values()) < SHARE * size:
        yield f"{name}: of {size} bytes {sum(sizes.values())} are anywhere"
    elif bound is not None and bound.memory and sizes.get(bound.number, 0) < SHARE * size:
        yield f"{name}: of {size} bytes {sizes.get(bound.number, 0)} are at node {bound.number}"


def astray(running: Mapping[str, set[int]], bound: BoundNode | None) -> Iterator[str]:
    """Threads that may run on other processors than those of the node."""
    if not running:
        yield "no thread of the rank runs"
    for name, processors in running.items():
        if bound is not None and bound.processors and not processors <= bound.processors:
            yield f"{name} may run on {listed(processors)}, not only on {listed(bound.processors)}"


def listed(numbers: set[int] | frozenset[int]) -> str:
    """As the kernel writes them: 0-3,8."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, part)) for part in found)
