"""A request's body on its way from a client to whoever takes it, piece by piece.

    connection ──feed──▶ held (bounded) ──▶ taker.on_piece …  taker.on_whole
         ▲                                       │
         └── reads no more while ``blocked`` ◀── wait(True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.router.api.faults import HttpFault

HELD = 256 << 10
"""Bytes held while nobody takes them; reading stops beyond it."""


class BodyTaker(Protocol):
    """Who gets the body."""

    def on_piece(self, data: bytes) -> None:
        """The next bytes; never empty."""

    def on_body(self) -> None:
        """That was all."""

    def on_broken(self, fault: HttpFault) -> None:
        """The rest will not come as it should: the client made an error, or was too slow."""


class Upload:
    """A body that is handed on while it comes."""

    __slots__ = ("_held", "_on_blocked", "_size", "_taker", "_waits", "done", "fault", "length")

    def __init__(self, length: int | None, on_blocked: Callable[[], None]) -> None:
        """``length``: bytes announced, None where the client sends chunks. ``on_blocked``: ``blocked`` may have changed."""
        self.length = length
        self.done = False
        self.fault: HttpFault | None = None
        self._on_blocked = on_blocked
        self._held: list[bytes] = []
        self._size = 0
        self._taker: BodyTaker | None = None
        self._waits = False

    @property
    def blocked(self) -> bool:
        """Whether the client must wait."""
        return not self.done and (self._waits or self._size > HELD)

    # ---- the connection

    def feed(self, data: bytes) -> None:
        """The next bytes came."""
        if self._taker is not None:
            self._taker.on_piece(data)
        elif self.fault is None:
            self._held.append(data)
            self._size += len(data)

    def finish(self) -> None:
        """The body is whole."""
        self.done = True
        if self._taker is not None:
            self._taker.on_body()

    def fail(self, fault: HttpFault) -> None:
        """It will not be whole."""
        self.fault = fault
        self._held.clear()
        self._size = 0
        if self._taker is not None:
            self._taker.on_broken(fault)

    # ---- the taker

    def take(self, taker: BodyTaker) -> None:
        """Give everything to ``taker`` from now on: what is held at once."""
        self._taker = taker
        held, self._held, self._size = self._held, [], 0
        for data in held:
            taker.on_piece(data)
        if self.fault is not None:
            taker.on_broken(self.fault)
        elif self.done:
            taker.on_body()
        self._on_blocked()

    def wait(self, waits: bool) -> None:
        """Whether the taker can take no more at present."""
        self._waits = waits
        self._on_blocked()
