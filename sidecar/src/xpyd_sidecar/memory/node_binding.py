"""Puts memory and threads of one rank on the NUMA node of its device.

    memory     before its pages are allocated, the kernel is asked to prefer the node (``numa_policy``)
    pages      the thread that first touches them runs on the node's processors meanwhile. So they come from the node also
               where containers may not call mbind (default seccomp profiles allow it only with a capability)
    thread     threads of the connector run on the node's processors, as far as the process may use these

Threads of others, such as vLLM's, keep their processors. Nothing here raises: what the system refuses is logged.
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
        """``node``: None where nothing is to be bound. ``prefer(address, bytes, node)`` asks the kernel to allocate pages
        on a node, and raises OSError where it refuses.
        """
        self.node = node
        self._prefer = prefer
        self._refused = False

    def memory(self, view: memoryview) -> None:
        """Ask the kernel to allocate those pages of ``view`` on the node that do not exist yet. After a first refusal,
        which is logged, the kernel is not asked again.
        """
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
        """Context in which the calling thread runs on the node's processors, so that pages it touches first are allocated
        there; afterwards it runs where it ran before.
        """
        before = os.sched_getaffinity(0) if self.node is not None else set()
        near = before & self.node.processors if self.node is not None else set()
        moved = bool(near) and near != before and restrict(0, near)
        try:
            yield
        finally:
            if moved:
                restrict(0, before)

    def thread(self, thread: WatchedThread) -> None:
        """Have a thread of the rank run on the node's processors, from its start or from now on."""
        if self.node is not None and self.node.processors:
            thread.bind(self.node.processors)


UNBOUND: Final = NodeBinding(None)
"""Memory is where it is, and threads run where they may."""
