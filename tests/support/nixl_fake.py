"""A driver for NIXL in one process, for tests without it: memory is read by copying it, when the script says so.

    world = World()
    hub = NixlThread(world.driver(), ReadLimits())        …
    world.held = True                          reads that begin now stay under way until it is False again

What it keeps of NIXL: a read that was begun goes on whatever is done with its handle, until the agent that reads has ended;
a handle is begun again only when it is done; memory that is not registered, and peers that are not known, are refused.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.kv.session_bodies import NixlMemory
from xpyd_sidecar.transport.nixl.driver import LandingMemory, ReadSpan


class FakeError(Exception):
    """Stands for NIXL's own."""


@dataclass
class World:
    """What all agents of a test share. ``before``: called with what is read (address, bytes) just before it is."""

    held: bool = False
    held_pieces: bool = False
    """As ``held``, but the tickets are read."""
    stopped: set[str] = field(default_factory=set)
    """Agents of which nothing comes."""
    hollow: bool = False
    """Reads are said to be done, and nothing has come."""
    needs_target: bool = False
    """A read goes on only when the agent that is read from is asked for news after it was begun, as without RDMA."""
    broken: str = ""
    never_ends: bool = False
    before: Callable[[int, int], None] | None = None
    read: list[tuple[int, int]] = field(default_factory=list)
    agents: dict[bytes, str] = field(default_factory=dict)
    alive: int = 0
    """Agents that read."""
    made: int = 0
    """Of them, ever."""
    reached: int = 0
    """Times that a peer was made known."""
    polls: int = 0
    """Times that agents that are read from were asked for news."""
    misuse: list[str] = field(default_factory=list)

    def driver(self) -> Driver:
        return Driver(self)


@dataclass
class Handle:
    peer: str
    spans: tuple[ReadSpan, ...]
    done: bool = False
    begun: bool = False
    refused: bool = False
    polls: int = 0


class Target:
    def __init__(self, world: World) -> None:
        self.name = f"agent-{secrets.token_hex(8)}"
        self._world = world

    def register(self, regions: Sequence[tuple[int, int]]) -> bytes:
        if self._world.broken == "register":
            raise FakeError("no memory can be registered")
        metadata = repr((self.name, regions)).encode()
        self._world.agents[metadata] = self.name
        return metadata

    def poll(self) -> None:
        self._world.polls += 1
        if self._world.broken == "poll":
            raise FakeError("cannot serve")

    def end(self) -> None:
        self.name = ""


class Reader:
    def __init__(self, world: World, regions: Sequence[LandingMemory]) -> None:
        if world.broken == "reader":
            raise FakeError("NIXL_ERR_BACKEND")
        self._world, self._regions, self._open = world, regions, True
        self.peers: set[str] = set()
        self._under_way: list[Handle] = []
        world.alive += 1
        world.made += 1

    def reach(self, memory: NixlMemory) -> str:
        if self._world.broken == "reach":
            raise FakeError("no backend reaches it")
        name = self._world.agents.get(bytes(memory.metadata))
        if name is None:
            raise FakeError("NIXL_ERR_MISMATCH")
        if memory.agent in self.peers:
            self._world.misuse.append("reached twice")
        self._world.reached += 1
        self.peers.add(name)
        return name

    def leave(self, name: str) -> None:
        if any(one.peer == name and not one.done for one in self._under_way):
            self._world.misuse.append("left a peer of which something is under way")
        self.peers.remove(name)

    def prepare(self, name: str, spans: Sequence[ReadSpan], into: LandingMemory) -> Handle:
        if name not in self.peers:
            self._world.misuse.append("reads of a peer that it does not know")
        for _, at, size in spans:
            if not any(one.address <= at <= one.address + one.size - size for one in self._regions):
                self._world.misuse.append(f"reads {size} bytes to memory that is not registered")
        if self._world.broken == "prepare":
            raise FakeError("NIXL_ERR_NOT_FOUND")
        return Handle(name, tuple(spans))

    def begin(self, handle: Handle) -> None:
        if handle.begun and not handle.done:
            self._world.misuse.append("begun again while it is under way")
        handle.begun, handle.done, handle.polls = True, False, self._world.polls
        if self._world.broken == "begin":
            handle.refused = True
            raise FakeError("nixlRemoteDisconnectError")
        self._under_way.append(handle)

    def is_done(self, handle: Handle) -> bool:
        world = self._world
        if not self._open:
            world.misuse.append("asked an agent that has ended")
        if handle.refused:
            raise FakeError("NIXL_ERR_NOT_POSTED")
        if world.broken == "done":
            self._under_way.remove(handle)
            raise FakeError("nixlRemoteDisconnectError")
        self.progress()
        return handle.done

    def progress(self) -> None:
        """What is under way comes, whoever still has its handle."""
        world = self._world
        for one in list(self._under_way):
            pieces = world.held_pieces and one.spans[0].size > TICKET_BYTES
            unserved = world.needs_target and world.polls == one.polls
            if world.held or pieces or unserved or one.peer in world.stopped:
                continue
            for source, into, size in () if world.hollow else one.spans:
                if world.before is not None:
                    world.before(source, size)
                ctypes.memmove(into, source, size)
                world.read.append((source, size))
            one.done = True
            self._under_way.remove(one)

    def poll(self) -> None:
        self.progress()

    def end(self) -> None:
        if self._world.never_ends:
            raise RuntimeError("cannot be ended")
        if self._open:
            self._world.alive -= 1
        self._open = False


class Driver:
    version = "1.5.1"

    def __init__(self, world: World) -> None:
        self._world = world

    def target(self) -> Target:
        if self._world.broken == "target":
            raise FakeError("NIXL_ERR_BACKEND")
        return Target(self._world)

    def reader(self, regions: Sequence[LandingMemory]) -> Reader:
        return Reader(self._world, regions)
