"""What ranks and coordinator say to each other. Every frame is the whole state of its sender that matters to the receiver.

Version 1. Numbers only grow, so a receiver takes the larger of what it has and what it hears: a frame that is lost,
repeated or late does no harm, and the next one, a heartbeat at the latest, makes up for it.

    rank → coordinator     Want   (version, epoch, rank, local, step, vote, leaving)
    coordinator → ranks    Grant  (version, epoch, step, frozen, at, leave)
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from xpyd_sidecar.errors import ProtocolError

VERSION: Final = 1
LIMIT: Final = 64
"""Bytes that a frame may have."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Frame = TypeVar("_Frame", "Want", "Grant")


class Want(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank's state, as it is sent to the coordinator."""

    v: Count
    epoch: Count
    """Minted when the ranks meet; tells these ranks from earlier ones at the same address."""
    rank: Count
    local: Count
    """Forwards begun."""
    step: Count
    """All ranks shall run the forwards up to this one."""
    vote: Count = 0
    """The last pause (counted from 1) after which this rank asks for nothing more."""
    leaving: bool = False
    """The rank has nothing left to do and wants to end."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The join of what all ranks said."""

    v: Count
    epoch: Count
    step: Count
    frozen: Count = 0
    """The last pause for which every rank has voted."""
    at: Count = 0
    """The step at which it holds."""
    leave: bool = False
    """Every rank wants to end."""


_DECODERS: Final = {kind: msgspec.msgpack.Decoder(kind) for kind in (Want, Grant)}
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(frame: Want | Grant) -> bytes:
    """Bytes of a frame (msgpack)."""
    return _ENCODER.encode(frame)


def decode(data: bytes, kind: type[_Frame], peer: str) -> _Frame:
    """A frame from bytes.

    Raises:
        ProtocolError: it is none, or of another version; names the peer.
    """
    if len(data) > LIMIT:
        raise ProtocolError(peer, f"a frame of {len(data)} bytes")
    try:
        frame = _DECODERS[kind].decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(peer, f"no {kind.__name__}: {error}") from None
    assert isinstance(frame, kind)
    if frame.v != VERSION:
        raise ProtocolError(peer, f"frame of version {frame.v}, not {VERSION}")
    return frame
