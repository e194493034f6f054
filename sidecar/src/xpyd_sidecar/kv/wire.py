"""Frames of a session's control connection as bytes, without a socket: in clear during the handshake, then sealed.

    0        4     5      6       8          12
    +--------+-----+------+-------+----------+--------------------------------------------------------+
    | "xpyd" | ver | kind | flags |  length  | payload: transfer (16 raw) | attempt u32 | generation  |
    |        | u8  | u8   | u16   |  u32     |          u32 | body (msgpack, ``kv.session_bodies``)   |
    +--------+-----+------+-------+----------+--------------------------------------------------------+
      all numbers little endian; magic and version keep their places in every version

With flag SEALED the payload is encrypted and authenticated (``kv.session_keys``), the first 12 bytes of the frame are
authenticated with it, and it is 16 bytes longer. Only CHALLENGE, HELLO, a REJECT that answers one of them, and NAME may
come in clear, and nothing may once both ends have keys. KV is not sent in frames: each kind of link transfers it by itself.
NAME is the first frame on a stripe (another TCP connection of the session, for KV); its body is the name, not msgpack.

Wire history
    1 to 5   one connection for frames and KV, with xxh3 sums; proofs covered who the two ends are, and not what they said
    6        sealed frames; manifests
    7        KV over TCP is requested and sent on stripes, which begin with NAME; FETCH is used for NCCL groups alone
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.session_keys import TAG_BYTES, SealError, Sealing

WIRE_VERSION: Final = 7
MAGIC: Final = b"xpyd"
BODY_MAX: Final = 64 << 10
SUMS_MAX: Final = 1 << 20
"""Of a body of SUMS; a manifest has no more sums than these are."""
SEALED: Final = 1
NO_TRY: Final = Key(TransferId("0" * 32), Attempt(0), 0)
"""Of frames that belong to no try."""

_PREFIX: Final = struct.Struct("<4sBBHI")
_KEY: Final = struct.Struct("<16sII")
PREFIX_BYTES: Final = _PREFIX.size
KEY_BYTES: Final = _KEY.size


class FrameKind(IntEnum):
    """The kinds of frames. D is the end that connects (decode), P the end that listens (prefill)."""

    CHALLENGE = 1
    """P → D, the first one."""
    HELLO = 2
    """D → P: who it is, and the proof."""
    ABLE = 3
    """D → P: over which links it can fetch."""
    WELCOME = 4
    """P → D: what it has for these."""
    REJECT = 5
    """P → D: no session; the connection ends."""
    LINK = 6
    """D → P: what it fetches over."""
    SHARED = 7
    """P → D, to LINK map: the descriptor of its memory was sent, or could not be."""
    ASK = 8
    """D → P: what is there of this try?"""
    MANIFEST = 9
    """P → D: these copies are."""
    SUMS = 10
    """P → D: of a manifest."""
    PRESS = 11
    """P → D: take this manifest soon, the store is short."""
    FETCH = 12
    """D → P: send these bytes in a group."""
    GOES_ON = 13
    """D → P: a fetch that takes long."""
    TAKEN = 14
    """D → P: the bytes of a manifest are here, or not wanted."""
    BUSY = 15
    """D → P, to PRESS: no room."""
    DONE = 16
    """D → P: all that was wanted of the try is in place and right."""
    CANCEL = 17
    """D → P: the try is not wanted any more."""
    GONE = 18
    """P → D: the try will not come."""
    PING = 19
    """Either way: alive."""
    GROUP = 20
    """D → P: make an NCCL group; P → D: join this one."""
    SENT = 21
    """P → D: a fetch is sent in the group, or its manifest is not there any more, and what is sent means nothing."""
    UNGROUP = 22
    """Either way: a group is not to be used any more."""
    NAME = 23
    """D → P, the first one on a stripe: which it is. What follows on it are no frames."""


CLEAR: Final = frozenset({FrameKind.CHALLENGE, FrameKind.HELLO, FrameKind.REJECT, FrameKind.NAME})
"""What is said before both sides have keys."""


class Frame(NamedTuple):
    """A received frame, decrypted if it was sealed: kind, the try of a transfer that it concerns (or ``NO_TRY``), body."""

    kind: FrameKind
    key: Key
    body: bytes


class WireError(ValueError):
    """Received bytes that are no frame of ``WIRE_VERSION``, may not come in clear or sealed now, or fail authentication."""


class Wire:
    """Codec of one end of a control connection: makes frames from received bytes, and bytes to send from frames."""

    def __init__(self) -> None:
        self._in = bytearray()
        self._opening: Sealing | None = None
        self._sealing: Sealing | None = None

    def seal(self, sealing: Sealing, opening: Sealing) -> None:
        """Seal every later frame that is sent by ``sealing``, and require that ``opening`` opens every one received."""
        self._sealing, self._opening = sealing, opening

    def frame(self, kind: FrameKind, body: bytes = b"", key: Key = NO_TRY) -> bytes:
        """Return the bytes of one frame, to be sent in the order of the calls.

        Raises:
            ValueError: the body is longer than ``body_max`` allows.
            SealError: the key has sealed as many frames as it may (``session_keys.FRAMES_MAX``).
        """
        if len(body) > body_max(kind):
            raise ValueError(f"a body of {len(body)} bytes in {kind.name}")
        clear = _KEY.pack(bytes.fromhex(key.transfer), key.attempt, key.generation) + body
        if self._sealing is None:
            return _PREFIX.pack(MAGIC, WIRE_VERSION, kind, 0, len(clear)) + clear
        head = _PREFIX.pack(MAGIC, WIRE_VERSION, kind, SEALED, len(clear) + TAG_BYTES)
        return head + self._sealing.seal(clear, head)

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Take received bytes, and yield each frame that is complete with them.

        ``seal`` may be called between two frames, and counts for the next one.

        Raises:
            WireError: the bytes are no frame, its length is out of bounds, or it may not come in clear or sealed now.
        """
        self._in += data
        while len(self._in) >= PREFIX_BYTES:
            kind, sealed, length = self._prefix()
            end = PREFIX_BYTES + length
            if len(self._in) < end:
                return
            head, payload = bytes(self._in[:PREFIX_BYTES]), bytes(self._in[PREFIX_BYTES:end])
            del self._in[:end]
            yield self._opened(kind, head, payload) if sealed else _read(kind, payload)

    @property
    def waiting(self) -> int:
        """Number of received bytes that ``feed`` has not yielded as a frame."""
        return len(self._in)

    def _prefix(self) -> tuple[FrameKind, bool, int]:
        kind, sealed, length = _prefix_of(self._in)
        if sealed != (self._opening is not None) or not (sealed or kind in CLEAR):
            raise WireError(f"{kind.name} {'sealed' if sealed else 'in clear'}")
        return kind, sealed, length

    def _opened(self, kind: FrameKind, head: bytes, payload: bytes) -> Frame:
        assert self._opening is not None
        try:
            return _read(kind, self._opening.open(payload, head))
        except SealError as error:
            raise WireError(f"{kind.name}: {error}") from None


