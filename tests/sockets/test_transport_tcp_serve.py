"""Prefill answers stripes by name, gives the threads what may be asked for, and gets each copy back once."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from control_ends import connected_sockets, wait_until
from held_loop import HeldLoop, Still
from stripe_ends import HEADER, exactly, request

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.session_bodies import Able, LinkWelcome
from xpyd_sidecar.transport import gates
from xpyd_sidecar.transport.tcp import pool as tcp_pool
from xpyd_sidecar.transport.tcp.serve import TcpServeLink, TcpServer

KEY = Key(TransferId("ab" * 16), Attempt(3), 2)
NAMED = bytes.fromhex(KEY.transfer) + b"\3\0\0\0\2\0\0\0\7\0\0\0"
"""Manifest 7 of that try, as a request names it."""
BEGIN = 4096
Pair = tuple[socket.socket, socket.socket]
ANSWER = b"a" * 32


class Copy:
    """What manifest 7 was told of."""

    offset = BEGIN

    def __init__(self, size: int = 1 << 20) -> None:
        self.view = memoryview(random.Random(1).randbytes(size))
        self.held = self.let_gone = 0

    def hold(self) -> None:
        self.held += 1

    def let_go(self) -> None:
        self.let_gone += 1


class Prefill:
    """A session, and the server that it is of."""

    peer = "d"

    def __init__(self, size: int = 1 << 20) -> None:
        self.loop = HeldLoop("prefill")
        self.copy = Copy(size)
        self.errors: list[PeerError] = []
        self.server = TcpServer(self.loop, 5.0, lambda key, number: None)  # type: ignore[arg-type]
        self.server.add(KEY, 7, self.copy)
        served = self.server.serve(self, Able())  # type: ignore[arg-type]
        assert not isinstance(served, str)
        link, welcome = served
        assert welcome == LinkWelcome()
        assert isinstance(link, TcpServeLink)
        self.link = link

    def close(self, error: PeerError) -> None:
        self.errors.append(error)
        self.link.close()

    def waits_for(self, what: Callable[[], object]) -> None:
        wait_until(lambda: [self.loop.run_until_idle(), what()][1])

    def stop(self) -> None:
        self.link.close()
        self.loop.stop()


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    made = Prefill()
    yield made
    made.stop()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with connected_sockets() as both:
        yield both


def test_a_stripe_is_answered_and_what_is_asked_for_leaves(prefill: Prefill, pair: Pair) -> None:
    near, far = pair
    assert prefill.link.stripes == tcp_pool.STRIPES
    prefill.link.attach(near, 2, ANSWER, b"")
    assert exactly(far, 32) == ANSWER
    far.sendall(request(0, BEGIN + 10, 1000, 5000, 20, key=NAMED))
    assert exactly(far, HEADER.size) == HEADER.pack(0, 0, 20_000)
    wanted = b"".join(prefill.copy.view[10 + 5000 * nth:][:1000] for nth in range(20))
    assert exactly(far, 20_000) == wanted
    assert prefill.errors == []


def test_a_second_stripe_of_a_number_is_closed_alone(prefill: Prefill, pair: Pair) -> None:
    near, far = pair
    prefill.link.attach(near, 0, ANSWER, b"")
    for number in (0, prefill.link.stripes):
        with connected_sockets() as (other, end):
            prefill.link.attach(other, number, ANSWER, b"")
            assert end.recv(1) == b""
    assert exactly(far, 32) == ANSWER
    far.sendall(request(0, BEGIN, 8, key=NAMED))
    assert exactly(far, HEADER.size + 8)[HEADER.size:] == prefill.copy.view[:8]
    assert prefill.errors == []
    prefill.link.close()
    with connected_sockets() as (other, end):
        prefill.link.attach(other, 1, ANSWER, b"")
        assert end.recv(1) == b"", "the session has ended"


def test_a_stripe_that_has_gone_again_ends_the_session(prefill: Prefill) -> None:
    one, far = socket.socketpair()
    near = Still(fileno=one.detach())
    far.close()
    with pytest.raises(PeerGone, match="a stripe: "):
        prefill.link.attach(near, 0, ANSWER, b"")
    assert near.fileno() == -1


def test_a_copy_that_is_taken_is_let_go_of_once_nobody_sends_of_it() -> None:
    prefill = Prefill(32 << 20)
    copy = prefill.copy
    with connected_sockets() as (near, far):
        prefill.link.attach(near, 0, ANSWER, b"")
        assert exactly(far, 32) == ANSWER
        far.sendall(request(0, BEGIN, 32 << 20, key=NAMED))
        exactly(far, HEADER.size)
        prefill.server.take(KEY, 7, copy)
        prefill.loop.run_until_idle()
        assert (copy.held, copy.let_gone) == (1, 0)
        assert exactly(far, 32 << 20) == copy.view
        prefill.waits_for(lambda: copy.let_gone)
        far.sendall(request(1, BEGIN, 8, key=NAMED))
        assert exactly(far, HEADER.size) == HEADER.pack(1, 1, 0)
    other = Copy()
    prefill.server.add(KEY, 8, other)
    prefill.server.take(KEY, 8, other)
    assert (copy.held, copy.let_gone, other.held, other.let_gone) == (1, 1, 1, 1)
    prefill.stop()


ENDS: list[tuple[bytes, type[PeerError], str]] = [
    (request(0, BEGIN - 1, 8, key=NAMED), ProtocolError, "said on a stripe what it may not"),
    (b"", PeerGone, "a stripe: Connection reset by peer")]


@pytest.mark.parametrize(("says", "error", "words"), ENDS, ids=["lies", "leaves"])
def test_a_decode_that_lies_or_leaves_has_ended_its_session(  # fixtures
        prefill: Prefill, pair: Pair, says: bytes, error: type[PeerError], words: str) -> None:
    near, far = pair
    prefill.link.attach(near, 0, ANSWER, b"")
    exactly(far, 32)
    if says:
        far.sendall(says)
    else:
        far.close()
    prefill.waits_for(lambda: prefill.errors)
    assert [(type(one), words in str(one)) for one in prefill.errors] == [(error, True)]


def test_a_rank_refuses_sessions_that_it_has_no_room_for_and_has_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_pool, "STRIPES_MOST", 8)
    prefill = Prefill()
    session: Any = prefill
    links = [prefill.server.link(session) for _ in range(4)]
    assert [one if isinstance(one, str) else one.stripes for one in links] == [1, 1, 1, 1]
    with pytest.raises(PeerGone, match="too many data connections at prefill"):
        prefill.server.serve(session, Able())
    prefill.link.close()
    prefill.link.close()
    again = prefill.server.link(session)
    assert not isinstance(again, str)
    assert again.stripes == 1
    prefill.stop()


def test_without_what_is_compiled_there_is_no_link_and_copies_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "COMPILED", False)
    monkeypatch.setattr(gates, "REASON", "tcp: its loops were not compiled")
    loop: Any = HeldLoop("prefill")
    server = TcpServer(loop, 5.0, lambda key, number: None)
    copy, session = Copy(), Any
    server.add(KEY, 7, copy)
    server.take(KEY, 7, copy)
    assert copy.held == copy.let_gone == 0
    assert server.serve(session, Able()) == "tcp: its loops were not compiled"  # type: ignore[arg-type]
    loop.stop()


class NextOwner:
    """Of a session that begins while the answers of one before are handed over."""

    peer = "another"

    def __init__(self, pool: tcp_pool.StripePool | None = None) -> None:
        self.errors: list[PeerError] = []
        self.then: NextOwner | None = None
        self._pool = pool

    def on_order_ended(self, number: int, *, here: bool) -> None:
        assert here == (number == 9)
        assert self._pool is not None
        self.then = NextOwner()
        assert self._pool.open(self.then) == 0

    def stripe_ended(self, error: PeerError) -> None:
        self.errors.append(error)
        raise RuntimeError("of one session alone")


def test_the_end_of_a_stripe_is_its_own_sessions_though_another_has_its_number_by_now(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Told:
        """A pool of threads that has told of an answer and of two ends at once."""

        def __init__(self, threads: int, quiet: int) -> None:
            self.stays, self.free = [([(9, True)], [(0, 4, 0), (1, 1, 0), (1, 1, 0)], [])], [1, 0]

        def open(self) -> int:
            return self.free.pop()

        def order(self, *of: object) -> None:
            """It is answered above."""

        def end(self, session: int) -> None:
            self.free.append(session)

        def collect(self) -> tuple[list[Any], list[Any], list[Any]]:
            return self.stays.pop() if self.stays else ([], [], [])

        def fileno(self) -> int:
            return 0

        def close(self) -> None:
            """Nothing runs."""

    monkeypatch.setattr(tcp_pool, "Pool", Told)
    loop: Any = HeldLoop("decode")
    pool = tcp_pool.StripePool(loop, 5.0)
    first, second = NextOwner(pool), NextOwner(pool)
    assert [pool.open(first), pool.open(second)] == [0, 1]
    pool._orders[9] = first
    pool.end(0)
    pool.collect()
    assert first.then is not None
    assert (first.errors, first.then.errors) == ([], [])
    assert len(second.errors) == 2, "one that cannot end keeps no other from it"
    assert "does not end" in caplog.text
    loop.stop()
