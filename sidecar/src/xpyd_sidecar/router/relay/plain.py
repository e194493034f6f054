"""What a router does for every token, without shortcuts: the classes of ``_fast.c`` and the function of ``_answer.c``."""

from __future__ import annotations

import os
from typing import Any

REVISION = 8
"""Of what both have in common; grows with every change of ``_fast.c``."""
ANSWER_REVISION = 6
"""The same of ``_answer.c``."""
CAREFUL, PLAIN, NOTED = range(3)
"""How a stream's simple reads are recognized: not at all; whole events; events as they were learned."""


class Outlet:
    """Where bytes for a peer are written: the socket itself as far as it takes them, else the transport's buffer.

    ``direct``: nothing lies in that buffer, so the socket may be written. ``buffered``: something was put there since the
    flag was last cleared. ``relayed``: bytes that legs wrote without anybody's help since it was last cleared.
    """

    __slots__ = ("_transport", "buffered", "direct", "fd", "relayed")

    def __init__(self) -> None:
        self._transport: Any = None
        self.fd = -1
        self.direct = False
        self.buffered = False
        self.relayed = 0

    def open(self, transport: Any, fd: int) -> None:
        """Write there. ``fd`` is the transport's own; -1 where bytes are encrypted on their way."""
        self._transport = transport
        self.fd = fd
        self.direct = fd >= 0
        self.buffered = False

    def shut(self) -> None:
        """What is written from now on goes nowhere; the descriptor may be another connection's soon."""
        self._transport = None
        self.fd = -1
        self.direct = False

    def write(self, data: bytes) -> None:
        """Write all of it, now or when the peer takes it."""
        if self._transport is None or not data:
            return
        if self.direct:
            try:
                sent = os.write(self.fd, data)
            except OSError:  # full; or broken, which the transport finds out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
            self.direct = False
        self.buffered = True
        self._transport.write(data)


class Scanner:
    """What a stream of events knows of its events (``events.EventStream``)."""

    __slots__ = ("_clean", "_framed", "_last", "_lead", "_log", "_middle", "_prefix", "_shown", "_way")

    _clean: bool
    _framed: bool
    _way: int
    _prefix: bytes
    _middle: bytes
    _last: bytes
    _lead: bytes
    _shown: bytes
    _log: bytearray

    def quick(self, data: bytes, at: int = 0) -> tuple[bytes, int] | None:  # noqa: ARG002 (the compiled one's names)
        """What may be relayed of the simple events that begin at ``at``, and where they end.

        None: nothing was done, the first is none (here: none ever is).
        """
        return None

    def learn(self, data: bytes, at: int, to: int, chat: bool, log: bytearray) -> bool:  # noqa: ARG002
        """Recognize events like the one that is there in ``data``, without its line ends, and note them in ``log``.

        False: it says too little (here: always).
        """
        return False


class UpstreamReceiver:
    """The receiving side of a connection to an engine (``upstream``). ``last_at``: when bytes last came, in seconds."""

    __slots__ = ("last_at",)
    last_at: float

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self.on_bytes(data)

    def on_bytes(self, data: bytes) -> None:
        """All that no shortcut is for."""
        raise NotImplementedError

    def relay(self, stream: Scanner, outlet: Outlet) -> None:
        """Simple events of the stream go to the outlet from now on."""

    def relay_no_more(self) -> None:
        """Everything is a matter of ``on_bytes`` again."""


Whole = tuple[bytes, str, int, str, bytes, int, int, int, int, int, int, int]
"""What the client gets; of the first event id, time and model; the prompt's ids as JSON without brackets; whether an
event named a role, gave a finish reason, or was for usage alone; whether the stream ended; where the event stands that
others will be like, without its line ends; and how many ids the prompt has."""


def take(data: bytes, chat: bool, name: str, created: int, log: bytearray) -> Whole | None:  # noqa: ARG001 (_answer's)
    """Take ``data``, whole events of a stream or its rest, and note them in ``log``. None: nothing was done (here: ever).

    ``chat``: of which API. ``name`` and ``created``: of the events before; no name: there were none.
    """
    return None