def prefix_of(data: bytes | bytearray) -> tuple[FrameKind, int]:
    """Return the kind of a frame in clear and the length of its payload in bytes, from its first 12 bytes.

    Raises:
        WireError: no frame of ``WIRE_VERSION`` begins so, it is sealed, or its length is out of bounds.
    """
    kind, sealed, length = _prefix_of(data)
    if sealed:
        raise WireError(f"{kind.name} sealed")
    return kind, length


def body_max(kind: FrameKind) -> int:
    """Return the greatest length of a frame's body, in bytes."""
    return SUMS_MAX if kind is FrameKind.SUMS else BODY_MAX


def _read(kind: FrameKind, clear: bytes) -> Frame:
    transfer, attempt, generation = _KEY.unpack_from(clear)
    return Frame(kind, Key(TransferId(transfer.hex()), Attempt(attempt), generation), clear[KEY_BYTES:])


def _prefix_of(data: bytes | bytearray) -> tuple[FrameKind, bool, int]:
    """Return the kind of a frame, whether it is sealed, and its payload's length in bytes. Raises WireError: it is none."""
    magic, version, number, flags, length = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"not an xpyd data link (it begins with {bytes(magic)!r})")
    if version != WIRE_VERSION:
        raise WireError(f"data link wire version {version} is not {WIRE_VERSION}")
    try:
        kind = FrameKind(number)
    except ValueError:
        raise WireError(f"unknown frame kind {number}") from None
    if flags & ~SEALED:
        raise WireError(f"{kind.name} with flags {flags:#x}")
    sealed = bool(flags & SEALED)
    if not KEY_BYTES <= length - sealed * TAG_BYTES <= KEY_BYTES + body_max(kind):
        raise WireError(f"{kind.name} of {length} bytes is out of bounds")
    return kind, sealed, length
