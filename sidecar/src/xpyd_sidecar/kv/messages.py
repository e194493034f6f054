"""Messages by which prefill and decode engines agree on transfers of KV, and the version of their format.

Two channels carry them:

- control: ZMQ with CURVE, DEALER (prefill's scheduler side) to ROUTER (decode's). A message is two parts: the prefix, whose
  layout never changes, and a msgpack body. So decode can reject a peer of another version with both versions named, and
  fail the transfer of its message at once, although it cannot read the body.

      0        4         6               22         26
      +--------+---------+----------------+---------+
      | "xpyd" | version | transfer (raw) | attempt |      little endian; zeros where no transfer is meant
      +--------+---------+----------------+---------+

- data: sealed frames (``kv.wire``) between the workers; their bodies are in ``kv.session_bodies`` and ``kv.manifests``.

Structs tolerate unknown fields, so that a newer peer may add some within one version.

Wire history
    1   first version
    2   ``handed`` in ``Announce``; ``reach`` in the array kinds of ``Hello.geometry``
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import TRANSFER_ID, Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.contract.speculation import Speculation
from xpyd_sidecar.contract.timeline import ASK_MAX, TracedAnswer, TraceQuery
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Geometry

WIRE_VERSION: Final = 2
MAGIC: Final = b"xpyd"
MESSAGE_MAX: Final = 64 << 10
RANKS_MAX: Final = 1024
WORK_MAX: Final = 512
"""Tries that one PING speaks of: they fit into a message."""

_PREFIX = struct.Struct("<4sH16sI")
_NONE: Final = TransferId("0" * 32)
_TRIES: Final = range(1, 1 << 32)
"""Of attempts and generations: what has room in a prefix and in a frame's header."""


class MessageError(ValueError):
    """Received bytes that are no message of this protocol, or one with a value that is out of bounds."""


class Prefix(msgspec.Struct, frozen=True):
    """First part of a control message, which can be read whatever its version is."""

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
    """What it drafts with (``kv.peers.draft_rule``)."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome", tag_field="t"):
    """Decode accepts the prefill engine that sent ``Hello``; the fields name the decode engine."""

    instance: InstanceName
    incarnation: Incarnation


class Reject(msgspec.Struct, frozen=True, tag="reject", tag_field="t"):
    """Decode refuses a prefill engine or a message of it; ``reason`` names what differs or is wrong."""

    outcome: Outcome
    reason: str


class ListeningRank(msgspec.Struct, frozen=True):
    """Address at which one prefill rank listens for data connections, and its incarnation."""

    address: HostPort
    incarnation: Incarnation


class TransferAttempt(msgspec.Struct, frozen=True):
    """Identifies one try of a transfer: transfer, attempt of the request, generation within that attempt."""

    transfer: TransferId
    attempt: Attempt
    generation: int

    @property
    def key(self) -> Key:
        """The three fields that identify the try, as a ``Key``."""
        return Key(self.transfer, self.attempt, self.generation)


class Announce(TransferAttempt, frozen=True, tag="announce", tag_field="t"):
    """Prefill has scheduled the prompt of a transfer: decode can ask the ranks in ``data`` for its KV from now on."""

    identity: bytes
    """``kv.identity``."""
    tokens: int
    """Prompt length."""
    handed: int
    """Tokens whose KV comes: all but the last, or the last few (``kv.reach``)."""
    data: tuple[ListeningRank, ...]
    """Prefill's ranks, in rank order."""
    cached: int = -1
    """Tokens of the prompt that prefill had in its cache; -1: it does not say."""
    weights: str = ""
    """What whoever changed prefill's weights last has called them; empty: it does not say."""

    @property
    def content(self) -> bytes:
        """Identity of the KV itself, of prompt and weights: tries whose bytes here are equal bring equal KV."""
        return self.identity + self.weights.encode()


class TryGone(TransferAttempt, frozen=True, tag="gone", tag_field="t"):
    """Prefill will not deliver this try. ``retry``: decode is to keep waiting, since another try may follow."""

    outcome: Outcome
    reason: str
    retry: bool


class Drop(TransferAttempt, frozen=True, tag="drop", tag_field="t"):
    """Decode does not want this try: prefill is to free its copies of the KV."""

    outcome: Outcome
    reason: str


class WorkDone(TransferAttempt, frozen=True, array_like=True):
    """What prefill has done so far for one try; both numbers only grow."""

    tokens: int
    """Prompt tokens computed for it, again after a preemption."""
    steps: int
    """Steps with work for others that have ended while it waited in prefill's queue, announced but not run."""


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="t"):
    """Prefill asks whether decode is alive. ``work``: of its tries, those whose numbers have changed since the last one."""

    seq: int
    work: tuple[WorkDone, ...] = ()


class Pong(msgspec.Struct, frozen=True, tag="pong", tag_field="t"):
    """Decode's answer to the ``Ping`` of the same ``seq``, with decode's own incarnation."""

    seq: int
    incarnation: Incarnation


ToDecode = Hello | Announce | TryGone | Ping
ToPrefill = Welcome | Reject | Drop | Pong
Control = ToDecode | ToPrefill | TraceQuery | TracedAnswer
"""``TraceQuery`` and ``TracedAnswer`` are a router's: they need no HELLO."""
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_encoder = msgspec.msgpack.Encoder()


def pack(message: Control) -> tuple[bytes, bytes]:
    """Return the two parts of a control message: the prefix, of ``WIRE_VERSION``, and the msgpack body."""
    transfer = getattr(message, "transfer", _NONE)
    attempt = getattr(message, "attempt", 0)
    return _PREFIX.pack(MAGIC, WIRE_VERSION, bytes.fromhex(transfer), attempt), _encoder.encode(message)


def prefix(raw: bytes) -> Prefix:
    """Read the first part of a control message, of any version.

    Raises:
        MessageError: the bytes are too short, or do not begin with ``MAGIC``.
    """
    if len(raw) < _PREFIX.size or raw[:4] != MAGIC:
        raise MessageError("not an xpyd control message")
    _, version, transfer, attempt = _PREFIX.unpack_from(raw)
    return Prefix(version, TransferId(transfer.hex()), Attempt(attempt))


def unpack(raw: bytes) -> Control:
    """Read the second part of a control message of this version.

    Raises:
        MessageError: the body is no message, or a value is out of bounds; the message names the field.
    """
    try:
        message: Control = _control_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"control message: {error}") from None
    if isinstance(message, TransferAttempt) and not (TRANSFER_ID.fullmatch(message.transfer) and message.attempt in _TRIES
                                         and message.generation in _TRIES):
        raise MessageError(f"transfer, attempt, generation: {message.key} cannot be the name of a try")
    if isinstance(message, Announce):
        if message.tokens < 1 or len(message.identity) != 32:
            raise MessageError("announce: tokens must be at least 1 and identity 32 bytes")
        if not 0 < message.handed <= message.tokens:
            raise MessageError(f"announce.handed: {message.handed} of {message.tokens} tokens")
        if not 0 < len(message.data) <= RANKS_MAX:
            raise MessageError(f"announce.data: {len(message.data)} addresses")
    if isinstance(message, Ping) and len(message.work) > WORK_MAX:
        raise MessageError(f"ping.work: {len(message.work)} transfers at once, over {WORK_MAX}")
    if isinstance(message, TraceQuery) and len(message.transfers) > ASK_MAX:
        raise MessageError(f"trace.transfers: {len(message.transfers)} are asked for at once, over {ASK_MAX}")
    return message
