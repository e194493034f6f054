"""The control thread: messages get through, liveness is watched, strangers and other versions are named."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from running_threads import until_none_runs

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId, split_host_port
from xpyd_sidecar.contract.legs import Peer
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import Array, ArrayKind, geometry
from xpyd_sidecar.kv.messages import Announce, Control, Drop, Hello, ListeningRank, Ping, Pong, Prefix, Reject, Welcome
from xpyd_sidecar.process import curve
from xpyd_sidecar.session.control import ControlThread

KEY = keys.ServiceKey(bytes(range(32)))
LIFE, OTHER_LIFE = Incarnation("d" * 32), Incarnation("e" * 32)
TIMEOUT_S = 2.0
"""Of tests that wait for somebody's silence."""
PATIENCE_S = 60.0
ANNOUNCE = Announce(TransferId("a" * 32), Attempt(1), 1, b"i" * 32, 5, 4, (ListeningRank(HostPort("127.0.0.1:1"), LIFE),))
FIELDS = FingerprintFields("m", "f", "f", 128, "H", "", "0")
SHAPE = geometry(1, [[Array("layer0", ArrayKind("float32", 4, (8, 8), 256, 4))]])


class Engine:
    """A handler that remembers what it hears; as decode it answers as a real one would."""

    def __init__(self, key: keys.ServiceKey = KEY, life: Incarnation = LIFE, reject: Reject | None = None,
                 *, start: bool = True, port: int = 0, timeout_s: float = PATIENCE_S) -> None:
        self.heard: list[Control] = []
        self.lost: list[tuple[Outcome, str]] = []
        self.unread: list[Prefix] = []
        self.peers: set[Peer] = set()
        self.life, self.reject = life, reject
        self.silent = False
        self.again: list[Peer] = []
        self.thread = ControlThread(self, key, host="127.0.0.1", port=port, peer_timeout_s=timeout_s)
        if start:
            self.thread.start()

    def peer(self, life: Incarnation = LIFE) -> Peer:
        return Peer(InstanceName("d"), life, self.thread.address)

    def from_prefill(self, peer: bytes, message: Control) -> None:
        self.heard.append(message)
        if self.silent:
            return
        if isinstance(message, Hello):
            self.thread.post(peer, self.reject or Welcome(InstanceName("d"), self.life))
        elif isinstance(message, Ping):
            self.thread.post(peer, Pong(message.seq, self.life))
        elif isinstance(message, Announce):
            self.thread.post(peer, Drop(*message.key, Outcome.UNUSED, "x"))

    def unreadable(self, peer: bytes, prefix: Prefix) -> None:
        self.unread.append(prefix)

    def from_decode(self, peer: Peer, message: Control) -> None:
        self.heard.append(message)

    def decode_lost(self, peer: Peer, outcome: Outcome, reason: str) -> None:
        self.peers.discard(peer)
        self.lost.append((outcome, reason))

    def tell_again(self, peer: Peer) -> None:
        self.again.append(peer)
        self.thread.post(peer, ANNOUNCE)

    def open_peers(self) -> set[Peer]:
        return set(self.peers)

    def greeting(self, peer: Peer) -> Hello:
        return Hello(InstanceName("p"), OTHER_LIFE, peer.incarnation, FIELDS, Parallel(), SHAPE)

    def tick(self, now: float) -> None:
        pass

    def announce(self, peer: Peer) -> None:
        self.peers.add(peer)
        self.thread.post(peer, ANNOUNCE)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def build(**options: Any) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    yield build
    for engine in made:
        engine.thread.stop()
    until_none_runs("xpyd-control")


