"""A control connection without a socket, for either end of a session: what was said, and why it was closed."""

from __future__ import annotations

from typing import Any

from xpyd_sidecar.errors import PeerError
from xpyd_sidecar.kv.wire import NO_TRY, FrameKind


class SaidConnection:
    """In place of ``ControlConnection``. The peer is silent where a test sets ``is_silent``."""

    number = 1

    def __init__(self, loop: Any, sock: Any, peer: str, owner: Any) -> None:
        self.peer = peer
        self.said: list[tuple[FrameKind, Any]] = []
        self.errors: list[PeerError] = []
        self.last_in = self.last_out = 0.0
        self.writing = self.is_silent = False
        self._owner = owner

    def send(self, kind: FrameKind, body: Any = None, key: Any = NO_TRY) -> bytes:
        self.said.append((kind, body))
        return b""

    def silent(self, now: float, timeout: float) -> bool:
        return self.is_silent

    def close(self, error: PeerError) -> None:
        self.errors.append(error)
        self._owner.on_closed(error)
