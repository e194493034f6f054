"""Bodies of frames (``kv.frames``), which go over the data link between two workers; in msgpack.

Structs tolerate unknown fields, so that a newer peer may add some within one version of the frames.

What msgspec has to know of a type is found out here, when this is imported, and not when the first body comes: it shows
other threads a type that it has not yet looked at whole, and one that reads by it ends the process (0.22.0: SIGSEGV).
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar, get_args

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import Cut
from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv.reach import ArraySpan
from xpyd_sidecar.kv.stores import Busy, Expect, Fetch

LinkName = Literal["tcp", "shm", "map", "nccl", "nixl"]
"""``map``: send the descriptor of shared memory, then decode says which it is."""


class Challenge(msgspec.Struct, frozen=True):
    """Body of CHALLENGE."""

    nonce: bytes
    incarnation: Incarnation


class Gpu(msgspec.Struct, frozen=True):
    """What tells whether two ranks can form an NCCL group."""

    name: str
    """The GPU's UUID: a group needs two different ones."""
    nccl: str
    """Version of the library; different ones are not known to understand each other."""
    piece: int
    """Bytes of the largest piece that this side takes."""


class NixlReader(msgspec.Struct, frozen=True):
    """What tells whether decode can read prefill's memory over NIXL, and how much of it at once."""

    version: str
    """Of the library, for messages: which versions understand each other is found out by reading."""
    piece: int
    """Bytes of the largest piece that decode takes."""
    pieces: int
    """How many it reads at once."""


class NixlMemory(msgspec.Struct, frozen=True):
    """Where prefill's copies lie, for a decode that reads them over NIXL in this session."""

    agent: str
    """Drawn anew in each life of prefill's."""
    metadata: bytes
    """NIXL's own description of that agent and its memory."""
    version: str
    base: int
    """Where the memory for copies begins in prefill's process."""
    size: int
    ticket_at: int
    """Where this session's ticket lies there."""
    ticket: bytes


class DataHello(msgspec.Struct, frozen=True):
    """Body of HELLO. ``proof``: HMAC over both nonces (``prove``)."""

    nonce: bytes
    instance: InstanceName
    incarnation: Incarnation
    expects: Incarnation
    rank: int
    proof: bytes
    host: str = ""
    """The kernel that decode runs on (its boot id); empty where decode wants no way within one host."""
    mailbox: str = ""
    """Where decode takes the descriptor of prefill's memory from (``transport.shm.mailbox``); empty: it has none."""
    gpu: Gpu | None = None
    """None: decode's transport is not nccl."""
    nixl: NixlReader | None = None
    """None: decode has no NIXL, or does not want it."""


class ShmMemory(msgspec.Struct, frozen=True):
    """Prefill's memory for copies, whose descriptor decode has been sent, and this session's ticket in it."""

    name: bytes
    """Drawn at random; its first bytes."""
    size: int
    """Of the whole."""
    ticket_at: int
    ticket: bytes
    mark: bytes
    """SHA-256 of the secret that decode finds in its mailbox."""


class DataWelcome(msgspec.Struct, frozen=True):
    """Body of WELCOME: prefill's own proof."""

    proof: bytes
    shared: ShmMemory | None = None
    """None: no way within one host."""
    reason: str = ""
    """Why there is no ``shared``, and no ``gpu``."""
    gpu: Gpu | None = None
    """Prefill's, if it can form a group with decode's."""
    nixl: NixlMemory | None = None
    """Prefill's memory, if decode may read it over NIXL."""


class LinkChoice(msgspec.Struct, frozen=True):
    """Body of LINK: how blocks are to travel; and of SHARED: that ``shm`` may be chosen now, or why not (``reason``)."""

    way: LinkName
    reason: str
    """Why not a better one."""
    secret: bytes = b""
    """With ``map``: what has come into decode's mailbox."""


class Group(msgspec.Struct, frozen=True):
    """Body of GROUP and UNGROUP. Prefill numbers the groups of a session, upwards."""

    number: int
    uid: bytes = b""
    """NCCL's id, by which decode joins as rank 1."""
    reason: str = ""
    """Of UNGROUP."""


class Offer(msgspec.Struct, frozen=True):
    """Body of OFFER: packed blocks, in the sender's memory, or (an offset) in shared memory, or (its number) in a group."""

    address: int
    size: int
    checksum: int | None
    """xxh3_64 of them; None: not covered. Of a group: None or not, since the sum travels with them."""


class Taken(msgspec.Struct, frozen=True):
    """Body of TAKEN: the memory of the oldest offer is not looked at again."""

    read: bool
    """False: it was offered in a group that is gone, offer it anew."""


class Ready(msgspec.Struct, frozen=True):
    """Body of READY: blocks ``first`` to ``first + count - 1`` of the prompt are missing, but for ``spans``."""

    first: int
    count: int
    regions: int
    """Arrays of blocks that are wanted. Without ``cuts``: all that prefill's rank has, or (0) none of it."""
    block_bytes: int
    """Bytes of one block of them together."""
    checksum: bool
    """Decode wants payloads covered."""
    cuts: tuple[Cut, ...] = ()
    """Where the rank's arrays are not wanted whole: which heads of which of them, in order."""
    takers: int = 1
    """How many decode ranks ask this prefill rank for this transfer."""
    window: int = 0
    """Decode pulls: send the first so many blocks, then what FETCH asks for. 0: send everything."""
    frame: int = 0
    """Bytes of the largest frame or offer that decode takes for this transfer, if more than usual."""
    spans: tuple[ArraySpan, ...] = ()
    """Arrays of which other blocks are missing, in order: those of windows, and states."""

    @property
    def for_others(self) -> bool:
        """Nothing is asked for; who takes from the same rank need not wait."""
        return not self.regions and self.takers > 1


class Reason(msgspec.Struct, frozen=True):
    """Body of REJECT, GONE and CANCEL."""

    outcome: Outcome
    reason: str
    retry: bool = False


Body = Challenge | DataHello | DataWelcome | LinkChoice | Group | Offer | Taken | Ready | Expect | Busy | Fetch | Reason
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_DECODERS: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in get_args(Body)}


def body(message: Body) -> bytes:
    """The msgpack body of a frame."""
    return _encoder.encode(message)


def read_body(raw: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """The body of a frame; ``kind``: one of ``Body``.

    Raises:
        MessageError: names the field that is missing or wrong.
    """
    try:
        found: T = _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MessageError(f"{kind.__name__}: {error}") from None
    return found
