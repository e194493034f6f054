"""Bodies of a session's sealed frames (``kv.wire``), in msgpack. Those of what there is to fetch are in ``kv.manifests``.

Structs tolerate unknown fields, so that a newer peer may add some within one version of the wire.

What msgspec has to know of a type is found out here, when this is imported, and not when the first body comes: it shows
other threads a type that it has not yet looked at whole, and one that reads by it ends the process (0.22.0: SIGSEGV).
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar, get_args

import msgspec

from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.manifests import Ask, Busy, Manifest, ManifestTaken, Sums, TryDone
from xpyd_sidecar.kv.messages import MessageError

NOT_ONE_HOST: Final = "shm: not on one host"
NO_HOST_LINK: Final = "shm: decode wants no link within a host"
NO_NIXL: Final = "nixl: decode has or wants none"
NO_RDMA: Final = "no RDMA device is here"
"""Why a link is not to be had where nobody would expect it, in the words that peers say."""
LinkName = Literal["tcp", "shm", "map", "nccl", "nixl"]
"""``map``: send the descriptor of shared memory, then decode says which it is."""


class Gpu(msgspec.Struct, frozen=True):
    """What tells whether two ranks can form an NCCL group."""

    name: str
    """The GPU's UUID: a group needs two different ones."""
    nccl: str
    """Version of the library; different ones are not known to understand each other."""
    piece: int
    """Bytes of the largest piece that this side takes."""


class Able(msgspec.Struct, frozen=True):
    """Body of ABLE: over which links decode can fetch."""

    host: str = ""
    """The kernel that decode runs on (its boot id); empty where decode wants no link within one host."""
    mailbox: str = ""
    """Where decode takes the descriptor of prefill's memory from (``transport.shm.mailbox``); empty: it has none."""
    gpu: Gpu | None = None
    """None: decode's transport is not nccl."""
    nixl: str = ""
    """Version of NIXL at decode; empty: it has none, or does not want it."""
    sums: bool = True
    """Decode checks what comes: SUMS is to be sent for each manifest."""
    encrypts: bool = False
    """Decode wants no KV in clear between hosts."""


class SharedStore(msgspec.Struct, frozen=True):
    """Prefill's memory for copies, whose descriptor decode has been sent, and this session's ticket in it."""

    name: bytes
    """Drawn at random; its first bytes."""
    size: int
    """Of the whole."""
    ticket_at: int
    ticket: bytes
    mark: bytes
    """SHA-256 of the secret that decode finds in its mailbox."""


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


class LinkWelcome(msgspec.Struct, frozen=True):
    """Body of WELCOME: what prefill has for the links that decode can fetch over, the best alone."""

    shared: SharedStore | None = None
    nixl: NixlMemory | None = None
    gpu: Gpu | None = None
    reason: str = ""
    """Why there is nothing better."""
    stripes: int = 0
    """Connections on which bytes may be asked for over TCP."""
    encrypts: bool = False
    """Prefill wants no KV in clear between hosts: what is said on stripes is sealed."""


class LinkChoice(msgspec.Struct, frozen=True):
    """Body of LINK and of SHARED."""

    link: LinkName
    reason: str = ""
    """Of LINK: why not a better one; of SHARED: why the descriptor could not be sent."""
    secret: bytes = b""
    """Of LINK map: what was found in the mailbox."""


class Comb(msgspec.Struct, frozen=True, array_like=True):
    """``count`` stretches of prefill's store, ``size`` bytes each, whose begins are ``step`` bytes apart."""

    offset: int
    size: int
    step: int = 0
    count: int = 1


class FetchBytes(msgspec.Struct, frozen=True, array_like=True):
    """Body of FETCH: send these bytes of a manifest in an NCCL group, piece by piece."""

    number: int
    """Of the fetch, in its session."""
    manifest: int
    pieces: tuple[tuple[Comb, ...], ...]
    group: int
    """That they are being received in."""


class PressManifest(msgspec.Struct, frozen=True, array_like=True):
    """Body of PRESS: prefill needs the memory of a manifest, so decode is to fetch it now, or say BUSY."""

    number: int
    """Of the manifest."""


class FetchSent(msgspec.Struct, frozen=True, array_like=True):
    """Body of SENT, which prefill says of each fetch in a group, in their order."""

    number: int
    """Of the fetch."""
    there: bool
    """Whether the manifest was there; else as many bytes are sent, and they mean nothing."""


class Group(msgspec.Struct, frozen=True):
    """Body of GROUP and UNGROUP. Prefill numbers the groups of a session, upwards."""

    number: int
    """0 where decode asks for one."""
    uid: bytes = b""
    """NCCL's id, by which decode joins as rank 1."""
    reason: str = ""
    """Of UNGROUP."""


class Reason(msgspec.Struct, frozen=True):
    """Body of GONE and CANCEL."""

    outcome: Outcome
    reason: str
    retry: bool = False

    @classmethod
    def from_words(cls, outcome: Outcome, reason: str, retry: bool = False) -> Reason:
        """A reason whose words are cut to what a body may have: each side puts its peer's name before those that it
        passes on.
        """
        return cls(outcome, reason[:REASON_MAX], retry)


LINK_NAMES: Final = frozenset(get_args(LinkName)) - {"map"}
REASON_MAX: Final = 1000
"""Characters, far below what a frame has room for."""
Body = (Able | LinkWelcome | LinkChoice | FetchBytes | FetchSent | PressManifest | Group | Reason | Ask | Busy | TryDone |
        Manifest | Sums | ManifestTaken)
T = TypeVar("T")
_DECODERS: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in get_args(Body)}


def read_body(raw: bytes, kind: type[T]) -> T:
    """The body of a frame; ``kind``: one of ``Body``.

    Raises:
        MessageError: names the field that is missing or wrong.
    """
    try:
        found: T = _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"{kind.__name__}: {error}") from None
    return found


def encryption_differs(prefill: bool, decode: bool) -> str:
    """Why two ranks can have no link although they could have one; empty: both encrypt KV, or neither."""
    word = {True: "enabled", False: "disabled"}
    return "" if prefill == decode else f"kv.encryption is {word[prefill]} at prefill, {word[decode]} at decode"


def refused_links(reason: str) -> tuple[str, ...]:
    """Among the reasons of a choice, each of which begins with a link's name, those of links that could be expected."""
    parts: list[str] = []
    for part in reason.split("; "):
        if part.partition(":")[0] in LINK_NAMES:
            parts.append(part)
        elif parts:
            parts[-1] += f"; {part}"
    return tuple(part for part in parts if part not in {NOT_ONE_HOST, NO_HOST_LINK, NO_NIXL}
                 and not part.startswith(f"nixl: {NO_RDMA}"))


def combs(stretches: tuple[tuple[int, int], ...]) -> tuple[Comb, ...]:
    """Stretches (offset, size), with those of one size that lie equally far apart as one."""
    found: list[Comb] = []
    for offset, size in stretches:
        last = found[-1] if found else None
        if last is not None and last.size == size:
            step = offset - (last.offset + (last.count - 1) * last.step)
            if last.count == 1 or step == last.step:
                found[-1] = Comb(last.offset, size, step, last.count + 1)
                continue
        found.append(Comb(offset, size))
    return tuple(found)
