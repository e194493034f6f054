"""Decode's end of a session: what is said when, what waits for the link, and whom it gives up when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from said_connection import SaidConnection

from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName
from xpyd_sidecar.errors import AuthError, ChecksumError, Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.manifests import Ask
from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv.session_bodies import Able, LinkChoice
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind
from xpyd_sidecar.session import decode_session
from xpyd_sidecar.session.decode_session import IDLE_S, DecodeSession, outcome_of
from xpyd_sidecar.session.greeting import OwnRank, RankRejected, Rejection
from xpyd_sidecar.transport.links import FetchLink

ME = OwnRank(InstanceName("d"), Incarnation("2" * 32), 0, bytes(32))
PLACE = HostPort("10.0.0.1:4000"), Incarnation("1" * 32)


class Link(FetchLink):
    name = "tcp"

    def __init__(self) -> None:
        self.closed = 0
        self.takes: set[FrameKind] = set()

    def on_frame(self, frame: Frame) -> bool:
        return frame.kind in self.takes

    def close(self) -> None:
        self.closed += 1


class Connection(SaidConnection):
    def __init__(self, loop: Any, sock: Any, peer: str, owner: Any, *, connecting: bool) -> None:
        assert connecting
        super().__init__(loop, sock, peer, owner)


class Greeting:
    """Keys are known once prefill has challenged."""

    def __init__(self, me: Any, link: Any, expects: Any) -> None:
        self.keys: object | None = None

    def on_frame(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.CHALLENGE:
            raise ProtocolError("p", f"sent {frame.kind.name} before CHALLENGE")
        self.keys = object()


class World:
    """A session, the choice of its link, and what comes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decode_session, "ControlConnection", Connection)
        monkeypatch.setattr(decode_session, "DecodeGreeting", Greeting)
        monkeypatch.setattr(decode_session, "connecting", lambda address: None)
        self.told: list[FrameKind] = []
        self.chose: list[tuple[str, ...]] = []
        self.ended: list[PeerError] = []
        self.trial = SimpleNamespace(able=Able("host"), waits_for_us=False, on_frame=self.hear, close=self.close, words=[],
                                     closed=0)
        self.now = 0
        self.fetch_link = Link()
        fetcher: Any = SimpleNamespace(begin=self.begin)
        loop: Any = None
        self.session = DecodeSession(ME, loop, PLACE, fetcher, told=lambda _, frame: self.told.append(frame.kind),
                                     ended=lambda _, error: self.ended.append(error),
                                     chose=lambda session: self.chose.append(session.refused))
        link: Any = self.session.link
        self.connection: Connection = link

    def begin(self, session: Any, chosen: Any) -> Any:
        self.chosen = chosen
        return self.trial

    def hear(self, frame: Frame) -> None:
        self.trial.words.append(frame.kind)

    def close(self) -> None:
        self.trial.closed += 1

    def hears(self, kind: FrameKind, body: msgspec.Struct | None = None) -> None:
        self.session.frame(Frame(kind, NO_TRY, msgspec.msgpack.encode(body) if body is not None else b""))

    def choose(self, reason: str = "") -> None:
        self.hears(FrameKind.CHALLENGE)
        self.hears(FrameKind.WELCOME)
        self.chosen(self.fetch_link, reason)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_what_is_to_be_said_of_tries_waits_for_the_link_and_follows_its_choice(world: World) -> None:
    world.session.send(FrameKind.ASK, Ask(1))
    world.hears(FrameKind.CHALLENGE)
    assert world.connection.said == [(FrameKind.ABLE, Able("host"))]
    world.session.send(FrameKind.ASK, Ask(2))
    world.hears(FrameKind.WELCOME)
    assert world.trial.words == [FrameKind.WELCOME]
    assert world.chose == []
    world.chosen(world.fetch_link, "shm: not on one host")
    assert world.chose == [()]
    world.session.send(FrameKind.PING)
    assert world.connection.said[1:] == [(FrameKind.LINK, LinkChoice("tcp", "shm: not on one host")),
                                         (FrameKind.ASK, Ask(1)), (FrameKind.ASK, Ask(2)), (FrameKind.PING, None)]


@pytest.mark.parametrize("kind", [FrameKind.MANIFEST, FrameKind.PING, FrameKind.SUMS, FrameKind.GONE])
def test_nothing_of_a_try_comes_before_the_link_is_chosen(world: World, kind: FrameKind) -> None:
    with pytest.raises(ProtocolError, match=f"sent {kind.name} before CHALLENGE"):
        world.hears(kind)
    world.hears(FrameKind.CHALLENGE)
    with pytest.raises(ProtocolError, match=f"sent {kind.name} out of turn"):
        world.hears(kind)
    assert world.told == []


