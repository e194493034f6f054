"""What the owner of membership and its workers say to each other, over one Unix socket per worker.

    owner ──▶ worker    BeginWorker, RosterTold, InstanceLost, InstanceLeaves, Away, StopWorker, OwnerAnswer
    worker ──▶ owner    Listening, WorkerFailed, LegVerdict, WorkerReport, Vitals, AskOwner

A frame is its length (4 bytes, big endian) and a msgpack map. Both ends are of one release and one user: a frame that
cannot be decoded is a bug, and closes the link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.router.api.bodies import RequestHash
from xpyd_sidecar.router.fleet.member import DeathVerdict, FleetMember, InstanceLeaves, InstanceLost
from xpyd_sidecar.router.observing.metrics import Vitals
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.serving.poison_ledger import Case, Conviction, Engine

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_encode = msgspec.msgpack.Encoder().encode


class RosterTold(msgspec.Struct, frozen=True, tag=True):
    """What the roster heard, the ``index``-th time."""

    index: int
    members: list[FleetMember]
    """Those that changed, as they are now."""
    gone: list[InstanceName] | None
    """Those that left; None: all others did, since this is the roster as it is."""


class BeginWorker(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to serve, and the roster as it is."""

    config: SidecarConfig
    number: int
    host: str
    port: int
    started: float
    told: RosterTold
    away: bool


class Away(msgspec.Struct, frozen=True, tag=True):
    """Send clients elsewhere, or take that back."""

    away: bool


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """Drain and end."""


class OwnerAnswer(msgspec.Struct, frozen=True, tag=True):
    """To an ``AskOwner``."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The worker takes clients."""


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """It cannot, for a reason that its settings give."""

    reason: str


class LegVerdict(msgspec.Struct, frozen=True, tag=True):
    """The data path could not connect (``reason``), or doubts that an engine lives (None)."""

    instance: InstanceName
    incarnation: Incarnation
    reason: str | None = None


class WorkerReport(msgspec.Struct, tag=True):
    """What happened since the last one; also a sign of life."""

    applied: int = 0
    """Events of the owner up to this index are applied."""
    legs: list[tuple[InstanceName, Incarnation, int]] = []
    """Open legs, of those whose number changed."""
    opened: list[tuple[int]] = []
    closed: list[tuple[Record, ...]] = []
    refused: list[tuple[str, str, str, int, str]] = []
    passed: list[tuple[str, str]] = []
    audited: list[tuple[InstanceName, InstanceName, str, float]] = []
    """What the observer was told: each the arguments of the method of this name."""
    in_flight: int = 0
    """Requests that are being served now; the next ones say what waits, what may be retried, and what is held because it
    may be what ends engines."""
    queued: int = 0
    retries_left: float = 0.0
    held: int = 0


class AskOwner(msgspec.Struct, frozen=True, tag=True):
    """A request that the owner answers."""

    number: int
    method: str
    path: str
    headers: dict[bytes, bytes]
    request_id: str
    private: bool = False
    """Nobody but the client reads its connection."""


# ---- requests that end engines (poison_sharing)


class Broke(msgspec.Struct, frozen=True, tag=True):
    """A leg of this request broke off there, as it does where the engine dies."""

    instance: InstanceName
    incarnation: Incarnation
    request: RequestHash


class EndedWell(msgspec.Struct, frozen=True, tag=True):
    """An engine answered this request, of which something was known, to its end."""

    request: RequestHash


class DeathJudged(msgspec.Struct, frozen=True, tag=True):
    """How an incarnation ended, or that it did not, and who is convicted for that; once more where that turns out later."""

    instance: InstanceName
    incarnation: Incarnation
    verdict: DeathVerdict
    conviction: Conviction | None


class WantsTurn(msgspec.Struct, frozen=True, tag=True):
    """A worker has suspects that must go alone, or has no more of them."""

    number: int
    """Of the wish, as the worker counts: a turn that was given to an earlier one is over."""
    wanted: bool


class SuspectTurn(msgspec.Struct, frozen=True, tag=True):
    """Suspects run in this worker now, and in no other, until it wants the turn no more."""

    number: int
    """Of the wish."""


class Evidence(msgspec.Struct, frozen=True, tag=True):
    """All that is known; it takes the place of what was."""

    cases: list[tuple[Engine, Case]]
    convicted: list[Conviction]


Down = (BeginWorker | RosterTold | InstanceLost | InstanceLeaves | Away | StopWorker | OwnerAnswer | Broke | EndedWell
        | DeathJudged | SuspectTurn | Evidence)
Up = Listening | WorkerFailed | LegVerdict | WorkerReport | Vitals | AskOwner | Broke | EndedWell | WantsTurn


def frame(message: Down | Up) -> bytes:
    """The bytes of a message."""
    body = _encode(message)
    return len(body).to_bytes(4, "big") + body


class WorkerLink(asyncio.Protocol, Generic[_T]):
    """One end. ``on_message`` gets what comes, in order; ``ended`` is done when the other end is gone."""

    def __init__(self, kind: type[_T], on_message: Callable[[_T], None]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self.on_message = on_message
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is ours."""
        self._transport = cast("asyncio.Transport", transport)

    @property
    def backlog(self) -> int:
        """Bytes that the other end has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: Down | Up | bytes) -> None:
        """Send a message, or frames that were made once for many; goes nowhere when the other end is gone."""
        if self._transport is not None:
            self._transport.write(message if isinstance(message, bytes) else frame(message))

    def close(self) -> None:
        """Close once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of some."""
        self._buffer += data
        buffer, at = self._buffer, 0
        try:
            while len(buffer) - at >= 4:
                end = at + 4 + int.from_bytes(buffer[at:at + 4], "big")
                if end > len(buffer):
                    break
                message = self._decode(bytes(buffer[at + 4:end]))
                at = end
                self.on_message(message)
        except Exception:
            logger.exception("a message between router processes failed")
            if self._transport is not None:
                self._transport.abort()
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        if exc is not None:
            logger.debug("link lost: %s", exc)
        self._transport = None
        if not self.ended.done():
            self.ended.set_result(None)
