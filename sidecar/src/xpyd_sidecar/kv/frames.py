"""The frame of a data link: a fixed header, then ``length`` bytes.

    0        4   5   6     8        12                 28        32        36       40      44      48        56        64
    +--------+---+---+-----+--------+------------------+---------+---------+--------+-------+-------+---------+---------+
    | "xpyd" | v | k |flags| length | transfer (16 raw)| attempt |generat. | region | first | blocks| payload | header  |
    |        |   |   |     |        |                  |         |         |        |       |       | sum     | sum     |
    +--------+---+---+-----+--------+------------------+---------+---------+--------+-------+-------+---------+---------+
      4s      u8  u8  u16    u32      16 bytes           u32       u32       u32      u32     u32     u64       u64

    all numbers little endian

- ``v``: wire version; magic and version keep their places in every version.
- ``k``: kind. Kind DATA carries ``blocks`` whole blocks of ``region``, from block ``first`` of the prompt on; kind OFFER
  says where in the sender's memory such blocks lie. All but DATA carry a msgpack body (``kv.messages``) of at most
  ``BODY_MAX`` bytes.
- ``region``: one array of blocks of the engine (a layer, or the K or V half of one), in the order of registration.
- ``payload sum``: when flag COVERED is set, else 0. Of DATA: xxh3_64 over the sums of its pieces, 8 bytes each. A piece is
  at most 64 KiB of one block; its sum is xxh3_64 over it, with zeros up to 256 bytes where it is shorter. So pieces can be
  summed up by themselves: before it is known who asks for which blocks, and as they come. Of other kinds: xxh3_64 over the
  ``length`` bytes.
- ``header sum``: xxh3_64 over the first 56 bytes, always. It is checked before the header is used: bytes for the wrong
  place are as bad as wrong bytes, and a payload may be received right where it belongs. Only a payload whose header begins
  with the very 48 bytes that were expected (``known``) may come to its place first.

Wire history
    1   first version
    2   a sum of the header alone; OFFER, TAKEN, LINK, ARENA; EXPECT, STORE, ROOM, BUSY, FETCH;
        GROUP, POSTED, UNGROUP
    4   ``spans`` of READY: arrays may want other blocks than the others
    5   the link ``shm``: ``shared`` of WELCOME, SHARED; the ways within a host of before are gone
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.keys import Key

WIRE_VERSION: Final = 5
MAGIC: Final = b"xpyd"
BODY_MAX: Final = 64 << 10
FRAME_BYTES: Final = 1 << 20
"""What a data frame aims at; a single block may be larger."""
DIRECT_BYTES: Final = 4 << 20
"""The same where blocks are received right into their places: fewer frames for as many bytes."""
SUM_BYTES: Final = 64 << 10
"""Of a block that are summed up together."""
SUM_LEAST: Final = 256
"""Shorter pieces are summed up with zeros to this length."""
PAYLOAD_MAX: Final = 256 << 20
"""No block of any model is larger."""
COVERED: Final = 1

_HEAD = struct.Struct("<4sBBHI16sIIIIIQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES: Final = _HEAD.size + _SUM.size
NO_TRANSFER: Final = Key(TransferId("0" * 32), Attempt(0), 0)
"""The key of frames that belong to no transfer."""


class FrameKind(IntEnum):
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
    OFFER = 11
    """P → D: blocks lie in memory that D can read."""
    TAKEN = 12
    """D → P: the oldest offer has been read, or could not be."""
    LINK = 13
    """D → P, before its first READY: how blocks are to travel."""
    SHARED = 14
    """P → D, to LINK map: the descriptor of its memory was sent, or could not be."""
    EXPECT = 16
    """D → P: a transfer is waited for, without blocks yet; room for it may be asked for."""
    STORE = 17
    """P → D: is there room for blocks ``first``.. of ``region`` in the buffer?"""
    ROOM = 18
    """D → P, to STORE: yes, send them."""
    BUSY = 19
    """D → P, to STORE: not now."""
    FETCH = 20
    """D → P, of a transfer that decode pulls: more blocks are asked for."""
    GROUP = 21
    """P → D: join this NCCL group."""
    POSTED = 22
    """D → P: the oldest offer is being received in the group, send it there."""
    UNGROUP = 23
    """Either way: a group is not to be used any more."""


class Header(NamedTuple):
    """A decoded header."""

    kind: FrameKind
    covered: bool
    length: int
    key: Key
    region: int
    first: int
    blocks: int
    checksum: int
    """Of the payload."""


class FrameError(ValueError):
    """Bytes that are no frame of this version, or that break a bound."""


class HeaderError(FrameError):
    """A header that is not what was sent."""


def aim(frame: int) -> int:
    """Bytes that DATA frames aim at where READY says ``frame``."""
    return min(frame, DIRECT_BYTES) or FRAME_BYTES


def piece_sum(piece: bytes | memoryview) -> bytes:
    """The sum of one piece, as it is summed up again."""
    data = piece if len(piece) >= SUM_LEAST else bytes(piece) + bytes(SUM_LEAST - len(piece))
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def sums(data: bytes | bytearray | memoryview, block: int) -> bytes:
    """The sums of the pieces of packed blocks of ``block`` bytes, one after the other.

    Raises:
        ValueError: not whole blocks.
    """
    if block < 1 or len(data) % block:
        raise ValueError("not whole blocks")
    view = memoryview(data).cast("B")
    return b"".join(piece_sum(view[at + start:at + min(start + SUM_BYTES, block)])
                    for at in range(0, len(view), block) for start in range(0, block, SUM_BYTES))


def total(sums: bytes) -> int:
    """The payload sum of DATA whose pieces have these sums."""
    return xxhash.xxh3_64_intdigest(sums)


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """xxh3_64 over bytes."""
    return xxhash.xxh3_64_intdigest(payload)


def encode(kind: FrameKind, key: Key, payload: bytes | bytearray | memoryview, *, region: int = 0, first: int = 0,
           blocks: int = 0, cover: bool = True, known: int | None = None) -> bytes:
    """The header bytes of a frame with ``payload``; ``cover``: with a checksum of the payload; ``known``: that one."""
    of = 0
    if cover:
        of = known if known is not None else checksum(payload) if kind is not FrameKind.DATA else total(
            sums(payload, len(payload) // max(1, blocks)))
    head = _HEAD.pack(MAGIC, WIRE_VERSION, kind, COVERED if cover else 0, len(payload), bytes.fromhex(key.transfer),
                      key.attempt, key.generation, region, first, blocks, of)
    return head + _SUM.pack(checksum(head))


def known(header: Header) -> bytes:
    """What the bytes of a header begin with: all but the sums."""
    key = header.key
    return _HEAD.pack(MAGIC, WIRE_VERSION, header.kind, COVERED if header.covered else 0, header.length,
                      bytes.fromhex(key.transfer), key.attempt, key.generation, header.region, header.first, header.blocks,
                      0)[:-_SUM.size]


def decode(raw: bytes | bytearray | memoryview) -> Header:
    """The header in the first ``HEADER_BYTES`` of ``raw``.

    Raises:
        FrameError: another protocol or version, an unknown kind, or a length above the kind's bound.
        HeaderError: it is not what was sent.
    """
    magic, version, kind, flags, length, transfer, attempt, generation, region, first, blocks, of = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise FrameError(f"not an xpyd data link (it begins with {magic!r})")
    if version != WIRE_VERSION:
        raise FrameError(f"data link wire version {version} is not {WIRE_VERSION}")
    if checksum(bytes(raw[: _HEAD.size])) != _SUM.unpack_from(raw, _HEAD.size)[0]:
        raise HeaderError("a frame's header with a wrong checksum")
    try:
        known = FrameKind(kind)
    except ValueError:
        raise FrameError(f"unknown frame kind {kind}") from None
    if length > (PAYLOAD_MAX if known is FrameKind.DATA else BODY_MAX):
        raise FrameError(f"{known.name} frame of {length} bytes is over the bound")
    return Header(known, bool(flags & COVERED), length,
                  Key(TransferId(transfer.hex()), Attempt(attempt), generation), region, first, blocks, of)


def confirmed(header: Header, raw: bytes) -> Header:
    """The header in ``raw``, which begins with what is ``known`` of ``header``.

    Raises:
        HeaderError: it is not what was sent.
    """
    if checksum(raw[:_HEAD.size]) != _SUM.unpack_from(raw, _HEAD.size)[0]:
        raise HeaderError("a frame's header with a wrong checksum")
    return header._replace(checksum=_SUM.unpack_from(raw, _HEAD.size - _SUM.size)[0])


def intact(header: Header, payload: bytes | bytearray | memoryview) -> bool:
    """Whether the payload of a frame other than DATA is what was sent, where it is covered."""
    return not header.covered or checksum(payload) == header.checksum