def wait(condition: Callable[[], object], deadline_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_greeting_goes_before_the_first_announcement_and_answers_come_back(make: Callable[..., Engine]) -> None:
    p, d = make(), make()
    p.announce(d.peer())
    p.announce(d.peer())
    wait(lambda: len(p.heard) == 2)
    assert [type(one) for one in d.heard[:3]] == [Hello, Announce, Announce]
    assert p.heard == [Drop(*ANNOUNCE.key, Outcome.UNUSED, "x")] * 2


def test_a_living_peer_is_pinged_and_kept(make: Callable[..., Engine]) -> None:
    p, d = make(timeout_s=TIMEOUT_S), make()
    p.announce(d.peer())
    began = time.monotonic()
    wait(lambda: sum(isinstance(one, Ping) for one in d.heard) >= 3 and time.monotonic() - began > 2 * TIMEOUT_S)
    assert p.lost == []


def test_a_peer_that_falls_silent_is_lost_within_the_timeout(make: Callable[..., Engine]) -> None:
    p, d = make(timeout_s=TIMEOUT_S), make()
    p.announce(d.peer())
    wait(lambda: p.heard)
    d.silent = True
    began = time.monotonic()
    wait(lambda: p.lost)
    assert time.monotonic() - began < 20 * TIMEOUT_S
    assert p.lost == [(Outcome.PEER_LOST, f"it is silent for {TIMEOUT_S} s")]


def test_what_may_be_lost_with_a_connection_that_broke_is_told_again(make: Callable[..., Engine]) -> None:
    """Who keeps the state of connections on the way may forget it: neither side has ended then."""
    p, d = make(), make()
    peer = d.peer()
    p.announce(peer)
    wait(lambda: p.heard)
    d.thread.stop()
    after = make(port=split_host_port(peer.control)[1])
    wait(lambda: any(isinstance(one, Announce) for one in after.heard))
    assert [type(one) for one in after.heard if not isinstance(one, Ping)] == [Hello, Announce]
    assert (p.again, p.lost) == ([peer], [])


def test_what_was_told_before_an_answer_came_is_told_again_where_the_connection_broke(make: Callable[..., Engine]) -> None:
    p, d = make(), make()
    d.silent = True
    peer = d.peer()
    p.announce(peer)
    wait(lambda: len(d.heard) == 2)
    d.thread.stop()
    after = make(port=split_host_port(peer.control)[1])
    wait(lambda: any(isinstance(one, Announce) for one in after.heard))
    assert [type(one) for one in after.heard if not isinstance(one, Ping)] == [Hello, Announce]
    assert (p.again, p.lost) == ([peer], [])


def test_one_that_was_held_up_itself_asks_and_waits_for_an_answer_before_it_gives_its_peer_up(
        make: Callable[..., Engine]) -> None:
    """A stopped process, a pause of its machine: decode could answer nothing meanwhile, since it was asked nothing."""
    p = make(start=False, timeout_s=0.8)
    peer, now = Peer(InstanceName("d"), LIFE, HostPort("127.0.0.1:1")), time.monotonic()
    p.peers.add(peer)
    decode = p.thread._connect(peer)
    assert decode is not None
    p.thread._watch(now)
    for late in (20.0, 20.1, 20.31, 20.45):
        p.thread._watch(now + late)
    assert (p.lost, decode.seq) == ([], 2)
    p.thread._watch(now + 20.8)
    assert [outcome for outcome, _ in p.lost] == [Outcome.PEER_LOST]


def test_a_peer_with_nothing_open_may_be_silent(make: Callable[..., Engine]) -> None:
    p, d = make(timeout_s=TIMEOUT_S), make()
    p.announce(d.peer())
    wait(lambda: p.heard)
    p.peers.clear()
    d.silent = True
    time.sleep(2 * TIMEOUT_S)
    d.silent = False
    p.announce(d.peer())
    wait(lambda: len(p.heard) == 2)
    assert p.lost == []


@pytest.mark.parametrize("case", ["nobody there", "another key"])
def test_a_peer_that_never_answers_is_lost_within_the_timeout(make: Callable[..., Engine], case: str) -> None:
    p = make(timeout_s=TIMEOUT_S)
    peer = Peer(InstanceName("d"), LIFE, HostPort("127.0.0.1:1")) if case == "nobody there" else make(
        key=keys.ServiceKey(bytes(32))).peer()
    p.announce(peer)
    wait(lambda: p.lost)
    assert p.lost[0][0] is Outcome.PEER_LOST
    assert "does not hold the service key" in p.lost[0][1]
    assert p.again == []


def test_a_stranger_is_logged_where_it_knocks(make: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    d = make()
    with caplog.at_level(logging.WARNING):
        make(key=keys.ServiceKey(bytes(32))).announce(d.peer())
        wait(lambda: "refused a control connection" in caplog.text)
    assert d.heard == []


def test_a_refusal_reaches_prefill_and_the_next_leg_greets_again(make: Callable[..., Engine]) -> None:
    p, d = make(), make(reject=Reject(Outcome.INCOMPATIBLE, "dtype"))
    p.announce(d.peer())
    wait(lambda: p.lost == [(Outcome.INCOMPATIBLE, "dtype")])
    d.reject = None
    p.announce(d.peer())
    wait(lambda: any(isinstance(one, Drop) for one in p.heard))
    assert sum(isinstance(one, Hello) for one in d.heard) == 2


def test_another_life_at_the_same_address_is_noticed(make: Callable[..., Engine]) -> None:
    p, d = make(), make(life=OTHER_LIFE)
    p.announce(d.peer(LIFE))
    wait(lambda: p.lost)
    assert p.lost[0][0] is Outcome.INCARNATION


def test_a_control_address_that_makes_no_sense_loses_the_peer_at_once(make: Callable[..., Engine]) -> None:
    p = make()
    p.announce(Peer(InstanceName("d"), LIFE, HostPort("nowhere")))
    wait(lambda: p.lost)
    assert p.lost[0][0] is Outcome.PROTOCOL
    assert "'nowhere'" in p.lost[0][1]


def test_there_are_sockets_for_thousands_of_decode_engines(make: Callable[..., Engine]) -> None:
    """Each takes three; ZeroMQ has 1,023 if it is not told otherwise. Sockets that are not there fail a prompt at once."""
    assert make().thread._context.get(zmq.MAX_SOCKETS) > 3 * 4096


def test_a_peer_that_there_is_no_socket_for_is_given_up_at_once_and_that_is_our_own_fault(
        make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: object, kind: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    p = make()
    monkeypatch.setattr(zmq.Context, "socket", none)
    p.announce(Peer(InstanceName("d"), LIFE, HostPort("127.0.0.1:1")))
    wait(lambda: p.lost)
    assert p.lost == [(Outcome.OVERFLOW, "this engine has no socket for it: Too many open files")]


def stranger(d: Engine) -> zmq.Socket[Any]:
    sock = zmq.Context.instance().socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    curve.connect(sock, KEY, "control")
    sock.connect(f"tcp://{d.thread.address}")
    return sock


def test_another_wire_version_is_handed_over_by_its_prefix(make: Callable[..., Engine]) -> None:
    d = make()
    with stranger(d) as sock:
        head, _ = messages.pack(ANNOUNCE)
        sock.send_multipart([head[:4] + b"\x07\0" + head[6:], b"\xff whatever"])
        wait(lambda: d.unread == [Prefix(7, ANNOUNCE.transfer, ANNOUNCE.attempt)])


@pytest.mark.parametrize("parts", [[b""], [b"junk"], [messages.pack(Ping(1))[0]], [messages.pack(Ping(1))[0], b"\xc1"],
                                   [messages.pack(Ping(1))[0], b"x" * 100, b"y"]], ids=range(5))
def test_junk_is_answered_with_a_refusal_and_harms_nobody(make: Callable[..., Engine], parts: list[bytes]) -> None:
    d = make()
    with stranger(d) as sock:
        sock.send_multipart(parts)
        answer = messages.unpack(sock.recv_multipart()[1])
        assert isinstance(answer, Reject)
        assert answer.outcome is Outcome.PROTOCOL
        sock.send_multipart(messages.pack(Ping(3)))
        assert messages.unpack(sock.recv_multipart()[1]) == Pong(3, LIFE)


def test_a_port_in_use_is_a_clear_error(make: Callable[..., Engine]) -> None:
    d = make()
    port = split_host_port(d.thread.address)[1]
    with pytest.raises(ConfigError, match=f"control_port: cannot listen on 127.0.0.1 port {port}"):
        ControlThread(d, KEY, host="127.0.0.1", port=port, peer_timeout_s=1)
