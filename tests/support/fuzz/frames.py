"""What comes on a control connection before anybody is known, and sealed frames, against a reader that is written out here.

    byte 0      0 frames in clear · 1 an answer to prefill's challenge · 2 a challenge · 3 sealed frames
    byte 1      how many bytes come at once; 0: all
    the rest    what comes
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from xpyd_sidecar.contract.ids import Attempt, Incarnation, InstanceName, TransferId
from xpyd_sidecar.errors import PeerError, ProtocolError
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv.session_keys import PrivateKey, Sealing
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind, Wire, WireError
from xpyd_sidecar.session import greeting
from xpyd_sidecar.session.greeting import DecodeGreeting, HelloTerms, OwnRank, PrefillGreeting, SessionHello

MODULES: tuple[str, ...] = ()
"""Nothing of it is compiled: outcomes alone lead on."""
KEY = bytes(range(32))
P = OwnRank(InstanceName("p"), Incarnation("1" * 32), 0, KEY)
D = OwnRank(InstanceName("d"), Incarnation("2" * 32), 3, KEY)
TRY = Key(TransferId("ab" * 16), Attempt(3), 7)
SAID = ((FrameKind.ABLE, b"able"), (FrameKind.ASK, b"\x91\x01"), (FrameKind.SUMS, bytes(500)), (FrameKind.PING, b""))
"""By the one end of a sealed session."""
PREFIX, BODY_MAX, SUMS_MAX = struct.Struct("<4sBBHI"), 64 << 10, 1 << 20
TOKENS = (b"xpyd", b"xpyd\x07", b"xpyd\x07\x01\x00\x00\x18\x00\x00\x00", b"\x00\x00", b"\x01\x00",
          b"\xff\xff\xff\xff", b"terms", b"proof", b"public", b"incarnation", b"expects", b"instance", b"rank", b"\xc4\x20",
          b"\xd9\x20", b"\x82", b"\x85", b"\xc0", b"\xc1", b"\xa0", P.incarnation.encode(), D.incarnation.encode(),
          bytes(32), b"\xff" * 16, *(bytes([kind]) for kind in FrameKind))


class FixedKey(PrivateKey):
    """The same one in each session of an input."""

    def __init__(self) -> None:
        self._key = X25519PrivateKey.from_private_bytes(bytes(range(32, 64)))


class Link:
    """A control connection that says nothing to anybody."""

    def __init__(self) -> None:
        self.peer = "peer"
        self.said: list[tuple[FrameKind, bytes]] = []
        self.sealed = 0

    def send(self, kind: FrameKind, body: msgspec.Struct | None = None, key: Key = NO_TRY) -> bytes:
        """Keep it."""
        encoded = msgspec.msgpack.encode(body)
        self.said.append((kind, encoded))
        return encoded

    def seal(self, sealing: Sealing, opening: Sealing) -> None:
        """Keys are known."""
        self.sealed += 1


@contextmanager
def fixed_keys() -> Iterator[None]:
    """What a session says depends on its input alone."""
    with patch.object(greeting, "PrivateKey", FixedKey):
        yield


def sealed_pair() -> tuple[Wire, Wire]:
    """Both ends of a session that have keys."""
    one, other = Wire(), Wire()
    one.seal(Sealing(KEY), Sealing(KEY[::-1]))
    other.seal(Sealing(KEY[::-1]), Sealing(KEY))
    return one, other


def check(data: bytes) -> Hashable:
    """Whatever comes is a frame, not whole yet, or an error of the peer; and who does not hold the key is nobody."""
    way, cut, raw = data[0] % 4 if data else 0, data[1] if len(data) > 1 else 0, data[2:]
    if way == 0:
        return in_clear(raw, cut)
    if way == 3:
        return sealed(raw, cut)
    with fixed_keys():
        return (answered if way == 1 else challenged)(raw)


def fed(wire: Wire, raw: bytes, cut: int) -> tuple[list[Frame], bool]:
    """Frames that come before the first fault; whether there was one."""
    found: list[Frame] = []
    try:
        for at in range(0, len(raw), cut or max(len(raw), 1)):
            found += wire.feed(raw[at:at + (cut or len(raw))])
    except WireError:
        return found, True
    return found, False


def in_clear(raw: bytes, cut: int) -> Hashable:
    """Frames in clear, as the layout says."""
    expected, at, wrong = [], 0, False
    while len(raw) - at >= PREFIX.size:
        magic, version, kind, flags, length = PREFIX.unpack_from(raw, at)
        most = 24 + (SUMS_MAX if kind == FrameKind.SUMS else BODY_MAX)
        wrong = (magic, version, flags) != (b"xpyd", 7, 0) or kind not in {1, 2, 5, 23} or not 24 <= length <= most
        if wrong or len(raw) - at < PREFIX.size + length:
            break
        clear = raw[at + PREFIX.size:at + PREFIX.size + length]
        attempt, generation = struct.unpack("<II", clear[16:24])
        expected.append(Frame(FrameKind(kind), Key(TransferId(clear[:16].hex()), Attempt(attempt), generation), clear[24:]))
        at += PREFIX.size + length
    found, refused = fed(Wire(), raw, cut)
    assert (found, refused) == (expected, wrong), raw
    return min(len(found), 3), refused, tuple(frame.kind for frame in found[:1])


def sealed(raw: bytes, cut: int) -> Hashable:
    """What is taken is what was said, in its order, however much was changed behind it."""
    _, other = sealed_pair()
    found, refused = fed(other, raw, cut)
    assert found == [Frame(kind, TRY, body) for kind, body in SAID][:len(found)], raw
    return "sealed", len(found), refused


def frame_of(raw: bytes, kind: FrameKind) -> Frame:
    """A word, of another kind or of a try where its first byte says so."""
    odd = raw[0] if raw else 0
    kinds = [*FrameKind]
    return Frame(kinds[odd % len(kinds)] if odd > 200 else kind, TRY if odd == 200 else NO_TRY, raw[1:])


def answered(raw: bytes) -> Hashable:
    """Prefill believes whoever proves that it holds the key, for just what both have said."""
    link = Link()
    mine = PrefillGreeting(P, link)  # type: ignore[arg-type]
    frame, outcome = frame_of(raw, FrameKind.HELLO), "known"
    try:
        terms = mine.on_frame(frame)
        assert terms.expects == P.incarnation, raw
    except (PeerError, MessageError) as error:
        outcome = type(error).__name__
        assert mine.terms is None, raw
    believed = outcome in {"known", "Incompatible"}
    assert link.sealed == believed, raw
    if believed:
        hello = msgspec.msgpack.decode(frame.body, type=SessionHello)
        assert hmac.compare_digest(proof_of(link.said[0][1], hello.terms), hello.proof), raw
        assert (frame.kind, frame.key) == (FrameKind.HELLO, NO_TRY), raw
    return "answered", outcome, len(link.said)


def challenged(raw: bytes) -> Hashable:
    """Decode answers a challenge that has a public key, once, and proves that it holds the service's."""
    link = Link()
    mine = DecodeGreeting(D, link, P.incarnation)  # type: ignore[arg-type]
    frame = frame_of(raw, FrameKind.CHALLENGE)
    outcome = "answered"
    try:
        mine.on_frame(frame)
    except (ProtocolError, MessageError) as error:  # and nothing else
        outcome = type(error).__name__
    assert link.sealed == (outcome == "answered"), raw
    if outcome != "answered":
        return "challenged", outcome, len(link.said)
    ((kind, body),) = link.said
    hello = msgspec.msgpack.decode(body, type=SessionHello)
    assert (kind, link.sealed, hello.proof) == (FrameKind.HELLO, 1, proof_of(frame.body, hello.terms)), raw
    return "challenged", outcome, 1


