"""The event loop of a router: asyncio's own, which reads the connections it is given in C (``_loop``).

    asyncio ── select ──▶ _loop: epoll, recv ── events of streams ──▶ clients          no Python at all
       ▲                                    └── anything else ──▶ ``data_received``
       └── what is not read there: listening, links, timers, writing, ends, errors

Bytes that are encrypted need asyncio's TLS, which is written in Python; uvloop's is not. So a router that serves TLS runs
on uvloop, and so does every one whose C parts could not be built.
"""

from __future__ import annotations

import asyncio
import math
import select
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from xpyd_sidecar import built
from xpyd_sidecar.router.relay import fast

_T = TypeVar("_T")
REVISION = 2
"""Of what both have in common; grows with every change of ``_loop.c``."""

COMPILED = False
if fast.COMPILED:
    try:
        from xpyd_sidecar.router.relay import _loop

        built.check("the loop's parts", _loop.REVISION, REVISION)
        COMPILED = True
    except ImportError:  # not built, or for another machine: everything works without
        pass


class _Selector(selectors.EpollSelector):
    """Tells C what asyncio wants to read, and gives asyncio what C leaves to it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = _loop.Reads()
        self._keys: dict[int, selectors.SelectorKey] = {}
        self.loop: Any = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self.reads.readable(fileobj if isinstance(fileobj, int) else fileobj.fileno(), False)  # raises where C has no room
        return self._wanted(super().register(fileobj, events, data))

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._wanted(super().modify(fileobj, events, data))

    def _wanted(self, key: selectors.SelectorKey) -> selectors.SelectorKey:
        self._keys[key.fd] = key
        self.reads.readable(key.fd, bool(key.events & selectors.EVENT_READ))
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = super().unregister(fileobj)
        del self._keys[key.fd]
        self.reads.readable(key.fd, False)
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        wait_ms = -1 if timeout is None else max(0, math.ceil(timeout * 1e3))
        loop = self.loop
        found = self.reads.poll(self.fileno(), wait_ms, loop._ready, loop._scheduled)
        return [(key, wanted) for fd, happened in found
                if (key := self._keys.get(fd)) is not None and (wanted := _events(happened) & key.events)]


def _events(happened: int) -> int:
    """As the base class has it: an error or an end is seen by whoever waits for anything."""
    events = selectors.EVENT_WRITE if happened & ~select.EPOLLIN else 0
    return events | selectors.EVENT_READ if happened & ~select.EPOLLOUT else events


class RouterLoop(asyncio.SelectorEventLoop):
    """asyncio's loop. Connections that are adopted are read in C, all others as ever."""

    time = staticmethod(time.monotonic)
    """As asyncio has it, without a call in Python; a request asks a dozen times."""

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self
        self._reads = selector.reads
        self._reads.failed = self._failed
        self._adopted: dict[asyncio.Protocol, tuple[int, asyncio.Transport]] = {}

    def adopt(self, protocol: asyncio.Protocol, transport: asyncio.Transport, fd: int) -> None:
        """Read for this protocol. To be released before its descriptor is closed: in ``connection_lost``."""
        self._reads.adopt(fd, protocol)  # raises where it has no room
        self._adopted[protocol] = (fd, transport)

    def release(self, protocol: asyncio.Protocol) -> None:
        """Its connection is gone."""
        fd, _ = self._adopted.pop(protocol, (-1, None))
        if fd >= 0:
            self._reads.release(fd)

    def _failed(self, protocol: asyncio.Protocol, error: BaseException) -> None:
        """As asyncio's transports do it: told once, and the connection ends."""
        _, transport = self._adopted.get(protocol, (-1, None))
        self.call_exception_handler({"message": "Fatal error: protocol.data_received() call failed.", "exception": error,
                                     "protocol": protocol, "transport": transport})
        if transport is not None:
            transport.abort()

    def close(self) -> None:
        """Nobody is read any more."""
        super().close()
        for protocol in list(self._adopted):
            self.release(protocol)


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """The descriptor of a connection whose bytes may be written to it as they are, else -1."""
    if transport.get_extra_info("sslcontext") is not None:
        return -1
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())


def adopt(loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, transport: asyncio.Transport, fd: int) -> None:
    """Have the loop read for a protocol, where it can. ``fd``: -1 where bytes are encrypted."""
    if fd >= 0 and isinstance(loop, RouterLoop):
        loop.adopt(protocol, transport, fd)


def release(loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
    """The protocol's connection is gone."""
    if isinstance(loop, RouterLoop):
        loop.release(protocol)


def maker(*, encrypted: bool = False) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes a router's loop. ``encrypted``: the bytes of its clients are."""
    return RouterLoop if COMPILED and not encrypted else uvloop.new_event_loop


def run(main: Coroutine[Any, Any, _T], *, encrypted: bool = False) -> _T:
    """As ``asyncio.run``, with a router's loop."""
    with asyncio.Runner(loop_factory=maker(encrypted=encrypted)) as runner:
        return runner.run(main)
