"""Messages of the KV plane, and the version in which they are spoken.

Two channels carry them:

- control: ZMQ with CURVE, DEALER (prefill's scheduler side) to ROUTER (decode's). A message is two parts: the prefix, whose
  layout never changes, and a msgpack body. So a peer of another version is answered by name, and the transfer that it
  speaks of fails at once, although its body cannot be read.

      0        4         6               22         26
      +--------+---------+----------------+---------+
      | "xpyd" | version | transfer (raw) | attempt |      little endian; zeros where no transfer is meant
      +--------+---------+----------------+---------+

- data: the bodies of frames (``kv.frames``) between the workers.

Structs tolerate unknown fields, so that a newer peer may add some within one version.

Wire history
    1   first version
        later in it, answered with REJECT by who does not know it: ``trace``
        later in it, ignored by who does not know it: ``cached`` of ``announce``, ``work`` of ``ping``, ``speculation`` of
        ``hello`` (a draft's arrays are then as those of any other layer, which only one side has)
    2   ``handed`` of ``announce``; ``reach`` of the kinds of ``hello``
"""

from __future__ import annotations

import struct
from typing import Final, Literal, TypeVar

import msgspec

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.contract.speculation import Speculation
from xpyd_sidecar.contract.timeline import ASK_MAX, Asked, Told
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Cut, Geometry
from xpyd_sidecar.kv.reach import ArraySpan
from xpyd_sidecar.kv.stores import Busy, Expect, Fetch

WIRE_VERSION: Final = 2
MAGIC: Final = b"xpyd"
MESSAGE_MAX: Final = 64 << 10
RANKS_MAX: Final = 1024
WORK_MAX: Final = 512
"""Tries that one PING speaks of: they fit into a message."""

_PREFIX = struct.Struct("<4sH16sI")
_NONE: Final = TransferId("0" * 32)


class MessageError(ValueError):
    """Bytes that are no message of this protocol."""


class Prefix(msgspec.Struct, frozen=True):
    """What can be read of a message of any version."""

    version: int
    transfer: TransferId
    attempt: Attempt


# --- control channel ---------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello", tag_field="t"):
    """Prefill's first message on a connection: who it is and what its KV is like."""

    instance: InstanceName
    incarnation: Incarnation
    expects: Incarnation
    """The decode incarnation that the router named; another one answers REJECT."""
    fingerprint: FingerprintFields
    parallel: Parallel
    geometry: Geometry
    """The arrays of its ranks, by which decode maps them to its own."""
    speculation: Speculation = Speculation()
    """What it drafts with (``kv.speculation``)."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome", tag_field="t"):
    """Decode accepts the peer."""

    instance: InstanceName
    incarnation: Incarnation


class Reject(msgspec.Struct, frozen=True, tag="reject", tag_field="t"):
    """Decode refuses the peer, with the differing field."""

    outcome: Outcome
    reason: str


class Rank(msgspec.Struct, frozen=True):
    """Where one prefill rank listens, and which life of it."""

    address: HostPort
    incarnation: Incarnation


class Announce(msgspec.Struct, frozen=True, tag="announce", tag_field="t"):
    """Prefill has scheduled a transfer: its KV will come when asked for."""

    transfer: TransferId
    attempt: Attempt
    generation: int
    identity: bytes
    """``kv.identity``."""
    tokens: int
    """Prompt length."""
    handed: int
    """Tokens whose KV comes: all but the last, or the last few (``kv.reach``)."""
    data: tuple[Rank, ...]
    """Prefill's ranks, in rank order."""
    cached: int = -1
    """Tokens of the prompt that prefill had in its cache; -1: it does not say."""

    @property
    def key(self) -> Key:
        """The try it speaks of."""
        return Key(self.transfer, self.attempt, self.generation)


class Gone(msgspec.Struct, frozen=True, tag="gone", tag_field="t"):
    """Prefill will not deliver this try. With ``retry`` another try may follow (its leg was aborted): decode waits on."""

    transfer: TransferId
    attempt: Attempt
    generation: int
    outcome: Outcome
    reason: str
    retry: bool

    @property
    def key(self) -> Key:
        """The try it speaks of."""
        return Key(self.transfer, self.attempt, self.generation)


