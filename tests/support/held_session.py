"""Loops, connections and a clock that stand still until they are told to go on, under the product's own sessions.

    with Held(monkeypatch) as held:
        p, d = held.add("p", HeldPrefill, …), held.add("d", HeldDecode, …)
        d.begin(…)                                   posts to decode's loop
        held.loops["d"].run_post()                   … and that is when decode connects
        held.wires[0].to_p.move(100)                 100 bytes of what it has said reach prefill's socket

What may be done at a time, in any order, is what real threads and a real network may do: bytes of one direction of a
connection stay in order, so do posts to a loop; everything else is free. Whoever breaks off a connection decides what of
the bytes under way still arrives, and the two ends see it at different times.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, Protocol, Self, TypeVar

import pytest
from held_loop import HeldListener, HeldLoop, Still
from scripted_pool import ScriptedPool

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.errors import PeerError
from xpyd_sidecar.session import control_connection, decode_session, publisher, receiver, transfer_trace
from xpyd_sidecar.transport.tcp import pool

CLOCKED = (control_connection, receiver, publisher, transfer_trace)
"""Modules that ask for the time."""


class HeldRank(Protocol):
    """What lives on one of the loops."""

    def due(self) -> list[tuple[str, Callable[[], object]]]:
        """What may happen beside its loop now, each with a name."""

    def stop(self) -> None:
        """The end."""


R = TypeVar("R", bound=HeldRank)


class Way:
    """One direction of a connection: from a socket's far end to another's."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.lost = False
        """What is said from now on goes nowhere."""
        self.over = False
        self._under_way = bytearray()

    def can(self) -> bool:
        """Whether something may arrive: bytes, or the end of them."""
        return not self.over and not self.lost and bool(self._under_way or readable(self.near))

    def move(self, most: int) -> int:
        """Some bytes arrive, or the end of them; how many."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):  # or whoever has closed it had not read all
            while data := self.near.recv(1 << 16):
                self._under_way += data
        data = bytes(self._under_way[:most])
        if not data:
            self.end()
            return 0
        del self._under_way[:len(data)]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody reads it any more
            self.far.sendall(data)
        return len(data)

    def end(self) -> None:
        """Whoever reads sees that nothing more comes."""
        self.over = True
        with contextlib.suppress(OSError):
            self.far.shutdown(socket.SHUT_WR)


class Wire:
    """A connection."""

    def __init__(self, number: int, port: int) -> None:
        self.number, self.port = number, port
        self.d_sock, d_far = _pair()
        self.p_sock, p_far = _pair()
        for far in (d_far, p_far):
            far.setblocking(False)
        self.to_p, self.to_d = Way(d_far, p_far), Way(p_far, d_far)

    def cut(self, *, at_once: bool) -> None:
        """Break it: what is under way is lost, and nobody sees it yet; ``at_once``: all of it arrives, and its end, too."""
        for way in (self.to_p, self.to_d):
            way.lost = True
            if at_once and not way.over:
                way.move(1 << 30)
                way.end()

    def close(self) -> None:
        for sock in (self.to_p.near, self.to_p.far):
            sock.close()


def readable(sock: Still) -> bool:
    """Whether something has come, or the end of it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _pair() -> tuple[Still, Still]:
    one, other = socket.socketpair()
    return Still(fileno=one.detach()), Still(fileno=other.detach())


class Complaints(logging.Handler):
    """What the product says of its own mistakes."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.said.append(f"{record.getMessage()} {error!r}")


class Held:
    """All of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.loops: dict[str, HeldLoop] = {}
        self.wires: list[Wire] = []
        self.ranks: dict[str, HeldRank] = {}
        self.closed: list[tuple[str, PeerError]] = []
        """Control connections that have ended, by whose side, and why."""
        self.complaints = Complaints()
        self._listeners: dict[HostPort, HeldListener] = {}
        self._name = ""
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        for module in CLOCKED:
            patch.setattr(module, "time", clock)
        for module in (publisher, receiver):
            patch.setattr(module, "Loop", self._loop)
        patch.setattr(publisher, "socket", SimpleNamespace(create_server=self._listen, AF_INET=socket.AF_INET,
                                                           AF_INET6=socket.AF_INET6))
        for module in (decode_session, receiver):
            patch.setattr(module, "connecting", self._connect)
        patch.setattr(pool, "Pool", ScriptedPool)
        close = control_connection.ControlConnection.close

        def closing(link: control_connection.ControlConnection, error: PeerError) -> None:
            if link.open:
                self.closed.append((link._loop.thread.name, error))
            close(link, error)

        patch.setattr(control_connection.ControlConnection, "close", closing)

    def add(self, name: str, make: Callable[..., R], **options: Any) -> R:
        """A rank, whose loop has that name."""
        self._name = name
        rank = make(**options)
        self.ranks[name] = rank
        return rank

    def round(self) -> bool:
        """Everything that is due, once; whether anything was."""
        did = False
        for rank in self.ranks.values():
            for _, call in rank.due():
                call()
                did = True
        for loop in self.loops.values():
            did |= loop.run_all()
        for wire in self.wires:
            for way in (wire.to_p, wire.to_d):
                if way.can():
                    way.move(1 << 30)
                    did = True
                elif way.lost and not way.over:
                    way.end()
                    did = True
        return did

    def flow(self, round_: Callable[[], bool] | None = None) -> None:
        """Everything that is due, and all that follows from it; ``round_``: what is due once, if not this ``round``."""
        for _ in range(1000):
            if not (round_ or self.round)():
                return
        raise AssertionError("it does not come to rest")

    def _loop(self, _: str, on_tick: Callable[[float], None]) -> HeldLoop:
        loop = self.loops[self._name] = HeldLoop(self._name, on_tick)
        return loop

    def _listen(self, _: tuple[str, int], **__: Any) -> HeldListener:
        listener = HeldListener(len(self._listeners) + 1)
        self._listeners[HostPort(f"127.0.0.1:{listener.port}")] = listener
        return listener

    def _connect(self, address: HostPort) -> socket.socket:
        listener = self._listeners[address]
        wire = Wire(len(self.wires), listener.port)
        self.wires.append(wire)
        listener.waiting.append(wire.p_sock)
        return wire.d_sock

    def __enter__(self) -> Self:
        logging.getLogger("xpyd_sidecar").addHandler(self.complaints)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        logging.getLogger("xpyd_sidecar").removeHandler(self.complaints)
        for rank in self.ranks.values():
            rank.stop()
        for wire in self.wires:
            wire.close()
