"""One decode rank and prefill ranks whose threads, sockets and clock stand still until they are told to go on.

    with Held(monkeypatch) as held:
        p, d = held.prefill(…), held.decode(…)
        d.load("r", key(), p, first=0, count=2)      posts to decode's loop
        held.loops["d"].run_post()                   … and that is when decode connects
        held.wires[0].to_p.move(100)                 100 bytes of what it has said reach prefill's socket

The ranks are those of ``kv_ranks``, all of the product but its loop's thread. What may be done at a time, in any order, is
what the real threads and a real network may do: bytes of one direction of a connection stay in order, so do posts to a
loop; everything else is free. Whoever breaks off a connection decides what of the bytes under way still arrives, and the
two ends see it at different times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import kv_ranks
import pytest
from held_ranks import HeldDecode, HeldPrefill
from kv_ranks import BLOCK, DecodeRank, PrefillRank

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.errors import PeerError
from xpyd_sidecar.kv import frames
from xpyd_sidecar.session import (
    decode_endpoint,
    lookup_buffer,
    receiver,
    receiver_events,
    sender,
    spilling,
    transfer_trace,
)
from xpyd_sidecar.transport.tcp import connection
from xpyd_sidecar.transport.tcp.link import TcpLink

CLOCKED = (kv_ranks, connection, decode_endpoint, lookup_buffer, receiver, receiver_events, sender, spilling,
           transfer_trace)
"""Modules that ask for the time."""
FRAME = 2 * BLOCK


class HeldLoop:
    """A ``Loop`` whose thread is whoever calls ``run_…``."""

    def __init__(self, name: str, on_tick: Callable[[float], None]) -> None:
        self.thread = SimpleNamespace(words="", name=name)
        self.alone = False
        self.posted: deque[Callable[[], None]] = deque()
        self._on_tick = on_tick
        self._watched: dict[Any, tuple[int, Callable[[int], None]]] = {}
        self._ends: list[Callable[[], None]] = []
        self.watch_fd = os.eventfd(1)  # readable: a call that waits for its socket ends at once

    def start(self) -> None:
        """It is called instead."""

    def post(self, call: Callable[[], None]) -> None:
        self.posted.append(call)

    def at_end(self, call: Callable[[], None]) -> None:
        self._ends.append(call)

    def watch(self, sock: Any, events: int, call: Callable[[int], None]) -> None:
        if events:
            self._watched[sock] = events, call
        else:
            self._watched.pop(sock, None)

    def ready(self) -> list[Any]:
        """Sockets that it would serve now."""
        poll, by_file = select.poll(), {}
        found = []
        for sock, (events, _) in self._watched.items():
            if isinstance(sock, HeldListener):
                if sock.waiting:
                    found.append(sock)
            else:
                by_file[sock.fileno()] = sock
                poll.register(sock, (select.POLLIN if events & 1 else 0) | (select.POLLOUT if events & 2 else 0))
        return found + [by_file[number] for number, seen in poll.poll(0) if seen]

    def run_socket(self, sock: Any, *, alone: bool = False) -> None:
        self.alone = alone
        events, call = self._watched[sock]
        call(events)

    def run_post(self) -> None:
        self.alone = False
        self.posted.popleft()()

    def run_all(self) -> bool:
        """All posts and sockets; whether there were any."""
        did = bool(self.posted)
        while self.posted:
            self.run_post()
        for sock in self.ready():
            if sock in self._watched:  # and not closed by the one before
                self.run_socket(sock)
                did = True
        return did

    def tick(self, now: float) -> None:
        self.alone = False
        self._on_tick(now)

    def stop(self) -> None:
        for call in self._ends:
            call()
        os.close(self.watch_fd)


class HeldListener:
    """What a sender listens on."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.waiting: deque[socket.socket] = deque()

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.popleft(), ("d", 1)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def setblocking(self, _: bool) -> None:
        """It does not wait."""

    def close(self) -> None:
        """Nobody comes any more."""


