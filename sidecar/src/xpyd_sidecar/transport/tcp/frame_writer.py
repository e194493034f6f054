"""Frames that leave by one socket: what it takes is written, and the rest stays queued in order."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport import moves
from xpyd_sidecar.transport.tcp.fairness import IO_AT_ONCE, bytes_at_once, patience_ms

START_BYTES: Final = 1 << 20
"""Of a large frame that are written at once, while others are made; small ones leave together."""
VIEWS_AT_ONCE: Final = 64


class Late(partial[bytes]):
    """A header whose sum is made when its turn comes: what was read for it is then still in a cache when it leaves."""


class FrameWriter:
    """The queue of one connection; used on its loop's thread only."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._queue: deque[tuple[memoryview | Callable[[], bytes], Callable[[], None] | None]] = deque()
        self.words = 0
        """Frames that wait to leave and that nobody asks after: what this side answers and tells."""

    def __bool__(self) -> bool:
        """Whether bytes wait to leave."""
        return bool(self._queue)

    def add(self, header: bytes | Callable[[], bytes], payload: memoryview | bytes,
            sent: Callable[[], None] | None) -> None:
        """A frame behind those queued before; ``sent`` is called once, when it has left or never will."""
        if sent is None:
            self.words += 1
            sent = self._said
        self._queue.append((header if callable(header) else memoryview(header), None if len(payload) else sent))
        if len(payload):
            self._queue.append((memoryview(payload), sent))

    def start(self) -> bool:
        """Write the first of what is queued; whether something has left.

        A failure is met again by the loop: so it never closes the connection inside its owner's call.
        """
        with contextlib.suppress(OSError):
            first = [self._view(at)[:START_BYTES] for at in range(min(2, len(self._queue)))]
            self._left(self._sock.sendmsg(first))
            return True
        return False

    def flush(self) -> None:
        """Write now what the socket takes."""
        with contextlib.suppress(OSError):
            while self._queue:
                self._left(self._sock.sendmsg([self._view(0)]))

    def write(self, beside: bool) -> int:
        """One turn: bytes written, 0 where the socket takes none. ``beside``: the peer is on this host.

        Raises:
            OSError: the connection is broken.
        """
        moved = 0
        most = bytes_at_once(self._loop)
        with contextlib.suppress(BlockingIOError):
            while self._queue and moved < most:
                views: list[memoryview] = []
                size = 0
                once = most if moved else IO_AT_ONCE  # the first leave before the headers of all are made
                while size < once and len(views) < min(VIEWS_AT_ONCE, len(self._queue)):
                    if views and isinstance(self._queue[len(views)][0], Late):
                        break
                    views.append(self._view(len(views)))
                    size += len(views[-1])
                sent = moves.send(self._sock.fileno(), views, patience_ms(self._loop), self._loop.watch_fd, beside)
                moved += sent
                self._left(sent)
                if sent < size:
                    break  # the socket is full: asking again would only say so
        return moved

    def drop(self) -> None:
        """Nothing more will leave."""
        pending, self._queue = self._queue, deque()
        for _, sent in pending:
            if sent is not None:
                sent()

    def _said(self) -> None:
        self.words -= 1

    def _view(self, at: int) -> memoryview:
        view, sent = self._queue[at]
        if callable(view):
            view = memoryview(view())
            self._queue[at] = view, sent
        return view

    def _left(self, size: int) -> None:
        while size:
            view, sent = self._view(0), self._queue[0][1]
            if size < len(view):
                self._queue[0] = (view[size:], sent)
                return
            size -= len(view)
            self._queue.popleft()
            if sent is not None:
                sent()
