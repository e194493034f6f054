"""Connections that the router's loop, or another one, reads for, and their far ends.

    heard, far = await connected()
    far.sendall(b"a")
    await heard.has(b"a")
    await shut([(heard, far)])
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import cast

from xpyd_sidecar.router.relay import loop
from xpyd_sidecar.router.relay.loop import descriptor_of

LIMIT_S = 30.0


class Heard(asyncio.Protocol):
    """Has the loop read for it, and remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.data = b""
        self.ended = asyncio.get_running_loop().create_future()
        self.on_data: Callable[[Heard, bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        loop.adopt(asyncio.get_running_loop(), self, self.transport, descriptor_of(transport))

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.on_data is not None:
            self.on_data(self, data)

    def eof_received(self) -> None:
        self.told.append("eof")

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        loop.release(asyncio.get_running_loop(), self)
        self.told.append("lost" if exc is None else type(exc))
        self.ended.set_result(None)

    async def has(self, data: bytes) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.data != data:  # noqa: ASYNC110 (any number of reads may bring it)
                await asyncio.sleep(0.001)


async def connected(kind: type[Heard] = Heard) -> tuple[Heard, socket.socket]:
    """A connection, and its other end, which blocks for a limited time."""
    near, far = socket.socketpair()
    far.settimeout(LIMIT_S)
    _, heard = await asyncio.get_running_loop().create_connection(kind, sock=near)
    return heard, far


def all_of(far: socket.socket, size: int) -> bytes:
    """So many bytes, or what came until the end."""
    got = bytearray()
    while len(got) < size and (data := far.recv(1 << 16)):
        got += data
    return bytes(got)


async def shut(peers: Iterable[tuple[Heard, socket.socket]]) -> None:
    """Close both ends of each, and wait until that was heard."""
    for heard, far in peers:
        far.close()
        heard.transport.abort()
        async with asyncio.timeout(LIMIT_S):
            await heard.ended