class Drop(msgspec.Struct, frozen=True, tag="drop", tag_field="t"):
    """Decode does not want this try: prefill lets go of its copies."""

    transfer: TransferId
    attempt: Attempt
    generation: int
    outcome: Outcome
    reason: str

    @property
    def key(self) -> Key:
        """The try it speaks of."""
        return Key(self.transfer, self.attempt, self.generation)


class WorkDone(msgspec.Struct, frozen=True, array_like=True):
    """What prefill has done for a try until now; both numbers only grow."""

    transfer: TransferId
    attempt: Attempt
    generation: int
    tokens: int
    """Prompt tokens computed for it, again after a preemption."""
    steps: int
    """Steps with work for others that have ended while it waited in prefill's queue, announced but not run."""

    @property
    def key(self) -> Key:
        """The try it speaks of."""
        return Key(self.transfer, self.attempt, self.generation)


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="t"):
    """Prefill asks whether decode still lives. With ``work`` prefill's scheduler says in a step what it has done."""

    seq: int
    work: tuple[WorkDone, ...] = ()


class Pong(msgspec.Struct, frozen=True, tag="pong", tag_field="t"):
    """The answer, with the incarnation that gives it."""

    seq: int
    incarnation: Incarnation


ToDecode = Hello | Announce | Gone | Ping
ToPrefill = Welcome | Reject | Drop | Pong
Control = ToDecode | ToPrefill | Asked | Told
"""``Asked`` and ``Told`` are a router's: they need no HELLO."""

# --- bodies of data frames ---------------------------------------------------------------------------------------------


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

    way: Literal["tcp", "process_vm", "arena", "make_arena", "nccl", "nixl"]
    """``make_arena``: answer ARENA, then this side says which it is."""
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


class Reason(msgspec.Struct, frozen=True):
    """Body of REJECT, GONE and CANCEL."""

    outcome: Outcome
    reason: str
    retry: bool = False


Body = (Challenge | DataHello | DataWelcome | LinkChoice | Arena | Group | Offer | Taken | Ready | Expect | Busy | Fetch
        | Reason)
T = TypeVar("T")
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_encoder = msgspec.msgpack.Encoder()


def pack(message: Control) -> tuple[bytes, bytes]:
    """A control message as its two parts."""
    transfer = getattr(message, "transfer", _NONE)
    attempt = getattr(message, "attempt", 0)
    return _PREFIX.pack(MAGIC, WIRE_VERSION, bytes.fromhex(transfer), attempt), _encoder.encode(message)


def prefix(raw: bytes) -> Prefix:
    """Read the first part of a control message, of any version.

    Raises:
        MessageError: it is none.
    """
    if len(raw) < _PREFIX.size or raw[:4] != MAGIC:
        raise MessageError("not an xpyd control message")
    _, version, transfer, attempt = _PREFIX.unpack_from(raw)
    return Prefix(version, TransferId(transfer.hex()), Attempt(attempt))


def unpack(raw: bytes) -> Control:
    """Read the second part of a control message of this version.

    Raises:
        MessageError: names the field that is missing or wrong.
    """
    try:
        message: Control = _control_decoder.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MessageError(f"control message: {error}") from None
    if isinstance(message, Announce):
        if message.tokens < 1 or message.attempt < 1 or message.generation < 1 or len(message.identity) != 32:
            raise MessageError("announce: tokens, attempt and generation must be at least 1 and identity 32 bytes")
        if not 0 < message.handed <= message.tokens:
            raise MessageError(f"announce.handed: {message.handed} of {message.tokens} tokens")
        if not 0 < len(message.data) <= RANKS_MAX:
            raise MessageError(f"announce.data: {len(message.data)} addresses")
    if isinstance(message, Ping) and len(message.work) > WORK_MAX:
        raise MessageError(f"ping.work: {len(message.work)} transfers at once, over {WORK_MAX}")
    if isinstance(message, Asked) and len(message.transfers) > ASK_MAX:
        raise MessageError(f"trace.transfers: {len(message.transfers)} are asked for at once, over {ASK_MAX}")
    return message


def body(message: Body) -> bytes:
    """The msgpack body of a frame."""
    return _encoder.encode(message)


def read_body(raw: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """The body of a frame.

    Raises:
        MessageError: names the field that is missing or wrong.
    """
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MessageError(f"{kind.__name__}: {error}") from None
