"""The one agent that reads: made when something is to be read, ended, and made again; and the memory that it reads into.

A peer stays known when its session ends: each time that NIXL lets go of one that lives, and gets to know it again, two
sockets stay open until the agent ends (1.5.1). One whose reads have failed is made known again, since its connection is
broken.
"""

from __future__ import annotations

import logging
from collections.abc import Container

from xpyd_sidecar.kv.session_bodies import NixlMemory
from xpyd_sidecar.transport.nixl.driver import LandingMemory, NixlDriver, NixlReader
from xpyd_sidecar.transport.nixl.memory import SlotMemory

logger = logging.getLogger(__name__)


class ReadAgent:
    """The NIXL agent of one process that reads. Used on the thread that owns the agents."""

    def __init__(self, driver: NixlDriver, slot_bytes: int) -> None:
        """``slot_bytes``: memory for orders that have none."""
        self.ring: LandingMemory | None = None
        """What orders that say where they go are ranges of; set before there is a session."""
        self.reader: NixlReader | None = None
        self.known: dict[str, bytes] = {}
        """By name of their agent: the descriptions of peers that it knows."""
        self._driver = driver
        self._slot_bytes = slot_bytes
        self._memory: SlotMemory | None = None
        self._broken: set[str] = set()
        """Peers whose reads have failed."""
        self._unended: NixlReader | None = None
        """An agent that was to end, and lives: until it does not, nothing is read."""

    @property
    def memory(self) -> SlotMemory:
        """The slots, and cells for tickets."""
        if self._memory is None:
            self._memory = SlotMemory(self._slot_bytes)
        return self._memory

    @property
    def unended(self) -> bool:
        """Whether an agent was to end, and lives."""
        return self._unended is not None

    def reach(self, memory: NixlMemory, *, anew: bool) -> NixlReader:
        """The agent, which knows a peer. ``anew``: it may be made known again, if it is broken.

        Raises:
            Exception: NIXL's own; ValueError: what prefill shows cannot be; RuntimeError: no agent can be had.
        """
        if self._unended is not None:
            raise RuntimeError("the agent before lives on")
        if self.reader is None:
            self.reader = self._driver.reader([self.memory.whole, *([self.ring] if self.ring is not None else [])])
        name = memory.agent
        if name in self._broken and anew:
            self._broken.discard(name)
            del self.known[name]
            self.reader.leave(name)
        known = self.known.get(name)
        if known is None:
            found = self.reader.reach(memory)
            if found != name:
                if found not in self.known:
                    self.reader.leave(found)
                raise ValueError("NIXL's description is of another agent")
            self.known[name] = memory.metadata
        elif known != memory.metadata:
            raise ValueError("NIXL's description is not the one that this agent had before")
        return self.reader

    def on_read_failed(self, name: str) -> None:
        """A read of a peer has failed."""
        if name in self.known:
            self._broken.add(name)

    def spare(self, names: Container[str]) -> int:
        """How many peers are known that are not among these."""
        return sum(name not in names for name in self.known)

    def poll(self) -> None:
        """Go on with what peers have said."""
        if self.reader is not None:
            self.reader.poll()

    def end(self) -> bool:
        """Nothing that was begun is written after this; its handles are gone. False: that could not be had; try again."""
        self.known.clear()
        self._broken.clear()
        first = self._unended is None
        agent, self.reader = self._unended or self.reader, None
        try:
            if agent is not None:
                agent.end()
        except RuntimeError as error:
            self._unended = agent
            if first:
                logger.error("xpyd: %s; nothing is read over NIXL until it has", error)  # noqa: TRY400  # it says it all
            return False
        self._unended = None
        return True
