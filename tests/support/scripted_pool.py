"""Stripes without threads: a pool whose turns happen when its loop is told to go on, written out in Python.

It speaks what ``_stripes`` speaks, so that orders of events can be drawn and told again. ``fileno()`` is readable where a
socket is, and ``collect`` does what is due. There is no silence here: a loop that stands still has no time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from xpyd_sidecar.memory.addresses import address_of

REQUEST = struct.Struct("<I28sQQQII")
HEADER = struct.Struct("<IIQ")
PLACE = struct.Struct("<QQQII")
ASKED, LEFT, FAILED, SILENT, LIED = range(5)
UNDER_WAY = 64


class LiesError(Exception):
    """The peer says what it may not."""


@dataclass(eq=False)
class ScriptedOrder:
    session: ScriptedSession
    number: int
    key: bytes
    parts: list[tuple[int, ...]]
    rows: tuple[Any, ...]
    gate: Any
    asked: int = 0
    settled: int = 0
    wasted: bool = False


@dataclass(eq=False)
class ScriptedCopy:
    view: memoryview
    offset: int
    sending: int = 0
    taken: bool = False


@dataclass(eq=False)
class ScriptedSession:
    number: int
    ended: bool = False
    stripes: list[ScriptedStripe] = field(default_factory=list)
    queue: deque[ScriptedOrder] = field(default_factory=deque)


@dataclass(eq=False)
class ScriptedStripe:
    session: ScriptedSession
    sock: socket.socket
    serves: bool
    heard: bytearray = field(default_factory=bytearray)
    leaving: deque[tuple[memoryview, bytes, ScriptedCopy | None]] = field(default_factory=deque)
    """Bytes, and the copy that they are the last of, with its key."""
    under_way: deque[tuple[ScriptedOrder, int]] = field(default_factory=deque)
    asked: int = 0
    answered: int = 0


class ScriptedPool:
    """As ``_stripes.Pool``."""

    def __init__(self, threads: int, quiet: int) -> None:
        del threads, quiet
        self._epoll = select.epoll()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll.register(self._event, select.EPOLLIN)
        self._sessions: dict[int, ScriptedSession] = {}
        self._by_file: dict[int, ScriptedStripe] = {}
        self._copies: dict[bytes, ScriptedCopy] = {}
        self._answers: list[tuple[int, bool]] = []
        self._ended: list[tuple[int, int, int]] = []
        self._freed: list[bytes] = []
        self._closed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def stripes(self) -> int:
        return len(self._by_file)

    def open(self) -> int:
        number = next(n for n in range(len(self._sessions) + 1) if n not in self._sessions)
        self._sessions[number] = ScriptedSession(number)
        return number

    def attach(self, session: int, fd: int, serves: bool, keys: bytes) -> None:
        assert not keys, "nothing is encrypted here"
        sock = socket.socket(fileno=os.dup(fd))
        os.close(fd)
        sock.setblocking(False)
        stripe = ScriptedStripe(self._sessions[session], sock, serves)
        stripe.session.stripes.append(stripe)
        self._by_file[sock.fileno()] = stripe
        self._epoll.register(sock, select.EPOLLIN)
        self._turn(stripe)

    def order(self, session: int, number: int, key: bytes, parts: bytes, rows: tuple[Any, ...],  # noqa: PLR0917  # as C's
              gate: Any) -> None:
        mine = self._sessions[session]
        mine.queue.append(ScriptedOrder(mine, number, key, list(PLACE.iter_unpack(parts)), rows, gate))
        self._ask(mine)

    def end(self, session: int) -> None:
        mine = self._sessions.pop(session)
        mine.ended = True
        for stripe in list(mine.stripes):
            self._end(stripe, ASKED)
        self._drop_queue(mine)

    def add(self, key: bytes, view: Any, offset: int) -> None:
        assert key not in self._copies
        self._copies[key] = ScriptedCopy(memoryview(view), offset)

    def take(self, key: bytes) -> bool:
        copy = self._copies.pop(key)
        copy.taken = True
        return not copy.sending

    def collect(self) -> tuple[list[tuple[int, bool]], list[tuple[int, int, int]], list[bytes]]:
        for fd, _ in self._epoll.poll(0):
            if fd == self._event:
                os.eventfd_read(fd)
            elif fd in self._by_file:
                self._turn(self._by_file[fd])
        out = self._answers, self._ended, self._freed
        self._answers, self._ended, self._freed = [], [], []
        return out

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for session in list(self._sessions):
            self.end(session)
        for stripe in list(self._by_file.values()):
            self._end(stripe, ASKED)
        os.close(self._event)
        self._epoll.close()
        self._epoll = select.epoll()  # nothing is ready any more
        self._event = -1

    # --- turns ---

    def _tell(self) -> None:
        if self._event >= 0:
            os.eventfd_write(self._event, 1)

    def _turn(self, stripe: ScriptedStripe) -> None:
        try:
            self._hear(stripe)
            if stripe.serves:
                self._serve(stripe)
            else:
                self._take(stripe)
                self._ask(stripe.session)
            self._leave(stripe)
        except LiesError:
            self._end(stripe, LIED)
        except ConnectionError:
            self._end(stripe, LEFT)
        if stripe.sock.fileno() >= 0:
            self._epoll.modify(stripe.sock, select.EPOLLIN | (select.EPOLLOUT if stripe.leaving else 0))

    def _hear(self, stripe: ScriptedStripe) -> None:
        more = False
        with contextlib.suppress(BlockingIOError):
            while some := stripe.sock.recv(1 << 16):
                stripe.heard += some
                more = True
            if not more:
                raise ConnectionResetError

    def _leave(self, stripe: ScriptedStripe) -> None:
        with contextlib.suppress(BlockingIOError):
            while stripe.leaving:
                view, key, copy = stripe.leaving[0]
                sent = stripe.sock.send(view)
                if sent < len(view):
                    stripe.leaving[0] = view[sent:], key, copy
                    continue
                stripe.leaving.popleft()
                self._let_go(key, copy)

    def _let_go(self, key: bytes, copy: ScriptedCopy | None) -> None:
        if copy is None:
            return
        copy.sending -= 1
        if copy.taken and not copy.sending:
            self._freed.append(key)
            self._tell()

    def _end(self, stripe: ScriptedStripe, why: int) -> None:
        if self._by_file.pop(stripe.sock.fileno(), None) is None:
            return
        self._epoll.unregister(stripe.sock)
        stripe.sock.close()
        stripe.session.stripes.remove(stripe)
        while stripe.under_way:
            order, _ = stripe.under_way.popleft()
            order.wasted = True
            self._settle(order)
        for _, key, copy in stripe.leaving:
            self._let_go(key, copy)
        stripe.leaving.clear()
        self._ended.append((stripe.session.number, why, 0))
        self._tell()

    # --- prefill ---

    def _serve(self, stripe: ScriptedStripe) -> None:
        while len(stripe.heard) >= REQUEST.size:
            serial, key, offset, size, step, count, zero = REQUEST.unpack_from(stripe.heard)
            del stripe.heard[:REQUEST.size]
            if serial != stripe.answered or not size or not count or zero:
                raise LiesError
            stripe.answered += 1
            copy = self._copies.get(key)
            if copy is None:
                stripe.leaving.append((memoryview(HEADER.pack(serial, 1, 0)), key, None))
                continue
            begin = offset - copy.offset
            if begin < 0 or begin + step * (count - 1) + size > len(copy.view):
                raise LiesError
            stripe.leaving.append((memoryview(HEADER.pack(serial, 0, size * count)), key, None))
            copy.sending += 1
            for nth in range(count):
                last = copy if nth == count - 1 else None
                stripe.leaving.append((copy.view[begin + nth * step:][:size], key, last))

    # --- decode ---

    def _ask(self, session: ScriptedSession) -> None:
        while session.queue:
            order = session.queue[0]
            if order.wasted or (order.gate is not None and not _open(order.gate)):
                order.wasted = True
                session.queue.popleft()
                self._answer(order)
                continue
            free = [one for one in session.stripes if not one.serves and len(one.under_way) < UNDER_WAY]
            if not free:
                return
            stripe = min(free, key=lambda one: len(one.under_way))
            offset, size, step, count, _ = order.parts[order.asked]
            said = REQUEST.pack(stripe.asked, order.key, offset, size, step, count, 0)
            stripe.leaving.append((memoryview(said), order.key, None))
            stripe.under_way.append((order, order.asked))
            stripe.asked += 1
            order.asked += 1
            if order.asked == len(order.parts):
                session.queue.popleft()
            with contextlib.suppress(ConnectionError):
                self._leave(stripe)
            self._epoll.modify(stripe.sock, select.EPOLLIN | (select.EPOLLOUT if stripe.leaving else 0))

    def _take(self, stripe: ScriptedStripe) -> None:
        while len(stripe.heard) >= HEADER.size:
            serial, state, size = HEADER.unpack_from(stripe.heard)
            if not stripe.under_way or serial != stripe.answered:
                raise LiesError
            order, part = stripe.under_way[0]
            _, each, _, count, _ = order.parts[part]
            if (state, size) not in {(0, each * count), (1, 0)}:
                raise LiesError
            if len(stripe.heard) < HEADER.size + size:
                return
            data = bytes(stripe.heard[HEADER.size:HEADER.size + size])
            del stripe.heard[:HEADER.size + size]
            stripe.answered += 1
            stripe.under_way.popleft()
            if state or order.wasted or (order.gate is not None and not order.gate.enter()):
                order.wasted = True
            else:
                order.rows[part].copy(address_of(memoryview(data)))
                if order.gate is not None:
                    order.gate.leave()
            self._settle(order)

    def _settle(self, order: ScriptedOrder) -> None:
        order.settled += 1
        if order.wasted and order in order.session.queue:
            order.session.queue.remove(order)
        if order not in order.session.queue and order.settled == order.asked:
            self._answer(order)

    def _answer(self, order: ScriptedOrder) -> None:
        if order.settled == order.asked:
            self._answers.append((order.number, not order.wasted))
            self._tell()

    def _drop_queue(self, session: ScriptedSession) -> None:
        while session.queue:
            order = session.queue.popleft()
            order.wasted = True
            self._answer(order)


def _open(gate: Any) -> bool:
    """Whether it may be entered now."""
    if not gate.enter():
        return False
    gate.leave()
    return True
