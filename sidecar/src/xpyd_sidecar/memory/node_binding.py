"""Memory and threads of one rank at the NUMA node of its device.

    memory     before its pages are made: the node is preferred (``numa_policy``)
    pages      the thread that makes them runs on the node meanwhile: pages come from there, too, where the system lets
               nobody say where memory is to be (seccomp profiles of containers do without a capability)
    threads    those of the connector run on the node's processors, of those that the process may use

Threads of others, vLLM's above all, are bound as they were. Nothing here fails: what the system refuses is said once.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final

from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.numa_nodes import BoundNode
from xpyd_sidecar.memory.numa_policy import prefer_node
from xpyd_sidecar.threads.processors import restrict
from xpyd_sidecar.threads.watched import WatchedThread

logger = logging.getLogger(__name__)


class NodeBinding:
    """Binds memory and threads of one rank to a NUMA node. Safe across threads."""

    def __init__(self, node: BoundNode | None, prefer: Callable[[int, int, int], None] = prefer_node) -> None:
        """``node``: None where there is nothing to choose; ``prefer``: as ``numa_policy.prefer_node``."""
        self.node = node
        self._prefer = prefer
        self._refused = False

    def memory(self, view: memoryview) -> None:
        """Have pages of it, which are not made yet, come from the node."""
        if self.node is None or not self.node.memory or self._refused or not len(view):
            return
        try:
            self._prefer(address_of(view), len(view), self.node.number)
        except OSError as error:
            self._refused = True
            logger.info("xpyd: the system does not let this process choose the NUMA node of its memory (mbind: %s): pages "
                        "come from the node of the thread that makes them", error.strerror)

    @contextlib.contextmanager
    def pages(self) -> Iterator[None]:
        """The calling thread makes pages: it runs on the node until it has made them, then where it ran before."""
        before = os.sched_getaffinity(0) if self.node is not None else set()
        near = before & self.node.processors if self.node is not None else set()
        moved = bool(near) and near != before and restrict(0, near)
        try:
            yield
        finally:
            if moved:
                restrict(0, before)

    def thread(self, thread: WatchedThread) -> None:
        """Have a thread of the rank run on the node's processors."""
        if self.node is not None and self.node.processors:
            thread.bind(self.node.processors)


UNBOUND: Final = NodeBinding(None)
"""Memory is where it is, and threads run where they may."""
