"""What is said when a reader joins, what handles hold, and the heads of messages to readers on other hosts.

A handle is bytes for the caller to hand on, over a channel that it trusts: who has it can join in the name of any reader.

Wire history
    1   first version. A handle may have ``second`` since; a reader that does not know it is not seen when it is silent
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import msgspec

from xpyd_sidecar.broadcast.layout import Layout
from xpyd_sidecar.errors import Incompatible, ProtocolError

WIRE_VERSION: Final = 1
NOTE_MAX: Final = 32 << 10
"""Bytes that a reader can hand to the writer when it joins."""
CONTROL_MAX: Final = 64 << 10

_HEAD = struct.Struct("<4sIQ")
_MAGIC: Final = b"xpbq"


class Handle(msgspec.Struct, frozen=True):
    """How to join. ``remote`` readers use ``endpoint``, the others ``door``."""

    version: int
    queue: str
    """Name of the queue, for messages to people."""
    token: bytes
    """Shown by whoever joins."""
    layout: Layout
    local: tuple[str, ...]
    """Readers of this host, by rank in the ring."""
    door: str
    """Abstract unix socket."""
    remote: tuple[str, ...]
    endpoint: str
    secure: bool
    """CURVE with the service's key."""
    message_max: int
    second: str = ""
    """Where remote readers connect a second time; empty: nowhere."""


class QueueHello(msgspec.Struct, frozen=True, tag="hello", tag_field="t"):
    """A reader's first message."""

    version: int
    token: bytes
    name: str
    note: bytes


class QueueWelcome(msgspec.Struct, frozen=True, tag="welcome", tag_field="t"):
    """The writer takes the reader. A local one finds the ring's descriptor beside it."""


class QueueRefuse(msgspec.Struct, frozen=True, tag="refuse", tag_field="t"):
    """The writer does not take it, or drops it later on."""

    reason: str


class RingMapped(msgspec.Struct, frozen=True, tag="mapped", tag_field="t"):
    """The reader has mapped the ring (a remote one: has heard the welcome), so it will see every message."""


class SideSegment(msgspec.Struct, frozen=True, tag="side", tag_field="t"):
    """A side segment, with its descriptor beside it; ``replaces`` is used no more (0: none)."""

    number: int
    replaces: int


class QueueTaken(msgspec.Struct, frozen=True, tag="taken", tag_field="t"):
    """A remote reader has given back all messages up to this one."""

    number: int


class Bye(msgspec.Struct, frozen=True, tag="bye", tag_field="t"):
    """To a remote reader: the writer has closed; ``last`` is the number of its last message."""

    last: int


Control = QueueHello | QueueWelcome | QueueRefuse | RingMapped | SideSegment | QueueTaken | Bye
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_handles = msgspec.msgpack.Decoder(Handle)


class _Version(msgspec.Struct, frozen=True):
    version: int


_versions = msgspec.msgpack.Decoder(_Version)


def pack(message: Control | Handle) -> bytes:
    """A message of the handshake as bytes."""
    return _encoder.encode(message)


def unpack(peer: str, raw: bytes) -> Control:
    """Read what a peer said.

    Raises:
        ProtocolError: it is no message of this protocol.
    """
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(peer, f"not a message of the broadcast queue: {error}") from None


def expect(peer: str, raw: bytes, kind: type[T]) -> T:
    """Read what a peer said, where only one kind is allowed.

    Raises:
        ProtocolError: it is another one, or none.
    """
    message = unpack(peer, raw)
    if not isinstance(message, kind):
        raise ProtocolError(peer, f"sent {type(message).__name__} instead of {kind.__name__}")
    return message


def read_handle(raw: bytes) -> Handle:
    """Read a handle; its version is looked at first.

    Raises:
        Incompatible: it is of another version.
        ProtocolError: it is none.
    """
    try:
        version = _versions.decode(raw).version
        if version == WIRE_VERSION:
            return _handles.decode(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError("handle", f"not a handle of a broadcast queue: {error}") from None
    raise Incompatible("handle", f"broadcast version {WIRE_VERSION} here, {version} there")


def pack_number(number: int, parts: int) -> bytes:
    """First part of a message to remote readers: its number, and how many parts follow."""
    return _HEAD.pack(_MAGIC, parts, number)


def read_number(peer: str, raw: bytes) -> tuple[int, int] | None:
    """Number and parts of a message; None where it is a control message.

    Raises:
        ProtocolError: it has the magic and another size.
    """
    if raw[:4] != _MAGIC:
        return None
    if len(raw) != _HEAD.size:
        raise ProtocolError(peer, f"the head of a message has {len(raw)} bytes, not {_HEAD.size}")
    _, parts, number = _HEAD.unpack(raw)
    return number, parts