class Way:
    """One direction of a connection: from a socket's far end to another's."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.lost = False
        """What is said from now on goes nowhere."""
        self.over = False
        self._under_way = bytearray()
        self._behind = 0
        """Bytes of the frame that has begun to arrive and has not ended."""

    def can(self) -> bool:
        """Whether something may arrive: bytes, or the end of them."""
        return not self.over and not self.lost and bool(self._under_way or select.select([self.near], [], [], 0)[0])

    def frame(self) -> int:
        """Bytes up to the end of the frame that arrives."""
        self._listen()
        if not self._behind and len(self._under_way) >= frames.HEADER_BYTES:
            return frames.HEADER_BYTES + frames.decode(bytes(self._under_way[:frames.HEADER_BYTES])).length
        return self._behind or 1

    def move(self, most: int) -> int:
        """Some bytes arrive, or the end of them; how many."""
        self._listen()
        data = bytes(self._under_way[:most])
        if not data:
            self.end()
            return 0
        at = 0
        while at < len(data):
            if not self._behind:
                head = bytes(self._under_way[at:at + frames.HEADER_BYTES])
                self._behind = frames.HEADER_BYTES + (frames.decode(head).length if len(head) == frames.HEADER_BYTES else 0)
            step = min(self._behind, len(data) - at)
            self._behind -= step
            at += step
        del self._under_way[:len(data)]
        with contextlib.suppress(OSError):
            self.far.sendall(data)
        return len(data)

    def end(self) -> None:
        """Whoever reads sees that nothing more comes."""
        self.over = True
        with contextlib.suppress(OSError):
            self.far.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):  # or whoever has closed it had not read all
            while data := self.near.recv(1 << 16):
                self._under_way += data


class Wire:
    """A connection."""

    def __init__(self, number: int, port: int) -> None:
        self.number, self.port = number, port
        self.d_sock, d_far = socket.socketpair()
        self.p_sock, p_far = socket.socketpair()
        for far in (d_far, p_far):
            far.setblocking(False)
        self.to_p, self.to_d = Way(d_far, p_far), Way(p_far, d_far)

    def cut(self, *, at_once: bool) -> None:
        """Break it: what is under way is lost, and nobody sees it yet; ``at_once``: as within a host, all of it arrives."""
        for way in (self.to_p, self.to_d):
            way.lost = True
            if at_once and not way.over:
                way.move(1 << 30)
                way.end()

    def close(self) -> None:
        for sock in (self.to_p.near, self.to_p.far):
            sock.close()


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
        self.closed: list[tuple[str, PeerError]] = []
        """Connections that have ended, by whose side, and why."""
        self.complaints = Complaints()
        self._listeners: dict[HostPort, HeldListener] = {}
        self._ranks: list[PrefillRank | DecodeRank] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        for module in CLOCKED:
            patch.setattr(module, "time", clock)
        for module in (sender, receiver):
            patch.setattr(module, "Loop", self._loop)
        patch.setattr(sender, "socket", SimpleNamespace(create_server=self._listen, AF_INET=socket.AF_INET,
                                                        AF_INET6=socket.AF_INET6))
        patch.setattr(decode_endpoint, "_connecting", self._connect)
        patch.setattr(connection, "tune", lambda sock: sock.setblocking(False))
        patch.setattr(frames, "FRAME_BYTES", FRAME)
        patch.setattr(frames, "DIRECT_BYTES", FRAME + BLOCK)
        patch.setattr(lookup_buffer, "FRAME_BYTES", FRAME)
        patch.setattr(TcpLink.put, "__kwdefaults__", {"most": FRAME})
        close = connection.Connection.close

        def closing(link: connection.Connection, error: PeerError) -> None:
            if link.open:
                self.closed.append((link._loop.thread.name, error))
            close(link, error)

        patch.setattr(connection.Connection, "close", closing)

    def prefill(self, name: str, **options: Any) -> HeldPrefill:
        self._name = name
        rank = HeldPrefill(**options)
        rank.begin()
        self._ranks.append(rank)
        return rank

    def decode(self, name: str = "d", **options: Any) -> HeldDecode:
        self._name = name
        rank = HeldDecode(**options)
        rank.begin()
        self._ranks.append(rank)
        return rank

    def round(self) -> bool:
        """Everything that is due, once; whether anything was."""
        did = False
        for rank in self._ranks:
            if isinstance(rank, HeldPrefill):
                did |= bool(rank.marks_due)
                while rank.marks_due:
                    rank.mark()
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
        for rank in self._ranks:
            if isinstance(rank, HeldDecode):
                did |= bool(rank.receiver.inbox or rank.due)
                while rank.receiver.inbox:
                    rank.take_one(self.now)
                while rank.due:
                    rank.give()
        return did

    def flow(self, round_: Callable[[], bool] | None = None) -> None:
        """Everything that is due, and all that follows from it; ``round_``: what is due once, if not this ``round``."""
        for _ in range(400):
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
        for rank in self._ranks:
            rank.__exit__(None, None, None)
        for wire in self.wires:
            wire.close()
