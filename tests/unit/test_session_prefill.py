"""Which links prefill lets decode choose among, what it says of each, and whom it gives up when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from said_connection import SaidConnection

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.errors import AuthError, Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.session_bodies import Able, Gpu, LinkChoice, LinkWelcome, NixlMemory, SharedStore
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind
from xpyd_sidecar.session import prefill_session
from xpyd_sidecar.session.greeting import OwnRank, Rejection
from xpyd_sidecar.session.prefill_session import IDLE_S, PrefillSession
from xpyd_sidecar.transport.links import LinkServer, NoLink, ServeLink
from xpyd_sidecar.transport.shm.mailbox import OTHERWISE

ME = OwnRank(InstanceName("p"), Incarnation("1" * 32), 0, bytes(32))
SHARED = SharedStore(b"n" * 32, 1 << 20, 4096, b"t" * 32, b"m" * 32)
NIXL = NixlMemory("agent", b"metadata", "1.5.1", 0, 4096, 0, b"ticket")
GPU = Gpu("GPU-1", "2.29.7", 8 << 20)
WELCOMES = {
    "shm": LinkWelcome(shared=SHARED), "nixl": LinkWelcome(nixl=NIXL), "nccl": LinkWelcome(gpu=GPU), "tcp": LinkWelcome()}


class Link(ServeLink):
    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = 0
        self.secrets: list[bytes] = []
        self.is_busy = False
        self.takes: set[FrameKind] = set()

    @property
    def busy(self) -> bool:
        return self.is_busy

    def hand_over(self, secret: bytes) -> None:
        self.secrets.append(secret)

    def on_frame(self, frame: Frame) -> bool:
        return frame.kind in self.takes

    def close(self) -> None:
        self.closed += 1


class Server:
    """Serves everybody, and keeps what it has made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.links: list[Link] = []

    def serve(self, session: object, able: Able) -> tuple[ServeLink, LinkWelcome]:
        self.links.append(Link(self.name))
        return self.links[-1], WELCOMES[self.name]


class Greeted:
    """A peer that has shown that it holds the key."""

    terms = keys = object()


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: str, *names: str, encrypts: bool = False,
                 **refuse: str) -> None:
        """``names``: of links that there are; ``refuse``: why there is none of these."""
        monkeypatch.setattr(prefill_session, "ControlConnection", SaidConnection)
        monkeypatch.setattr(prefill_session, "PrefillGreeting", lambda me, link: Greeted())
        self.servers = {name: Server(name) for name in names}
        made: dict[str, LinkServer] = {**self.servers, **{name: NoLink(reason) for name, reason in refuse.items()}}
        self.asked: list[FrameKind] = []
        self.lost: list[PeerError] = []
        given: dict[str, Any] = {"loop": None, "sock": None}
        self.session = PrefillSession(ME, address="10.0.0.1:5", servers=made, transport=transport, encrypts=encrypts,
                                      asked=lambda _, frame: self.asked.append(frame.kind),
                                      named=lambda *_: pytest.fail("no data connection"),
                                      lost=lambda _, error: self.lost.append(error), **given)
        link: Any = self.session.link
        self.connection: SaidConnection = link

    def hears(self, kind: FrameKind, body: msgspec.Struct | None = None) -> None:
        self.session.frame(Frame(kind, NO_TRY, msgspec.msgpack.encode(body) if body is not None else b""))

    def welcome(self, able: Able = Able()) -> LinkWelcome:  # noqa: B008  # a value
        self.hears(FrameKind.ABLE, able)
        kind, body = self.connection.said[-1]
        assert kind is FrameKind.WELCOME
        assert isinstance(body, LinkWelcome)
        return body

    def links(self) -> list[Link]:
        return [link for server in self.servers.values() for link in server.links]


Make = Callable[..., World]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda transport, *names, **refuse: World(monkeypatch, transport, *names, **refuse)


@pytest.mark.parametrize(("there", "refuse", "offered", "reason"), [
    (("shm", "nixl", "tcp"), {}, "shm", ""),
    (("nixl", "tcp"), {"shm": "shm: not on one host"}, "nixl", "shm: not on one host"),
    (("tcp",), {"shm": "shm: not on one host", "nixl": "nixl: decode has or wants none"}, "tcp",
     "shm: not on one host; nixl: decode has or wants none"),
    (("tcp",), {}, "tcp", "shm: not at prefill; nixl: not at prefill")])
