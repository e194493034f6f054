"""How sessions begin: who holds the key is let in, and whoever stands between the two can only end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.errors import AuthError, Incompatible, ProtocolError
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv.session_keys import PrivateKey, Sealing
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind, Wire, WireError
from xpyd_sidecar.session.greeting import (
    Challenge,
    DecodeGreeting,
    OwnRank,
    PrefillGreeting,
    RankRejected,
    SessionHello,
    rejection_of,
)

KEY = bytes(range(32))
P = OwnRank(InstanceName("p"), Incarnation("1" * 32), 0, KEY)
D = OwnRank(InstanceName("d"), Incarnation("2" * 32), 3, KEY)


class Link:
    """A control connection without a socket: what it says lies in ``out``."""

    def __init__(self) -> None:
        self.peer = "peer"
        self.out = bytearray()
        self.wire = Wire()

    def send(self, kind: FrameKind, body: msgspec.Struct | None = None, key: Key = NO_TRY) -> bytes:
        encoded = msgspec.msgpack.encode(body) if body is not None else b""
        self.out += self.wire.frame(kind, encoded, key)
        return encoded

    def seal(self, sealing: Sealing, opening: Sealing) -> None:
        self.wire.seal(sealing, opening)


class Pair:
    """Both halves. Each says PING when it may, which the other one hears."""

    def __init__(self, p: OwnRank = P, d: OwnRank = D, expects: Incarnation = P.incarnation) -> None:
        self.p, self.d = Link(), Link()
        self.heard: list[str] = []
        self.greeted = PrefillGreeting(p, self.p)  # type: ignore[arg-type]
        self.greets = DecodeGreeting(d, self.d, expects)  # type: ignore[arg-type]

    def run(self, change: Callable[[bytes], bytes] = bytes) -> None:
        """Bytes go to and fro until nobody says anything more. ``change``: what becomes of all that one says at once."""
        while self.p.out or self.d.out:
            for source, target, hears in ((self.p, self.d, self._decode_hears), (self.d, self.p, self._prefill_hears)):
                data, source.out = bytes(source.out), bytearray()
                for frame in target.wire.feed(change(data)):
                    hears(frame)

    def _decode_hears(self, frame: Frame) -> None:
        if frame.kind is FrameKind.REJECT:
            raise rejection_of("peer", frame.body)
        if self.greets.keys is None:
            self.greets.on_frame(frame)
            self.d.send(FrameKind.PING)
        else:
            self.heard.append(f"d {frame.kind.name}")

    def _prefill_hears(self, frame: Frame) -> None:
        if self.greeted.terms is None:
            self.greeted.on_frame(frame)
            self.p.send(FrameKind.PING)
        else:
            self.heard.append(f"p {frame.kind.name}")


def test_two_that_hold_the_key_know_each_other_and_have_the_same_keys() -> None:
    pair = Pair()
    pair.run()
    assert sorted(pair.heard) == ["d PING", "p PING"]
    assert pair.greeted.terms is not None
    assert (pair.greeted.terms.instance, pair.greeted.terms.rank, pair.greeted.terms.incarnation) == ("d", 3, D.incarnation)
    assert pair.greeted.keys == pair.greets.keys
    assert pair.p.peer == "d (peer)"
    other = Pair()
    other.run()
    assert other.greeted.keys != pair.greeted.keys


def test_a_decode_without_the_key_is_told_so() -> None:
    pair = Pair(d=D._replace(data_key=bytes(32)))
    with pytest.raises(AuthError, match="does not hold the service key"):
        pair.run()
    assert pair.greeted.terms is None
    (frame,) = Wire().feed(bytes(pair.p.out))
    assert frame.kind is FrameKind.REJECT
    assert rejection_of("p", frame.body).outcome is Outcome.AUTH


def test_a_prefill_without_the_key_cannot_seal_what_decode_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(p=P._replace(data_key=bytes(32)))
    monkeypatch.setattr("xpyd_sidecar.kv.session_keys.holds", lambda *_: True)  # it lets everybody in
    with pytest.raises(WireError, match="not what was sealed"):
        pair.run()
    assert pair.heard == []


def test_another_life_of_prefill_is_refused_by_name() -> None:
    pair = Pair(expects=Incarnation("9" * 32))
    with pytest.raises(Incompatible, match=r"incarnation 9+ is gone"):
        pair.run()
    with pytest.raises(RankRejected, match="is gone") as told:
        pair.run()
    assert told.value.outcome is Outcome.INCARNATION


def said() -> int:
    """Bytes of a whole greeting with both PINGs."""
    count = 0

    def watch(data: bytes) -> bytes:
        nonlocal count
        count += len(data)
        return data

    Pair().run(watch)
    return count


@pytest.mark.parametrize("bit", [0x01, 0x40])
def test_no_byte_of_it_can_be_changed_on_the_way_unnoticed(bit: int) -> None:
    """A proxy without the key changes one bit of what both say, in clear or sealed."""
    whole = said()
    assert whole > 300
    for at in range(whole):
        passed = 0

        def change(data: bytes, at: int = at) -> bytes:
            nonlocal passed
            out = bytearray(data)
            if passed <= at < passed + len(out):
                out[at - passed] ^= bit
            passed += len(out)
            return bytes(out)

        pair = Pair()
        try:
            pair.run(change)
        except (AuthError, ProtocolError, RankRejected, WireError, MessageError):
            continue
        assert len(pair.heard) < 2, f"byte {at} of {whole} was changed, and nobody has noticed"
        assert pair.p.wire.waiting or pair.d.wire.waiting, "a length that grew: the rest is waited for, until a deadline"


def hello(**others: Any) -> Frame:
    """The frame with which decode answers."""
    pair = Pair(**others)
    (frame,) = Wire().feed(bytes(pair.p.out))
    pair.greets.on_frame(frame)
    first, *_ = Wire().feed(bytes(pair.d.out))
    return first


@pytest.mark.parametrize("frame", [
    Frame(FrameKind.HELLO, NO_TRY, b""), Frame(FrameKind.HELLO, NO_TRY, b"\xff" * 30),
    Frame(FrameKind.HELLO, NO_TRY, msgspec.msgpack.encode(SessionHello(b"", b""))), Frame(FrameKind.PING, NO_TRY, b""),
    Frame(FrameKind.HELLO, NO_TRY._replace(generation=1), hello().body), hello()])
def test_what_is_no_answer_to_its_own_challenge_ends_prefills_session(frame: Frame) -> None:
    with pytest.raises((ProtocolError, MessageError, AuthError)):
        Pair().greeted.on_frame(frame)


@pytest.mark.parametrize("frame", [
    Frame(FrameKind.CHALLENGE, NO_TRY, b""), Frame(FrameKind.WELCOME, NO_TRY, b""),
    Frame(FrameKind.CHALLENGE, NO_TRY, msgspec.msgpack.encode(Challenge(P.incarnation, bytes(32)))),
    Frame(FrameKind.CHALLENGE, NO_TRY, msgspec.msgpack.encode(Challenge(P.incarnation, b"short"))),
    Frame(FrameKind.CHALLENGE, NO_TRY._replace(generation=1),
          msgspec.msgpack.encode(Challenge(P.incarnation, PrivateKey().public)))])
def test_what_is_no_challenge_ends_decodes_session(frame: Frame) -> None:
    with pytest.raises((ProtocolError, MessageError)):
        Pair().greets.on_frame(frame)
