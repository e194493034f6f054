"""The frame of a data link: a fixed header, then ``length`` bytes.

    0        4   5   6     8        12                 28        32        36       40      44      48          56
    +--------+---+---+-----+--------+------------------+---------+---------+--------+-------+-------+-----------+
    | "xpyd" | v | k |flags| length | transfer (16 raw)| attempt |generat. | region | first | blocks| checksum  |
    +--------+---+---+-----+--------+------------------+---------+---------+--------+-------+-------+-----------+
      4s      u8  u8  u16    u32      16 bytes           u32       u32       u32      u32     u32     u64     little endian

- ``v``: wire version; magic and version keep their places in every version.
- ``k``: kind. Kind DATA carries ``blocks`` whole blocks of ``region``, from block ``first`` of the prompt on. The others
  carry a msgpack body (``kv.messages``) of at most ``BODY_MAX`` bytes.
- ``region``: one array of blocks of the engine (a layer, or the K or V half of one), in the order of registration.
- ``checksum``: xxh3_64 over the first 48 bytes and, when flag COVERED is set, the payload behind them. The header is always
  covered: bytes for the wrong place are as bad as wrong bytes.

Wire history
    1   first version
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.keys import Key

WIRE_VERSION: Final = 1
MAGIC: Final = b"xpyd"
BODY_MAX: Final = 64 << 10
FRAME_BYTES: Final = 1 << 20
"""What a data frame aims at; a single block may be larger."""
PAYLOAD_MAX: Final = 256 << 20
"""No block of any model is larger."""
COVERED: Final = 1

_HEAD = struct.Struct("<4sBBHI16sIIIII")
_SUM = struct.Struct("<Q")
HEADER_BYTES: Final = _HEAD.size + _SUM.size
NO_TRANSFER: Final = Key(TransferId("0" * 32), Attempt(0), 0)
"""The key of frames that belong to no transfer."""


class Kind(IntEnum):
    """What a frame is. D is the connecting side (decode), P the listening one (prefill)."""

    CHALLENGE = 1
    """P → D, first frame of a connection."""
    HELLO = 2
    """D → P."""
    WELCOME = 3
    """P → D."""
    REJECT = 4
    """Either way; the connection ends."""
    READY = 5
    """D → P: send this transfer."""
    DATA = 6
    """P → D."""
    DONE = 7
    """D → P: all is in place."""
    CANCEL = 8
    """D → P: no longer wanted."""
    GONE = 9
    """P → D: it will not come."""
    PING = 10
    """Either way: alive."""


class Header(NamedTuple):
    """A decoded header; its own checksum is not yet checked."""

    kind: Kind
    covered: bool
    length: int
    key: Key
    region: int
    first: int
    blocks: int
    checksum: int


class FrameError(ValueError):
    """Bytes that are no frame of this version, or that break a bound."""


def checksum(head: bytes | bytearray | memoryview, payload: bytes | bytearray | memoryview | None) -> int:
    """xxh3_64 over the first 48 header bytes and, if given, the payload."""
    digest = xxhash.xxh3_64(bytes(head[: _HEAD.size]))
    if payload is not None:
        digest.update(payload)
    return digest.intdigest()


def encode(kind: Kind, key: Key, payload: bytes | bytearray | memoryview, *, region: int = 0, first: int = 0,
           blocks: int = 0, cover: bool = True) -> bytes:
    """The 56 header bytes of a frame with ``payload``; ``cover``: the checksum covers the payload too."""
    head = _HEAD.pack(MAGIC, WIRE_VERSION, kind, COVERED if cover else 0, len(payload), bytes.fromhex(key.transfer),
                      key.attempt, key.generation, region, first, blocks)
    return head + _SUM.pack(checksum(head, payload if cover else None))


def decode(raw: bytes | bytearray | memoryview) -> Header:
    """The header in the first 56 bytes of ``raw``.

    Raises:
        FrameError: another protocol or version, an unknown kind, or a length above the kind's bound.
    """
    magic, version, kind, flags, length, transfer, attempt, generation, region, first, blocks = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise FrameError(f"not an xpyd data link (it begins with {magic!r})")
    if version != WIRE_VERSION:
        raise FrameError(f"data link wire version {version} is not {WIRE_VERSION}")
    try:
        known = Kind(kind)
    except ValueError:
        raise FrameError(f"unknown frame kind {kind}") from None
    if length > (PAYLOAD_MAX if known is Kind.DATA else BODY_MAX):
        raise FrameError(f"{known.name} frame of {length} bytes is over the bound")
    return Header(known, bool(flags & COVERED), length,
                  Key(TransferId(transfer.hex()), Attempt(attempt), generation), region, first, blocks,
                  _SUM.unpack_from(raw, _HEAD.size)[0])


def intact(header: Header, raw: bytes | bytearray | memoryview, payload: bytes | bytearray | memoryview) -> bool:
    """Whether header (and payload, where covered) are what was sent."""
    return checksum(raw, payload if header.covered else None) == header.checksum
