"""Decode opens stripes by name, believes none that prefill does not answer, and has each fetch answered once."""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from control_ends import wait_until
from held_loop import HeldLoop
from stripe_ends import HEADER, REQUEST, exactly

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import AuthError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.packing import PackedArray, Stretch, sum_of
from xpyd_sidecar.kv.selection import Piece
from xpyd_sidecar.kv.session_keys import SessionKeys, stripe_answer, stripe_name
from xpyd_sidecar.kv.wire import FrameKind, Wire
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.links import FetchOrder
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.tcp import pool as tcp_pool
from xpyd_sidecar.transport.tcp.fetch import TcpFetchLink
from xpyd_sidecar.transport.tcp.pool import STRIPES, StripePool

KEY = Key(TransferId("ab" * 16), Attempt(3), 2)
KEYS = SessionKeys(b"p" * 32, b"d" * 32, b"s" * 32)
SIZES = (512, 70_000)
CHALLENGE = Wire().frame(FrameKind.CHALLENGE, b"words for who does not name itself")


class Decode:
    """A session, and whose fetches they are; prefill's ends are the test's."""

    peer = "p"

    def __init__(self, stripes: int = STRIPES) -> None:
        self.loop = HeldLoop("decode")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.pool = StripePool(self.loop, 5.0)  # type: ignore[arg-type]
        self.calls: deque[Callable[[], None]] = deque()
        self.errors: list[PeerError] = []
        self.answers: list[tuple[str, int]] = []
        self.sums: dict[int, bytes] = {}
        self.memory: dict[int, list[bytearray]] = {}
        self.gates: dict[int, Gate] = {}
        self.fars: list[socket.socket] = []
        self.greeted = False
        """Whether what is posted is called."""
        self.link = TcpFetchLink(self, self, self.loop, self.pool, keys=KEYS,  # type: ignore[arg-type]
                                 connect=self.connect, stripes=stripes, encrypts=False)

    def connect(self) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self.listener.getsockname())
        return sock

    def post(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def close(self, error: PeerError) -> None:
        self.errors.append(error)
        self.link.close()

    def on_fetched(self, number: int, sums: np.ndarray) -> None:
        self.answers.append(("fetched", number))
        self.sums[number] = sums.tobytes()

    def on_fetch_failed(self, number: int) -> None:
        self.answers.append(("failed", number))

    def order(self, number: int, sizes: tuple[int, ...] = SIZES) -> None:
        batch = tuple(Piece(0, (Stretch(4096 + 131_072 * at, size),), PackedArray(0, 1, 1, size, 1), (0, 1, 1))
                      for at, size in enumerate(sizes))
        self.memory[number] = [bytearray(size) for size in sizes]
        self.gates[number] = Gate()
        rows = [Scatter(one, len(one), 1, None, 0, 0, len(one)) for one in self.memory[number]]
        self.link.fetch(FetchOrder(number, KEY, 5, batch, rows, self.gates[number]))

    def accept(self) -> tuple[socket.socket, bytes]:
        """A stripe at prefill, which has said what it says to all, and the name that has come."""
        self.listener.settimeout(20)
        far, _ = self.listener.accept()
        self.fars.append(far)
        far.sendall(CHALLENGE)
        hello = Wire().frame(FrameKind.NAME, bytes(32))
        self.loop.run_until_idle()
        (frame,) = Wire().feed(exactly(far, len(hello)))
        assert frame.kind is FrameKind.NAME
        return far, frame.body

    def greet(self, many: int = STRIPES) -> list[socket.socket]:
        """So many stripes are answered."""
        found = []
        self.greeted = True
        for _ in range(many):
            far, name = self.accept()
            number = next(n for n in range(STRIPES) if stripe_name(KEYS, n) == name)
            far.sendall(stripe_answer(KEYS, number))
            found.append(far)
        self.waits_for(lambda: self.pool._pool.stripes == many)
        return found

    def run(self) -> None:
        """All that is due."""
        self.loop.run_until_idle()
        while self.greeted and self.calls:
            self.calls.popleft()()

    def waits_for(self, what: Callable[[], object]) -> None:
        wait_until(lambda: [self.run(), what()][1])

    def stop(self) -> None:
        self.link.close()
        self.loop.stop()
        for one in (self.listener, *self.fars):
            one.close()


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode()
    yield made
    made.stop()


def content(number: int, sizes: tuple[int, ...] = SIZES) -> list[bytes]:
    return [random.Random(number * 10 + at).randbytes(size) for at, size in enumerate(sizes)]


def serve(decode: Decode, far: socket.socket, number: int, many: int) -> None:
    """Answer the next requests of a stripe as those of a fetch."""
    for _ in range(many):
        serial, key, offset, size, step, count, zero = REQUEST.unpack(exactly(far, REQUEST.size))
        assert (key[:16].hex(), key[16:], step, count, zero) == (
            KEY.transfer, b"".join(one.to_bytes(4, "little") for one in (3, 2, 5)), 0, 1, 0)
        data = content(number)[(offset - 4096) // 131_072]
        assert len(data) == size
        far.sendall(HEADER.pack(serial, 0, size) + data)


def test_stripes_are_named_apart_and_what_is_ordered_before_waits_for_them(decode: Decode) -> None:
    decode.order(1)
    ends = [decode.accept() for _ in range(STRIPES)]
    assert {name for _, name in ends} == {stripe_name(KEYS, number) for number in range(STRIPES)}
    far, name = ends[2]
    far.sendall(stripe_answer(KEYS, next(n for n in range(STRIPES) if stripe_name(KEYS, n) == name)))
    decode.greeted = True
    decode.waits_for(lambda: decode.pool._pool.stripes == 1)
    serve(decode, far, 1, 2)
    decode.waits_for(lambda: decode.answers)
    assert decode.answers == [("fetched", 1)]
    assert decode.memory[1] == content(1)
    assert decode.sums[1] == b"".join(sum_of(one).to_bytes(8, "little") for one in content(1))
    assert decode.errors == []


def test_what_is_ordered_later_is_answered_too(decode: Decode) -> None:
    (far,) = decode.greet(1)
    for number in (1, 2, 3):
        decode.order(number)
        serve(decode, far, number, 2)
        decode.waits_for(lambda number=number: ("fetched", number) in decode.answers)
        assert decode.memory[number] == content(number)


WRONG: dict[str, tuple[bytes, type[PeerError], str]] = {
    "another answer": (stripe_answer(KEYS, 3)[::-1], AuthError, "does not know the name of a stripe"),
    "the name itself": (stripe_name(KEYS, 0), AuthError, "does not know"),
}
STRANGE: dict[str, tuple[bytes, type[PeerError], str]] = {
    "another frame": (Wire().frame(FrameKind.REJECT, b""), ProtocolError, "sent REJECT on a stripe"),
    "no frame": (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError, "not an xpyd data link"),
    "sealed": (CHALLENGE[:6] + b"\1\0" + CHALLENGE[8:], ProtocolError, "CHALLENGE sealed"),
    "nothing": (b"", PeerGone, "closed a stripe before it had answered"),
}


@pytest.mark.parametrize("what", WRONG)
def test_who_does_not_answer_by_name_is_not_believed(decode: Decode, what: str) -> None:
    data, kind, words = WRONG[what]
    decode.order(1)
    far, _ = decode.accept()
    far.sendall(data)
    decode.waits_for(lambda: decode.errors)
    assert (type(decode.errors[0]), words in str(decode.errors[0])) == (kind, True)
    assert decode.answers == [("failed", 1)]
    assert decode.loop.watched == [decode.pool._pool]


@pytest.mark.parametrize("what", STRANGE)
def test_what_prefill_may_not_say_on_a_stripe_ends_the_session_with_the_reason(decode: Decode, what: str) -> None:
    data, kind, words = STRANGE[what]
    decode.listener.settimeout(20)
    far, _ = decode.listener.accept()
    decode.loop.run_until_idle()
    far.sendall(data)
    far.shutdown(socket.SHUT_WR)
    decode.waits_for(lambda: decode.errors)
    assert (type(decode.errors[0]), words in str(decode.errors[0])) == (kind, True), decode.errors
    far.close()


def test_a_greeting_may_come_byte_by_byte_and_takes_nothing_that_follows(decode: Decode) -> None:
    decode.listener.settimeout(20)
    far, _ = decode.listener.accept()
    decode.fars.append(far)
    decode.loop.run_until_idle()
    (frame,) = Wire().feed(exactly(far, 68))
    number = next(n for n in range(STRIPES) if stripe_name(KEYS, n) == frame.body)
    for byte in CHALLENGE + stripe_answer(KEYS, number):
        far.sendall(bytes([byte]))
        decode.loop.run_until_idle()
    decode.waits_for(lambda: decode.pool._pool.stripes == 1)
    assert decode.errors == []


def test_a_stripe_that_cannot_be_made_ends_the_session() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    made = Decode.__new__(Decode)
    made.connect = lambda: _connecting(address)  # type: ignore[method-assign]
    Decode.__init__(made)
    made.waits_for(lambda: made.errors)
    assert "a stripe: Connection refused" in str(made.errors[0])
    made.stop()


def _connecting(address: Any) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(address)
    return sock


def test_stripes_that_are_not_answered_in_time_end_the_session(decode: Decode) -> None:
    decode.greet(1)
    now = 100.0
    while not decode.errors:
        decode.link.tick(now, 2.0)
        assert now < 104
        now += 0.1
    assert now > 102
    assert "has not answered a stripe within 2.0 s" in str(decode.errors[0])


def test_stripes_that_are_answered_may_be_silent_for_ever() -> None:
    decode = Decode(1)
    decode.greet(1)
    for nth in range(1000):
        decode.link.tick(100.0 + nth, 2.0)
    assert decode.errors == []
    decode.stop()


def test_the_end_of_one_stripe_ends_all_and_fails_each_fetch_once(decode: Decode) -> None:
    fars = decode.greet()
    decode.order(1)
    decode.order(2)
    fars[1].close()
    decode.waits_for(lambda: decode.errors and len(decode.answers) == 2)
    assert [type(error) for error in decode.errors] == [PeerGone]
    assert sorted(decode.answers) == [("failed", 1), ("failed", 2)]
    decode.waits_for(lambda: not decode.pool._pool.stripes)


def test_a_peer_that_lies_is_named(decode: Decode) -> None:
    (far,) = decode.greet(1)
    decode.order(1)
    far.sendall(HEADER.pack(7, 0, 512))
    decode.waits_for(lambda: decode.errors)
    assert isinstance(decode.errors[0], ProtocolError)
    assert "said on a stripe what it may not" in str(decode.errors[0])


def test_what_is_ordered_of_a_session_that_has_ended_is_answered_later(decode: Decode) -> None:
    decode.link.close()
    decode.link.close()
    decode.order(1)
    assert decode.answers == []
    decode.calls.popleft()()
    assert decode.answers == [("failed", 1)]


def test_a_mistake_of_ours_ends_its_session_and_what_follows_is_answered_all_the_same(
        decode: Decode, caplog: pytest.LogCaptureFixture) -> None:
    def mistaken(number: int, sums: np.ndarray) -> None:
        decode.answers.append(("fetched", number))
        if number == 1:
            raise RuntimeError("never thought of")

    decode.on_fetched = mistaken  # type: ignore[method-assign]
    (far,) = decode.greet(1)
    decode.order(1)
    decode.order(2)
    serve(decode, far, 1, 2)
    serve(decode, far, 2, 2)
    decode.waits_for(lambda: len(decode.answers) == 2)
    assert [number for _, number in decode.answers] == [1, 2]
    assert "RuntimeError on this side" in str(decode.errors[0])
    assert caplog.text.count("RuntimeError: never thought of") == 1


def test_what_was_ordered_early_and_cannot_be_asked_for_fails_and_ends_the_session(decode: Decode) -> None:
    order = decode.link._early
    decode.order(1)
    order[0] = order[0]._replace(rows=())
    decode.accept()
    far, name = decode.accept()
    far.sendall(stripe_answer(KEYS, next(n for n in range(STRIPES) if stripe_name(KEYS, n) == name)))
    decode.waits_for(lambda: decode.calls)
    with pytest.raises(ValueError, match="other rows than parts"):
        decode.calls.popleft()()
    assert decode.answers == [("failed", 1)]


def test_of_stripes_that_have_ended_at_once_the_one_that_says_most_is_why(decode: Decode) -> None:
    threads, number = decode.pool._pool, decode.link._number
    ended = [(number, tcp_pool.LEFT, 0), (number, tcp_pool.TAMPERED, 0), (number, tcp_pool.FAILED, 104)]
    told: Any = SimpleNamespace(collect=lambda: ([], ended, []), end=threads.end)
    decode.pool._pool = told
    decode.pool.collect()
    decode.pool._pool = threads
    assert isinstance(decode.errors[0], ProtocolError)
    assert "other bytes have come on a stripe than were sealed" in str(decode.errors[0])


@pytest.mark.parametrize("stripes", [-1, STRIPES + 1, 1 << 40])
def test_prefill_has_room_for_as_many_stripes_as_there_may_be(stripes: int) -> None:
    with pytest.raises(ProtocolError, match=f"has room for {stripes} stripes"):
        Decode(stripes)


def test_where_prefill_has_none_it_refuses_the_link_or_the_session_ends() -> None:
    decode = Decode(0)
    decode.order(1)
    for nth in range(50):
        decode.link.tick(100.0 + nth / 10, 2.0)
    assert "has not answered" in str(decode.errors[0])
    assert decode.answers == [("failed", 1)]
    decode.stop()


def test_sessions_share_what_this_process_may_have_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_pool, "STRIPES_MOST", 16)
    loop: Any = HeldLoop("decode")
    pool = StripePool(loop, 5.0)
    assert [pool.promise() for _ in range(9)] == [4, 4, 4, 1, 1, 1, 1, 0, 0]
    pool.give(4)
    assert [pool.promise(2), pool.promise(), pool.promise(), pool.promise(), pool.promise()] == [1, 1, 1, 1, 0]
    pool.close()
    loop.stop()
