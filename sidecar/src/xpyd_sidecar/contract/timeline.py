"""The timeline of one transfer: what engines note of it, and what ``GET /trace`` of a router makes of that.

Engines keep notes of their last ``KEPT`` transfers, as packed bytes; nobody decodes them until somebody asks. Times in
notes are seconds of the engine's own monotonic clock; in a ``Timeline`` they are seconds from the arrival of its request,
on the router's clock. Readers ignore what they do not know.
"""

from __future__ import annotations

from typing import Final

import msgspec

from xpyd_sidecar.contract.ids import Attempt, InstanceName, ServiceName, TransferId

KEPT: Final = 256
"""Transfers that an engine remembers, and requests that a router does."""
ASK_MAX: Final = 32
"""Transfers asked for at once."""
HEADER: Final = "xpyd-trace"
"""Of a request for ``/trace``: ``last N``, ``slowest N`` (by the whole request's TTFT) or ``id WORD``."""
PATH: Final = "/trace"

# --- what an engine notes ----------------------------------------------------------------------------------------------


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A forward of a rank, or bytes that moved (several pieces in one where there were many)."""

    at: float
    until: float
    size: int
    """Tokens of the whole batch, or payload bytes."""
    count: int = 1
    """Pieces: those of one layer and chunk, or of several."""
    link: str = ""


class TransferSide(msgspec.Struct, frozen=True):
    """What one rank notes of one side of a transfer, when that has ended there."""

    rank: int
    marks: dict[str, float]
    """Send: heard (that decode asks), done. Receive: asked, committed."""
    pieces: list[Span]
    """Bytes that decode has taken (from told of to taken), or that came."""
    forwards: list[Span]
    """Prefill: those whose KV was pushed. Decode: those since it asked, of other requests."""
    clock: float
    """Wall clock minus this process's monotonic clock."""


class First(msgspec.Struct, frozen=True):
    """Decode's first forward of a request whose KV came, on rank 0."""

    forward: Span
    clock: float


class Notes(msgspec.Struct, frozen=True):
    """The events that one engine has recorded of one side, prefill or decode, of one transfer."""

    transfer: TransferId
    sends: bool
    """Prefill's side, else decode's."""
    attempt: Attempt
    tokens: int
    """Of the prompt."""
    outcome: str
    """Empty while it is open."""
    marks: dict[str, float]
    """Prefill: arrived, announced, ended. Decode: arrived, announced, allocated, loaded, admitted, ended."""
    ranks: tuple[bytes, ...] = ()
    """``TransferSide`` of each, as msgpack."""
    first: bytes = b""
    """``First``, as msgpack."""


class TraceQuery(msgspec.Struct, frozen=True, tag="trace", tag_field="t"):
    """Control message: tell what you have noted of these transfers."""

    transfers: tuple[TransferId, ...]


class TracedAnswer(msgspec.Struct, frozen=True, tag="traced", tag_field="t"):
    """The answer."""

    instance: InstanceName
    now: float
    """The engine's monotonic clock as it answers."""
    clock: float
    """As ``TransferSide.clock``, of the process that answers."""
    notes: tuple[Notes, ...]


# --- what a router answers ---------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True):
    """Something that happened, or went on for ``seconds``."""

    row: str
    """Who: router, client, or the name of an instance."""
    name: str
    at: float
    """Seconds from the arrival of the request."""
    seconds: float = 0.0
    size: int = 0
    """Bytes, of what moved; tokens, of forwards."""
    note: str = ""


class Clock(msgspec.Struct, frozen=True):
    """How an instance's clock is put beside the router's: by the quickest of a few exchanges; within one host it is one."""

    instance: InstanceName
    within_s: float
    """Half of that exchange's time: the error is at most this; 0 within one host."""


class Timeline(msgspec.Struct, frozen=True):
    """What the router knows of one request that is over, with its events in order."""

    request: str
    transfer: TransferId
    outcome: str
    arrived_unix: float
    ttft_s: float | None
    total_s: float
    prompt_tokens: int
    """-1: not known."""
    tokens: int
    """Generated; -1: not known."""
    events: tuple[Event, ...]
    """In order of their beginnings."""


class Traces(msgspec.Struct, frozen=True):
    """The answer of ``GET /trace``."""

    service: ServiceName
    router: InstanceName
    remembered: int
    """Requests that the router could have told of."""
    found: tuple[Timeline, ...]
    clocks: tuple[Clock, ...] = ()
    silent: dict[str, str] = {}
    """Instances that told nothing, and why."""