def test_auto_takes_memory_on_a_host_then_nixl_then_tcp_and_says_why(
        make: Make, there: tuple[str, ...], refuse: dict[str, str], offered: str, reason: str) -> None:
    world = make("auto", *there, **refuse)
    wanted = WELCOMES[offered]
    assert world.welcome() == LinkWelcome(wanted.shared, wanted.nixl, wanted.gpu, reason)
    assert {link.name for link in world.links()} == {offered, "tcp"}, "no other is made, and tcp to fall back on"
    world.hears(FrameKind.LINK, LinkChoice(offered))  # type: ignore[arg-type]
    assert world.session.serves is not None
    assert world.session.serves.name == offered
    assert [link.closed for link in world.links() if link.name != offered] == [1] * (len(world.links()) - 1)


@pytest.mark.parametrize(("there", "offered"), [(("shm", "nixl", "tcp"), "shm"), (("nixl", "tcp"), "tcp")])
def test_who_encrypts_takes_memory_on_a_host_or_tcp_and_nothing_that_is_in_clear(make: Make, there: tuple[str, ...],
                                                                                 offered: str) -> None:
    refuse = {} if "shm" in there else {"shm": "shm: not on one host"}
    world = make("auto", *there, encrypts=True, **refuse)
    welcome = world.welcome(Able(encrypts=True))
    assert welcome == msgspec.structs.replace(WELCOMES[offered], encrypts=True, reason="; ".join(refuse.values()))
    assert "nixl" not in {link.name for link in world.links()}


@pytest.mark.parametrize("transport", ["rdma", "nccl"])
def test_who_encrypts_has_no_link_that_does_not(make: Make, transport: str) -> None:
    world = make(transport, "nixl", "nccl", "tcp", encrypts=True)
    with pytest.raises(Incompatible, match=f"transport {transport}: nothing of it is encrypted"):
        world.welcome(Able(encrypts=True))
    assert not world.links()


@pytest.mark.parametrize(("prefill", "decode", "words"), [
    (True, False, "kv.encryption is enabled at prefill, disabled at decode"),
    (False, True, "kv.encryption is disabled at prefill, enabled at decode")])
@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_a_peer_that_has_encryption_otherwise_is_refused_and_told_why(make: Make, transport: str, *, prefill: bool,
                                                                      decode: bool, words: str) -> None:
    world = make(transport, "shm", "nixl", "tcp", encrypts=prefill)
    with pytest.raises(Incompatible, match=words):
        world.welcome(Able(encrypts=decode))
    assert world.connection.said == [(FrameKind.REJECT, Rejection(Outcome.INCOMPATIBLE, words))]
    assert not world.links()


@pytest.mark.parametrize(("transport", "name"), [("shm", "shm"), ("rdma", "nixl"), ("nccl", "nccl"), ("tcp", "tcp")])
def test_a_rank_that_is_set_to_one_link_offers_that_alone(make: Make, transport: str, name: str) -> None:
    world = make(transport, "shm", "nixl", "nccl", "tcp")
    assert world.welcome() == WELCOMES[name]
    assert [link.name for link in world.links()] == [name]


@pytest.mark.parametrize(("transport", "name"), [("shm", "shm"), ("rdma", "nixl"), ("nccl", "nccl")])
def test_who_insists_refuses_a_peer_with_which_it_has_not_that_link_and_tells_it_why(make: Make, transport: str,
                                                                                    name: str) -> None:
    world = make(transport, "tcp", **{name: f"{name}: no"})
    with pytest.raises(Incompatible, match=f"transport {transport}: {name}: no"):
        world.welcome()
    hint = f"; {OTHERWISE}" if name == "shm" else ""
    why = Rejection(Outcome.INCOMPATIBLE, f"transport {transport}: {name}: no{hint}")
    assert world.connection.said == [(FrameKind.REJECT, why)]


@pytest.mark.parametrize(("transport", "name"), [("shm", "shm"), ("rdma", "nixl"), ("nccl", "nccl")])
def test_who_insists_refuses_a_peer_that_would_come_to_tcp(make: Make, transport: str, name: str) -> None:
    world = make(transport, name, "tcp")
    world.welcome()
    with pytest.raises(Incompatible, match=f"transport {transport}: decode's own"):
        world.hears(FrameKind.LINK, LinkChoice("tcp", "decode's own"))
    assert world.connection.said[-1][0] is FrameKind.REJECT


def test_a_link_that_was_not_offered_cannot_be_chosen(make: Make) -> None:
    world = make("auto", "shm", "nccl", "tcp")
    world.welcome()
    with pytest.raises(ProtocolError, match="chose nccl, which was not offered"):
        world.hears(FrameKind.LINK, LinkChoice("nccl"))
    nothing = make("tcp", "tcp")
    nothing.welcome()
    with pytest.raises(ProtocolError, match="would map memory that was not shown"):
        nothing.hears(FrameKind.LINK, LinkChoice("map", "", b"secret"))