def proof_of(challenge: bytes, terms: bytes) -> bytes:
    """Decode's, as the protocol says."""
    said = b"".join(len(part).to_bytes(8, "little") + part for part in (challenge, terms))
    return hmac.new(KEY, b"decode" + hashlib.sha256(b"xpyd data link 2" + said).digest(), hashlib.sha256).digest()


def seeds() -> list[bytes]:
    """What honest peers say, and others."""
    with fixed_keys():
        link = Link()
        PrefillGreeting(P, link)  # type: ignore[arg-type]
        challenge = link.said[0][1]
        answers = []
        for expects in (P.incarnation, D.incarnation):
            DecodeGreeting(D, link, expects).on_frame(Frame(FrameKind.CHALLENGE, NO_TRY, challenge))  # type: ignore[arg-type]
            answers.append(link.said[-1][1])
        bad = HelloTerms(D.instance, D.incarnation, P.incarnation, 0, bytes(32))
        terms = msgspec.msgpack.encode(bad)
        answers.append(msgspec.msgpack.encode(SessionHello(terms, proof_of(challenge, terms))))
        answers.append(msgspec.msgpack.encode(SessionHello(b"\xc1", proof_of(challenge, b"\xc1"))))
    one, _ = sealed_pair()
    clear = [Wire().frame(kind, body) for kind, body in ((FrameKind.CHALLENGE, challenge), (FrameKind.HELLO, answers[0]),
                                                         (FrameKind.REJECT, b""), (FrameKind.NAME, bytes(32)))]
    spoken = b"".join(one.frame(kind, body, TRY) for kind, body in SAID)
    made: list[tuple[int, bytes]] = [*((0, one) for one in (*clear, clear[0] + clear[1], b"GET / HTTP/1.1\r\n\r\n")),
                                     *((1, b"\0" + one) for one in answers), (2, b"\0" + challenge), (3, spoken),
                                     (3, clear[1]), (1, b"\xff" + answers[0]), (2, b"\xc8" + challenge)]
    return [bytes([way, cut]) + raw for way, raw in made for cut in (0, 7)]