def test_what_a_link_takes_for_itself_nobody_else_hears(world: World) -> None:
    world.choose()
    world.fetch_link.takes = {FrameKind.SENT}
    for kind in (FrameKind.SENT, FrameKind.PING, FrameKind.MANIFEST, FrameKind.WELCOME):
        world.hears(kind)
    assert world.told == [FrameKind.MANIFEST, FrameKind.WELCOME], "whoever takes what follows knows of no second welcome"


def test_what_anybody_may_have_said_in_clear_means_nothing(world: World) -> None:
    """Who holds no key can say it in the place of a prefill that is gone."""
    with pytest.raises(ProtocolError, match="REJECT before CHALLENGE"):
        world.hears(FrameKind.REJECT, Rejection(Outcome.OK, "all is well"))


@pytest.mark.parametrize("when", ["after the challenge", "after the choice"])
def test_a_prefill_that_refuses_says_what_that_means_at_any_time(world: World, when: str) -> None:
    if when == "after the challenge":
        world.hears(FrameKind.CHALLENGE)
    elif when == "after the choice":
        world.choose()
    with pytest.raises(RankRejected, match="incarnation 1 is gone") as raised:
        world.hears(FrameKind.REJECT, Rejection(Outcome.INCARNATION, "incarnation 1 is gone"))
    assert outcome_of(raised.value) is Outcome.INCARNATION
    with pytest.raises(MessageError):
        world.session.frame(Frame(FrameKind.REJECT, NO_TRY, b"\xff"))


@pytest.mark.parametrize(("error", "outcome"), [
    (PeerGone("p", "x"), Outcome.PEER_LOST), (AuthError("p", "x"), Outcome.AUTH),
    (ProtocolError("p", "x"), Outcome.PROTOCOL),
    (ChecksumError("p", "x"), Outcome.CHECKSUM), (Incompatible("p", "x"), Outcome.INCOMPATIBLE),
    (RankRejected("p", Rejection(Outcome.OVERFLOW, "x")), Outcome.OVERFLOW)])
def test_how_a_session_ends_says_what_becomes_of_its_tries(error: PeerError, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


def test_a_session_that_ends_closes_what_was_made_for_it(world: World) -> None:
    world.choose()
    error = PeerGone("p", "closed")
    world.session.on_closed(error)
    assert (world.fetch_link.closed, world.trial.closed, world.ended) == (1, 1, [error])


def test_one_that_ends_before_it_was_challenged_has_nothing_to_close(world: World) -> None:
    world.session.on_closed(PeerGone("p", "refused"))
    assert (world.fetch_link.closed, world.trial.closed, len(world.ended)) == (0, 0, 1)


# --- time ---

def give_time(world: World, seconds: int) -> None:
    """So many seconds pass, with a look in each."""
    for _ in range(seconds):
        world.now += 1
        world.session.tick(float(world.now), busy=True, timeout=5.0)


def test_a_source_that_does_not_accept_is_given_up_but_not_while_this_side_makes_the_link(world: World) -> None:
    world.hears(FrameKind.CHALLENGE)
    world.trial.waits_for_us = True
    give_time(world, 60)
    assert world.connection.errors == []
    world.trial.waits_for_us = False
    give_time(world, 5)
    assert world.connection.errors == []
    give_time(world, 2)
    assert world.connection.errors[0].reason == "no connection within 5.0 s"


def test_a_source_that_owes_something_is_pinged_and_given_up_when_it_is_silent(world: World) -> None:
    world.choose()
    world.connection.said.clear()
    world.session.tick(1.0, busy=True, timeout=5.0)
    assert world.connection.said == []
    world.session.tick(1.3, busy=True, timeout=5.0)
    assert world.connection.said == [(FrameKind.PING, None)]
    world.connection.is_silent = True
    world.session.tick(1.4, busy=False, timeout=5.0)
    assert world.connection.errors == [], "it owes nothing"
    world.session.tick(1.5, busy=True, timeout=5.0)
    assert [error.reason for error in world.connection.errors] == ["silent for 5.0 s"]


def test_a_session_that_nobody_needs_ends_after_a_while(world: World) -> None:
    world.choose()
    world.session.tick(IDLE_S, busy=False, timeout=5.0)
    assert world.connection.errors == []
    world.session.tick(IDLE_S + 1, busy=False, timeout=5.0)
    assert [error.reason for error in world.connection.errors] == ["idle"]
