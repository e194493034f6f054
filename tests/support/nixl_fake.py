"""A driver for NIXL in one process, for tests without it: memory is read by copying it, when the script says so.

    world = World()
    hub = NixlThread(world.driver(), ReadLimits())        …
    world.held = True                          reads that begin now stay under way until it is False again
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from xpyd_sidecar.kv.bodies import NixlMemory
from xpyd_sidecar.kv.reads import TICKET_BYTES


class FakeError(Exception):
    """Stands for NIXL's own."""


@dataclass
class World:
    """What all agents of a test share. ``before``: called with what is read (address, bytes) just before it is."""

    held: bool = False
    held_pieces: bool = False
    """As ``held``, but the tickets are read."""
    broken: str = ""
    never_ends: bool = False
    before: Callable[[int, int], None] | None = None
    read: list[tuple[int, int]] = field(default_factory=list)
    agents: dict[bytes, str] = field(default_factory=dict)
    alive: int = 0
    """Agents that read."""
    polls: int = 0
    misuse: list[str] = field(default_factory=list)

    def driver(self) -> Driver:
        return Driver(self)


@dataclass
class Handle:
    at: int
    address: int
    size: int
    done: bool = False


class Target:
    def __init__(self, world: World) -> None:
        self.name = f"agent-{secrets.token_hex(8)}"
        self._world = world

    def register(self, regions: list[tuple[int, int]]) -> bytes:
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
    def __init__(self, world: World, memory: NixlMemory, address: int, size: int) -> None:
        if world.broken == "reach":
            raise FakeError("no backend reaches it")
        if world.agents.get(bytes(memory.metadata)) != memory.agent:
            raise FakeError("NIXL_ERR_MISMATCH")
        self._world, self._first, self._size, self._open = world, address, size, True
        world.alive += 1

    def read(self, at: int, address: int, size: int) -> Handle:
        if not self._first <= at <= self._first + self._size - size:
            self._world.misuse.append(f"reads to {at - self._first}")
        if self._world.broken == "read":
            raise FakeError("nixlRemoteDisconnectError")
        return Handle(at, address, size)

    def done(self, handle: Handle) -> bool:
        if not self._open:
            self._world.misuse.append("asked an agent that has ended")
        if self._world.broken == "done":
            raise FakeError("nixlRemoteDisconnectError")
        if self._world.held or handle.done or (self._world.held_pieces and handle.size > TICKET_BYTES):
            return handle.done
        if self._world.before is not None:
            self._world.before(handle.address, handle.size)
        ctypes.memmove(handle.at, handle.address, handle.size)
        self._world.read.append((handle.address, handle.size))
        handle.done = True
        return True

    def end(self) -> None:
        if self._world.never_ends:
            raise FakeError("cannot be ended")
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

    def reader(self, memory: NixlMemory, address: int, size: int) -> Reader:
        return Reader(self._world, memory, address, size)
