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

LinkName = Literal["tcp", "process_vm", "arena", "make_arena", "nccl", "nixl"]
"""``make_arena``: answer ARENA, then decode says which it is."""


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
    gpu: Gpu | None = None
    """None: decode has none for NCCL, or does not want it."""
    nixl: NixlReader | None = None
    """None: decode has no NIXL, or does not want it."""


class Near(msgspec.Struct, frozen=True):
    """What shows a peer on the same host whether it can read prefill's memory: a ticket, and where it lies."""

    pid: int
    address: int
    ticket: bytes


class DataWelcome(msgspec.Struct, frozen=True):
    """Body of WELCOME: prefill's own proof."""

    proof: bytes
    near: Near | None = None
    """None: no way within one host."""
    reason: str = ""
    """Why there is no ``near``, and no ``gpu``."""
    gpu: Gpu | None = None
    """Prefill's, if it can form a group with decode's."""
    nixl: NixlMemory | None = None
    """Prefill's memory, if decode may read it over NIXL."""


class LinkChoice(msgspec.Struct, frozen=True):
    """Body of LINK: how blocks are to travel."""

    way: LinkName
    reason: str
    """Why not a better one."""


class Arena(msgspec.Struct, frozen=True):
    """Body of ARENA: a file in the folder that both sides share."""

    name: str
    """Empty: none could be made."""
    size: int
    ticket: bytes
    """Its first bytes."""
    reason: str = ""


class Group(msgspec.Struct, frozen=True):
    """Body of GROUP and UNGROUP. Prefill numbers the groups of a session, upwards."""

    number: int
    uid: bytes = b""
    """NCCL's id, by which decode joins as rank 1."""
    reason: str = ""
    """Of UNGROUP."""


class Within(msgspec.Struct, frozen=True):
    """Where an offer lies in memory of prefill's that a peer on its host may map."""

    name: bytes
    """Of the memory, drawn at random; its first bytes."""
    fd: int
    """Prefill's descriptor of it."""
    size: int
    """Of the whole, its name included."""
    offset: int


class Offer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of OFFER: packed blocks, in the sender's memory, or (an offset) in the arena, or (its number) in a group."""

    address: int
    size: int
    checksum: int | None
    """xxh3_64 of them; None: not covered. Of a group: None or not, since the sum travels with them."""
    within: Within | None = None
    """None: in memory that cannot be mapped."""


class Taken(msgspec.Struct, frozen=True):
    """Body of TAKEN: the memory of the oldest offer is not looked at again."""

    read: bool
    """False: it cannot be read, send it otherwise."""
    why: str = ""
    """It cannot be read."""
    arena: bool = False
    """Decode would map an arena instead."""


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


Body = (Challenge | DataHello | DataWelcome | LinkChoice | Arena | Group | Offer | Taken | Ready | Expect | Busy | Fetch
        | Reason)
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