def test_memory_is_handed_over_to_who_tells_the_secret_and_then_chosen_or_not(make: Make) -> None:
    world = make("auto", "shm", "tcp")
    world.welcome()
    world.hears(FrameKind.LINK, LinkChoice("map", "", b"secret"))
    assert world.session.serves is None
    (shm,), (tcp,) = world.servers["shm"].links, world.servers["tcp"].links
    assert shm.secrets == [b"secret"]
    world.hears(FrameKind.LINK, LinkChoice("tcp", "shm: it cannot be mapped"))
    assert world.session.serves is tcp
    assert (shm.closed, tcp.closed) == (1, 0)


def test_words_have_their_order_and_a_link_is_chosen_once(make: Make) -> None:
    world = make("auto", "tcp")
    with pytest.raises(ProtocolError, match="sent LINK before ABLE"):
        world.hears(FrameKind.LINK, LinkChoice("tcp"))
    world.welcome()
    with pytest.raises(ProtocolError, match="sent ASK before LINK"):
        world.hears(FrameKind.ASK)
    world.hears(FrameKind.LINK, LinkChoice("tcp"))
    world.hears(FrameKind.LINK, LinkChoice("tcp"))
    assert world.asked == [FrameKind.LINK], "whoever takes what follows knows of no such word"


def test_what_a_link_takes_for_itself_nobody_else_hears(make: Make) -> None:
    world = make("auto", "tcp")
    world.welcome()
    world.hears(FrameKind.LINK, LinkChoice("tcp"))
    world.links()[0].takes = {FrameKind.FETCH}
    for kind in (FrameKind.FETCH, FrameKind.PING, FrameKind.ASK):
        world.hears(kind)
    assert world.asked == [FrameKind.ASK]


def test_sums_are_for_who_wants_them(make: Make) -> None:
    for wants in (True, False):
        world = make("auto", "tcp")
        world.welcome(Able(sums=wants))
        assert world.session.sums == wants


def test_a_session_that_ends_closes_whatever_was_made_for_it(make: Make) -> None:
    for choice in (None, LinkChoice("shm"), LinkChoice("tcp")):
        world = make("auto", "shm", "tcp")
        world.welcome()
        if choice is not None:
            world.hears(FrameKind.LINK, choice)
        error = PeerGone("d", "closed")
        world.session.on_closed(error)
        assert [link.closed for link in world.links()] == [1, 1]
        assert world.lost == [error]


# --- time ---

def test_who_does_not_greet_in_time_is_closed_and_one_that_was_held_up_itself_blames_nobody(make: Make) -> None:
    world = make("auto", "tcp")
    world.session.tick(100.0, busy=False, timeout=4.0)
    world.session.tick(200.0, busy=False, timeout=4.0)
    assert world.connection.errors == []
    for now in range(201, 206):
        world.session.tick(float(now), busy=False, timeout=4.0)
    assert [type(error) for error in world.connection.errors][:1] == [AuthError]


def chosen(make: Make) -> World:
    world = make("auto", "tcp")
    world.welcome()
    world.hears(FrameKind.LINK, LinkChoice("tcp"))
    world.connection.said.clear()
    return world


def test_a_peer_with_work_is_pinged_and_given_up_when_it_is_silent(make: Make) -> None:
    world = chosen(make)
    world.session.tick(1.0, busy=True, timeout=5.0)
    assert world.connection.said == []
    world.session.tick(1.3, busy=True, timeout=5.0)
    assert world.connection.said == [(FrameKind.PING, None)]
    world.connection.writing = True
    world.session.tick(9.0, busy=True, timeout=5.0)
    assert len(world.connection.said) == 1, "what waits to leave says more than a ping"
    world.connection.is_silent = True
    world.session.tick(9.1, busy=True, timeout=5.0)
    assert [error.reason for error in world.connection.errors] == ["silent for 5.0 s"]


def test_bytes_on_their_way_are_work(make: Make) -> None:
    world = chosen(make)
    world.connection.is_silent = True
    world.session.tick(9.0, busy=False, timeout=5.0)
    assert world.connection.errors == []
    world.links()[0].is_busy = True
    world.session.tick(9.1, busy=False, timeout=5.0)
    assert [error.reason for error in world.connection.errors] == ["silent for 5.0 s"]


def test_a_session_that_nobody_needs_ends_after_a_while(make: Make) -> None:
    world = chosen(make)
    world.session.tick(IDLE_S, busy=False, timeout=5.0)
    assert world.connection.errors == []
    world.connection.last_out = 10.0
    world.session.tick(IDLE_S + 9, busy=False, timeout=5.0)
    assert world.connection.errors == []
    world.session.tick(IDLE_S + 11, busy=False, timeout=5.0)
    assert [error.reason for error in world.connection.errors] == ["idle"]
