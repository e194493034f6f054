"""What a peer that holds the key says in sealed frames: bodies, and the manifests, sums and fetches that they stand for.

    byte 0      which body · 128 heads of a decode of another size · 64 it has blocks already
    the rest    the body
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, get_args

import msgspec
from manifest_sizes import size_of

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer
from xpyd_sidecar.kv.fetch_steps import Fetch, FetchPlan, TryError
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import Manifest, Sums
from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.ring import Ring
from xpyd_sidecar.kv.selection import sums_in
from xpyd_sidecar.transport.nccl.stretches import views_of
from xpyd_sidecar.transport.shm.fetch import Mapping

MODULES: tuple[str, ...] = ()
"""Nothing of it is compiled: outcomes alone lead on."""
KINDS = get_args(bodies.Body)
KEY = Key(TransferId("ab" * 16), Attempt(1), 1)
ARRAYS = (ArrayLayout(2, 512, 1), ArrayLayout(4, 64, 4), ArrayLayout(2, 512, 1))
MANY, OTHERS = 128, 64
TABLES = (TableSpan(3, (9, 8, 7, 6)),)
BEGIN = 4096
"""Of the copy that fetches ask for."""
NUMBERS = (0, 1, 2, 3, 4, 8, 31, 127, 128, 255, 256, 4096, 4097, 5000, 65535, 65536, 1 << 24, (1 << 24) + 1, (1 << 31) - 1,
           1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -128, -(1 << 31), -(1 << 63))
TOKENS = (*map(msgspec.msgpack.encode, NUMBERS), b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\x90", b"\x91", b"\x92",
          b"\x96", b"\x80", b"\x81", b"\xa0", b"\xa2\xff\xfe", b"\xc4\x08" + bytes(8), b"\xcb\x7f\xf8" + bytes(6),
          b"\xcb\x3f\xf0" + bytes(6), b"number", b"manifest", b"pieces", b"shared", b"nixl", b"gpu", b"reason", b"host",
          b"mailbox", b"sums", b"outcome")


def check(data: bytes) -> Hashable:
    """It is what it says, or an error of the peer; what follows of it stays inside of what both sides have."""
    flags, raw = data[0] if data else 0, data[1:]
    kind = KINDS[flags % MANY % OTHERS % len(KINDS)]
    words = ""
    try:
        body = bodies.read_body(raw, kind)
    except MessageError as error:
        words = str(error)
    if words:
        assert words.startswith(kind.__name__), raw
        return kind.__name__, "unread"
    encoded = msgspec.msgpack.encode(body)
    assert msgspec.msgpack.encode(bodies.read_body(encoded, kind)) == encoded, raw
    follow = FOLLOW.get(kind)
    return kind.__name__, follow(body, flags) if follow is not None else "read"


def machine(flags: int) -> Fetching:
    """A rank that takes one try."""
    made = Fetching(Ring(0), Buffer(Buddy(1 << 16), Buddy(0), ttl_s=9), piece=2048, window=1 << 40, cover=True)
    heads = ArrayPart(0, 1, 1, 0) if flags & MANY else ArrayPart(0, 0, 2, 0)
    plan = FetchPlan(ARRAYS, {0: heads, 1: heads._replace(into=1)}, 1, b"prompt", 64, ahead=True)
    made.begin((KEY, 0), 1, plan, 0.0)
    if flags & OTHERS:
        made.allot((KEY, 0), TABLES)
    return made


def told(manifest: Manifest, flags: int) -> Hashable:
    """Fetches of it lie inside of it, and come to blocks that the load has; there is none of what cannot be."""
    try:
        steps = machine(flags).on_manifest(1, (KEY, 0), manifest)
    except TryError:
        return "refused"
    size = size_of(manifest, ARRAYS)
    fetches = [step for step in steps if isinstance(step, Fetch)]
    for piece in (piece for step in fetches for piece in step.batch):
        assert piece.stretches[0].offset >= manifest.offset, manifest
        assert piece.stretches[-1].offset + piece.stretches[-1].size <= manifest.offset + size, manifest
        assert sum(one.size for one in piece.stretches) == piece.size, manifest
        assert len({one.size for one in piece.stretches}) == 1, manifest
        first, count = piece.packed.first, piece.packed.blocks
        assert manifest.first <= first, manifest
        assert first + count <= manifest.first + manifest.count, manifest
        assert not flags & OTHERS or (first < 7 and first + count > 3), manifest
        assert piece.sums[0] + piece.sums[1] <= sums_in(manifest, ARRAYS), manifest
    return len(fetches) > 1, bool(fetches), len(steps) > len(fetches)


def summed(sums: Sums, flags: int) -> Hashable:
    """Sums are as many as their manifest has."""
    one = machine(flags)
    one.on_manifest(1, (KEY, 0), Manifest(7, 0, 1, 3, 4, 0))
    right = sums.number == 7 and len(sums.sums) == 8 * 2 * 4
    try:
        one.on_sums(1, (KEY, 0), sums)
    except TryError:
        assert not right, sums
        return "refused"
    assert right, sums
    return "right"


class Copy:
    """Of manifest 7."""

    offset = BEGIN
    view = memoryview(bytes(range(256)) * 4)

    def hold(self) -> None:
        """Nothing is sent."""

    def let_go(self) -> None:
        """Nothing was held."""


def asked(fetch: bodies.FetchBytes, _: int) -> Hashable:
    """All that is sent is of the copy, and is what was asked for."""
    try:
        views = views_of(Copy(), fetch, "d")
    except ProtocolError:
        return "refused"
    whole = bytes(Copy.view)
    for combs, parts in zip(fetch.pieces, views, strict=True):
        expected = [whole[at:at + comb.size] for comb in combs for n in range(comb.count)
                    for at in [comb.offset - BEGIN + n * comb.step]]
        assert [bytes(part) for part in parts] == expected, fetch
        assert all(len(part) == comb.size for part, comb in zip(parts, [one for one in combs for _ in range(one.count)],
                                                                strict=True)), fetch
    return len(views), sum(map(len, views)) > len(views)


def welcomed(welcome: bodies.LinkWelcome, _: int) -> Hashable:
    """No memory is mapped by its words alone."""
    if welcome.shared is None:
        return "no memory"
    try:
        Mapping(None, welcome.shared)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing has come, and it was mapped")


FOLLOW: dict[type, Callable[[Any, int], Hashable]] = {
    Manifest: told, Sums: summed, bodies.FetchBytes: asked, bodies.LinkWelcome: welcomed}


def seeds() -> list[bytes]:
    """What honest peers say, and each body with nothing in it."""
    shared = bodies.SharedStore(bytes(32), 1 << 20, 4096, bytes(32), bytes(32))
    honest: list[msgspec.Struct] = [
        Manifest(0, 0, 2, 0, 8, 256), Manifest(1, 1, 1, 5, 3, 4096), Manifest(0, 0, 3, 2, 9, 0), Sums(7, bytes(64)),
        bodies.FetchBytes(1, 7, ((bodies.Comb(BEGIN, 100),), (bodies.Comb(BEGIN + 256, 8, 64, 4),)), 3),
        bodies.LinkWelcome(shared), bodies.LinkWelcome(reason="shm: not on one host"), bodies.Able("host", "@xpyd-kv-1"),
        bodies.LinkChoice("map", "", bytes(32)), bodies.Busy(3, 0.1)]
    out = []
    for body in honest:
        number, raw = KINDS.index(type(body)), msgspec.msgpack.encode(body)
        out += [bytes([number | flags]) + raw for flags in (0, MANY, OTHERS, MANY | OTHERS)]
    return [*out, *(bytes([number]) + one for number in range(len(KINDS)) for one in (b"\x80", b"\x90", b""))]
