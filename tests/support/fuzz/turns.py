"""The loop (``_loop.c``, and ``_fast.c`` that it calls) with random turns: what comes out of a connection is what went in.

An input is a program for three connections, one byte for each step, and two more where it needs them. Connections 0 and 1
are read by plain protocols, 2 is an engine's leg that relays events to a client. Between two turns of the loop several
peers may send, be paused, resumed, aborted, or close; and protocols do so to each other, write, or raise, while they are
being told of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Hashable
from typing import Any, cast

from xpyd_sidecar.router.relay import fast, loop
from xpyd_sidecar.router.relay.loop import descriptor_of
from xpyd_sidecar.router.stream.events import EventStream

MODULES = ("xpyd_sidecar.router.relay._loop", "xpyd_sidecar.router.relay._fast")
LIMIT_S = 5.0
EVENT = b'data: {"id":"a"}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
SENT = (b"a", CHUNK, b"bc" * 40, CHUNK * 3, b"x" * 17_000, CHUNK[:9], CHUNK * 40, CHUNK + b"odd")
STEPS = ("turn", "send", "send", "send", "pause", "resume", "shut", "abort", "close", "on_data", "drain", "turn")
HOOKS = ("pause", "resume", "abort", "raise", "write", "close", "interrupt")
TOKENS = tuple(bytes([step, who, what]) for step in range(len(STEPS)) for who in range(3) for what in (0, 1, 4))


class Failed(Exception):
    """What a protocol raises here."""


class Side:
    """A connection that is read by the loop, and its far end: what was sent, what came."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.came = bytearray()
        self.told: list[str] = []
        self.whole = True
        """All that was sent must come."""
        self.hook: tuple[str, Side] | None = None
        self.transport: Any = None

    async def connect(self) -> None:
        """Both ends of it."""
        near, self.far = socket.socketpair()
        self.far.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: cast("Any", self), sock=near)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        loop.adopt(asyncio.get_running_loop(), cast("Any", self), cast("Any", transport), descriptor_of(transport))

    def data_received(self, data: bytes) -> None:
        assert not self.told, f"bytes behind {self.told}"
        self.came += data
        hook, self.hook = self.hook, None
        if hook is not None:
            hook[1].act(hook[0])

    def eof_received(self) -> None:
        self.told.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        loop.release(asyncio.get_running_loop(), cast("Any", self))
        self.told.append("lost")

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def act(self, what: str) -> None:
        """What may be done to it at any time."""
        if what in {"raise", "interrupt"}:
            self.whole = False
            raise Failed if what == "raise" else asyncio.CancelledError
        if self.transport.is_closing():
            return
        if what in {"abort", "close"}:
            self.whole = False
            self.transport.abort() if what == "abort" else self.transport.close()
        elif what == "pause":
            self.transport.pause_reading()
        elif what == "resume":
            self.transport.resume_reading()
        elif what == "write":
            self.transport.write(b"to the peer")

    def send(self, data: bytes) -> None:
        """From the far end, as much as there is room for."""
        with contextlib.suppress(OSError):
            self.sent += data[:self.far.send(data)]

    def complete(self) -> bool:
        """Whether nothing more is to come."""
        return not self.whole or len(self.came) >= len(self.sent)

    def check(self) -> None:
        """What came is what was sent, or its beginning where the connection was ended here."""
        assert self.sent.startswith(self.came), (bytes(self.sent[:99]), bytes(self.came[:99]))
        assert not self.whole or len(self.came) == len(self.sent), (len(self.sent), len(self.came), self.told)


class Relay(fast.Leg, Side):  # type: ignore[misc]
    """An engine's leg: what comes goes to a client, by shortcut or by Python, in its order."""

    def __init__(self) -> None:
        Side.__init__(self)
        self.last_at = 0.0
        self.client = Side()
        self.outlet = fast.Outlet()

    async def connect(self) -> None:
        """The leg, and the client's connection."""
        await self.client.connect()
        self.outlet.open(self.client.transport, descriptor_of(self.client.transport))
        self.relay(EventStream(framed=True), self.outlet)
        await Side.connect(self)

    def received(self, data: bytes) -> None:
        """As ``data_received`` of others; and the client gets it."""
        self.outlet.write(data)
        hook, self.hook = self.hook, None
        if hook is not None:
            hook[1].act(hook[0])

    data_received = fast.Leg.data_received

    def drain(self) -> None:
        """What the client has got."""
        with contextlib.suppress(BlockingIOError):
            while part := self.client.far.recv(1 << 16):
                self.came += part

    def complete(self) -> bool:
        self.drain()
        return Side.complete(self)


_made: list[Any] = []


def check(data: bytes) -> Hashable:
    """One program on a loop that all share."""
    if not _made:
        _made.append(loop.Loop())
        _made[0].set_exception_handler(lambda *_: None)
    return _made[0].run_until_complete(asyncio.wait_for(_run(data), LIMIT_S))


def seeds() -> list[bytes]:
    """A few programs by hand."""
    return [bytes(one) for one in (
        [], [1, 0, 0, 0], [1, 0, 2, 1, 1, 4, 0, 1, 2, 1, 0], [4, 0, 1, 0, 2, 0, 5, 0, 0], [9, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0],
        [9, 0, 3, 0, 1, 0, 1, 0, 1, 1, 0, 0], [1, 2, 1, 0, 1, 2, 7, 0, 1, 2, 3, 0], [1, 2, 6, 1, 2, 6, 10, 0, 7, 2, 0],
        [9, 0, 0, 1, 1, 0, 5, 0, 1, 1, 1, 0, 5, 1, 0], [1, 0, 4, 1, 1, 4, 1, 2, 4, 0, 6, 0, 8, 1, 0],
        [9, 2, 2, 0, 1, 2, 0, 0])]


async def _run(data: bytes) -> Hashable:
    sides = [Side(), Side(), Relay()]
    for side in sides:
        await side.connect()
    done: set[str] = set()
    try:
        at = 0
        while at < len(data):
            step = STEPS[data[at] % len(STEPS)]
            who, what = (data[at + n] if at + n < len(data) else 0 for n in (1, 2))
            at += 1 if step == "turn" else 3 if step in {"send", "on_data"} else 2
            done.add(step)
            await _step(sides, step, sides[who % 3], what)
        for side in sides:
            side.hook = None
            side.act("resume")
        for _ in range(100_000):
            if all(side.complete() for side in sides):
                break
            await asyncio.sleep(0)
    finally:
        ends = [*sides, sides[2].client]  # type: ignore[attr-defined]
        for side in ends:
            side.far.close()
            side.transport.abort()
        while not all("lost" in side.told for side in ends):  # noqa: ASYNC110 (within LIMIT_S)
            await asyncio.sleep(0)
    for side in sides:
        side.check()
    return len(done), tuple(side.whole for side in sides)


async def _step(sides: list[Side], step: str, side: Side, what: int) -> None:
    if step == "turn":
        await asyncio.sleep(0)
    elif step == "send":
        side.send(SENT[what % len(SENT)])
    elif step == "shut":
        with contextlib.suppress(OSError):
            side.far.shutdown(socket.SHUT_WR)
    elif step == "on_data":
        acts = HOOKS[what % len(HOOKS)]
        other = side if acts in {"raise", "interrupt"} else sides[what // len(HOOKS) % 3]
        side.hook = acts, other
    elif step == "drain":
        if isinstance(side, Relay):
            side.drain()
    else:
        side.act(step)
