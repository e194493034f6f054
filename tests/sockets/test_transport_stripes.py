"""Stripes: right bytes and sums over real sockets, orders answered once, and peers that lie, die or do not read."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import random
import socket
import sys
import termios
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from control_ends import connected_sockets, wait_until
from stripe_ends import (
    BEGIN,
    FAILED,
    HEADER,
    KEY,
    LEFT,
    LIED,
    LIMIT_S,
    OTHER,
    SILENT,
    End,
    Gate,
    Pool,
    Scatter,
    content,
    end,
    exactly,
    place,
    request,
    stripes_between,
    sums,
)

MIB = 1 << 20


def unread(sock: socket.socket) -> int:
    """Bytes that its other end has not taken."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def to_read(sock: socket.socket) -> int:
    """Bytes that have come and were not taken."""
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


def asked_each(d: End) -> tuple[socket.socket, socket.socket]:
    """Prefill's ends of two stripes, each of which was asked for a piece of 600 bytes."""
    pairs = [socket.socketpair() for _ in range(2)]
    for near, _ in pairs:
        d.attach(near, serves=False)
    d.order(place(BEGIN, 600), place(BEGIN, 600))
    (_, one), (_, other) = pairs
    for sock in (one, other):
        exactly(sock, 64)
    return one, other


# --- both ends ---

@pytest.mark.parametrize("stripes", [1, 4])
@pytest.mark.parametrize("size", [1, 100, 4096, 65_600, 200_000])
def test_pieces_come_to_their_places_with_their_sums(stripes: int, size: int) -> None:
    store, count = content(2 * MIB), max(1, min(40, MIB // size // 2))
    with end() as p, end() as d, stripes_between(p, d, stripes):
        p.pool.add(KEY, store, BEGIN)
        combed = [d.order(place(BEGIN + 7, size, size + 13 if count > 1 else 0, count), place(BEGIN, 64)) for _ in range(3)]
        packed = d.order(*[place(BEGIN + size * nth, size) for nth in range(count)])
        d.wait_answers(4)
        assert sorted(d.answers) == [(number, True) for number in (*combed, packed)]
        for number in combed:
            wanted = b"".join(store[7 + nth * (size + 13):][:size] for nth in range(count))
            assert d.memory[number] == [wanted, store[:64]]
            assert d.rows[number][0].sums() == sums(wanted, size, size)
        assert b"".join(d.memory[packed]) == store[:size * count]
        assert (d.ended, p.ended) == ([], [])


def test_rows_are_blocks_wherever_they_are_and_parts_of_a_row_have_sums() -> None:
    store, part = content(MIB), 4096
    with end() as p, end() as d, stripes_between(p, d, 2):
        p.pool.add(KEY, store, BEGIN)
        memory = bytearray(MIB)
        ids = memoryview(array("q", [5, 0, 9]))
        rows = Scatter(memory, 3 * part, 3, ids, 16 * part, 64, part)
        d.pool.order(d.session, 7, KEY, place(BEGIN + 128, 9 * part), (rows,), None)
        d.wait_answers(1)
        wanted = store[128:128 + 9 * part]
        for nth, block in enumerate((5, 0, 9)):
            assert memory[block * 16 * part + 64:][:3 * part] == wanted[nth * 3 * part:][:3 * part]
        assert rows.sums() == sums(wanted, part, part)


@pytest.mark.reads_while_written
def test_rows_on_cache_lines_come_to_their_places_however_they_are_cut() -> None:
    """They pass through memory of the thread; between two turns nothing is left there, and nothing else is touched."""
    draw, serial = random.Random(8), itertools.count()
    with end() as d:
        near, far = socket.socketpair()
        d.attach(near, serves=False)
        for turn in range(30):
            size, count = 64 * draw.choice([1, 64, 65, 1000, 1024, 1025, 5000]), draw.randrange(1, 6)
            data = content(size * count, turn)
            with mmap.mmap(-1, size * (count + 1) + 64) as memory:
                memory[:] = b"\xee" * len(memory)
                ids = array("q", draw.sample(range(count + 1), count))
                each = size // 64 // 2 * 64 or size
                rows = Scatter(memory, size, count, memoryview(ids), size, 0, each)
                d.pool.order(d.session, turn, KEY, place(BEGIN, size * count), (rows,), None)
                exactly(far, 64)
                far.sendall(HEADER.pack(next(serial), 0, size * count))
                sent = 0
                while sent < len(data):
                    cut = draw.choice([1, 100, 4096, 65_536, 200_000])
                    far.sendall(data[sent:sent + cut])
                    sent = min(sent + cut, len(data))
                    done = bytearray(b"\xee") * len(memory)
                    for n in range(-(-sent // size)):
                        part = data[n * size:min((n + 1) * size, sent)]
                        done[ids[n] * size:ids[n] * size + len(part)] = part
                    d.wait(lambda memory=memory, done=done: memory[:] == done)  # type: ignore[misc]
                d.wait_answers(turn + 1)
                assert d.answers[turn] == (turn, True)
                assert rows.sums() == sums(data, size, each)
                del rows
        far.close()


def test_a_fetch_is_spread_over_all_stripes_and_a_slow_one_gets_less() -> None:
    store = content(MIB)
    with end() as d:
        ends = []
        for _ in range(3):
            near, far = socket.socketpair()
            d.attach(near, serves=False)
            ends.append(far)
        asked = [0, 0, 0]
        others_had_most = threading.Event()

        def serve(which: int) -> None:
            sock = ends[which]
            for serial in range(300):
                try:
                    exactly(sock, 64)
                except AssertionError:
                    return
                asked[which] += 1
                if which == 0:  # the slow one: an even share for each would wait here for ever
                    others_had_most.wait(LIMIT_S)
                else:
                    time.sleep(0.001)  # without a rest one of the quick ones could take all
                    if asked[1] + asked[2] >= 250:
                        others_had_most.set()
                sock.sendall(HEADER.pack(serial, 0, 1000) + store[:1000])

        threads = [threading.Thread(target=serve, args=(which,)) for which in range(3)]
        for one in threads:
            one.start()
        d.order(*[place(BEGIN + nth * 1000, 1000) for nth in range(300)])
        d.wait_answers(1)
        assert d.answers == [(0, True)]
        assert others_had_most.is_set()
        assert sum(asked) == 300
        assert all(asked)
        d.close()
        for sock, one in zip(ends, threads, strict=True):
            one.join(5)
            sock.close()


def test_a_stripe_that_is_stuck_does_not_keep_others_from_asking_ahead() -> None:
    with end() as d:
        pairs = [socket.socketpair() for _ in range(2)]
        for near, _ in pairs:
            d.attach(near, serves=False)
        (_, stuck), (_, far) = pairs
        d.order(*[place(BEGIN + nth * 1000, 1000) for nth in range(300)])
        exactly(stuck, 64)  # and it is never answered
        for serial in range(100):
            exactly(far, 64)
            far.sendall(HEADER.pack(serial, 0, 1000) + bytes(1000))
        d.wait(lambda: to_read(far) > 32 * 64)
        for one in (stuck, far):
            one.close()


def test_an_order_of_more_than_may_be_under_way_is_answered_when_all_of_it_is_here() -> None:
    with end() as d:
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False)
            number = d.order(*[place(BEGIN, 6 * MIB)] * 3)
            for serial in range(3):
                exactly(far, 64)
                time.sleep(0.05)
                assert to_read(far) == 0, "the next one is asked for when there is room"
                d.collect()
                assert d.answers == []
                far.sendall(HEADER.pack(serial, 0, 6 * MIB) + bytes(6 * MIB))
            d.wait_answers(1)
            assert d.answers == [(number, True)]


def test_requests_that_wait_when_a_turn_ends_with_a_piece_have_the_next_one() -> None:
    store = content(2 * MIB)  # a turn is of two such pieces
    with end() as p, end() as d, stripes_between(p, d, 1):
        p.pool.add(KEY, store, BEGIN)
        for _ in range(12):
            d.order(*[place(BEGIN, 2 * MIB)] * 16)
            d.wait(lambda: d.answers or d.ended or p.ended)
            assert (d.ended, p.ended) == ([], [])
            assert d.answers.pop()[1]


def test_many_sessions_take_turns_and_one_whose_peer_does_not_read_holds_up_nobody() -> None:
    store = content(8 * MIB)
    with end(threads=1) as p, end(threads=1) as d:
        p.pool.add(KEY, store, BEGIN)
        with connected_sockets() as (deaf, served):
            p.attach(served, serves=True)
            for serial in range(32):
                deaf.sendall(request(serial, BEGIN, 8 * MIB))
            for _ in range(20):
                mine, theirs = d.pool.open(), p.pool.open()
                with connected_sockets() as (near, far):
                    d.attach(near, serves=False, session=mine)
                    p.attach(far, serves=True, session=theirs)
                d.order(place(BEGIN, 2 * MIB), session=mine)
            d.wait_answers(20)
            assert all(here for _, here in d.answers)
            assert all(memory == [store[:2 * MIB]] for memory in d.memory.values())


def test_one_who_asks_without_end_for_what_is_gone_holds_up_nobody_and_not_the_end_of_the_pool() -> None:
    store, stop, heard = content(MIB), threading.Event(), [0]
    with end(threads=1) as p, end(threads=1) as d, connected_sockets() as (eager, served):
        p.pool.add(KEY, store, BEGIN)
        p.attach(served, serves=True)

        def say() -> None:
            for first in itertools.count(0, 1024):
                if stop.is_set():
                    return
                with contextlib.suppress(OSError):
                    eager.sendall(b"".join(request(first + nth, 0, 1, key=OTHER) for nth in range(1024)))

        def hear() -> None:
            with contextlib.suppress(OSError):
                while some := eager.recv(MIB):
                    heard[0] += len(some)

        threads = [threading.Thread(target=one) for one in (say, hear)]
        eager.settimeout(LIMIT_S)
        for thread in threads:
            thread.start()
        try:
            p.wait(lambda: heard[0] > MIB)
            with stripes_between(p, d, 1):
                number = d.order(place(BEGIN, MIB))
                d.wait_answers(1)
            assert (d.answers, d.memory[number]) == ([(number, True)], [store])
            before = heard[0]
            p.wait(lambda: heard[0] > before)
            began = time.monotonic()
            p.close()
            assert time.monotonic() - began < 30
        finally:
            stop.set()
            with contextlib.suppress(OSError):
                eager.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def test_orders_wait_for_the_first_stripe_and_for_later_ones() -> None:
    store = content(MIB)
    with end() as p, end() as d:
        p.pool.add(KEY, store, BEGIN)
        number = d.order(place(BEGIN, MIB))
        time.sleep(0.05)
        d.collect()
        assert d.answers == []
        with stripes_between(p, d, 1):
            d.wait_answers(1)
        assert d.memory[number] == [store]


# --- gates ---

def test_a_gate_is_done_when_it_is_closed_and_nobody_is_inside() -> None:
    gate = Gate()
    assert (gate.enter(), gate.enter(), gate.done()) == (True, True, False)
    gate.leave()
    gate.close()
    assert (gate.enter(), gate.done()) == (False, False)
    gate.leave()
    assert gate.done()
    with pytest.raises(RuntimeError, match="nobody is inside"):
        gate.leave()
    assert gate.done()


def test_nothing_is_written_once_the_gate_is_closed_and_the_next_order_is_whole() -> None:
    store = content(300_000)
    with end() as d:
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False)
            gate = Gate()
            first, second = d.order(place(BEGIN, 200_000), gate=gate), d.order(place(BEGIN, 100_000))
            exactly(far, 128)
            far.sendall(HEADER.pack(0, 0, 200_000) + store[:50_000])
            d.wait(lambda: not unread(far))
            gate.close()
            d.wait(gate.done)  # nobody is inside between two turns
            before = bytes(d.memory[first][0])
            far.sendall(store[50_000:200_000] + HEADER.pack(1, 0, 100_000) + store[:100_000])
            d.wait_answers(2)
            assert d.answers == [(first, False), (second, True)]
            assert d.memory[first] == [before]
            assert not any(before[50_000:])
            assert d.memory[second] == [store[:100_000]]


def test_what_was_not_asked_for_when_its_gate_closes_is_never_asked_for() -> None:
    with end() as d:
        gate = Gate()
        gate.close()
        number = d.order(place(BEGIN, 100), gate=gate)
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False)
            d.wait_answers(1)
            assert d.answers == [(number, False)]
            far.setblocking(False)
            with pytest.raises(BlockingIOError):
                far.recv(1)


# --- copies ---

def test_what_is_gone_is_said_and_fails_its_order_and_no_other() -> None:
    store = content(MIB)
    with end() as p, end() as d, stripes_between(p, d, 2):
        p.pool.add(KEY, store, BEGIN)
        gone, there = d.order(place(BEGIN, 100), place(BEGIN, 200), key=OTHER), d.order(place(BEGIN, MIB))
        d.wait_answers(2)
        assert sorted(d.answers) == [(gone, False), (there, True)]
        assert d.memory[there] == [store]
        assert (d.ended, p.ended) == ([], [])


def test_after_a_hundred_that_are_gone_the_rest_is_still_asked_for() -> None:
    store = content(1000)
    with end() as p, end() as d, stripes_between(p, d, 1):
        p.pool.add(KEY, store, BEGIN)
        orders = [d.order(place(BEGIN, 1), key=OTHER) for _ in range(100)] + [d.order(place(BEGIN, 1000))]
        d.wait_answers(len(orders))
        assert dict(d.answers) == {number: number == orders[-1] for number in orders}


def test_a_copy_that_nobody_sends_is_free_at_once_and_one_that_is_sent_when_its_send_has_ended() -> None:
    store = content(32 * MIB)
    with end() as p, connected_sockets() as (far, near):
        p.attach(near, serves=True)
        p.pool.add(KEY, store, BEGIN)
        p.pool.add(OTHER, store, BEGIN)
        far.sendall(request(0, BEGIN, 32 * MIB) + request(1, BEGIN, 5) + request(2, BEGIN, 5, key=OTHER))
        assert HEADER.unpack(exactly(far, HEADER.size)) == (0, 0, 32 * MIB)
        assert not p.pool.take(KEY)
        assert p.pool.take(OTHER)
        with pytest.raises(ValueError, match="no copy of this key"):
            p.pool.take(KEY)
        time.sleep(0.1)
        p.collect()
        assert p.freed == []
        assert exactly(far, 32 * MIB) == store, "what was begun is sent whole"
        p.wait(lambda: p.freed)
        assert p.freed == [KEY]
        assert HEADER.unpack(exactly(far, HEADER.size)) == (1, 1, 0)
        assert HEADER.unpack(exactly(far, HEADER.size)) == (2, 1, 0)


def test_a_copy_goes_back_once_also_when_who_reads_it_dies() -> None:
    store = content(32 * MIB)
    with end() as p, connected_sockets() as (far, near):
        p.attach(near, serves=True)
        p.pool.add(KEY, store, BEGIN)
        far.sendall(request(0, BEGIN, 32 * MIB))
        exactly(far, HEADER.size)
        assert not p.pool.take(KEY)
        p.pool.add(KEY, store, BEGIN)  # its name may come again
        far.close()
        p.wait(lambda: p.freed and p.ended)
        assert p.freed == [KEY]
        assert [why for _, why, _ in p.ended] in ([LEFT], [FAILED])
        assert p.pool.take(KEY)


OUTSIDE = [
    (BEGIN - 1, 10, 0, 1), (BEGIN, MIB + 1, 0, 1), (BEGIN, 0, 0, 1), (BEGIN, 10, 0, 0), (BEGIN, 10, 5, 2),
    (BEGIN, 10, 0, 2), (BEGIN, 10, MIB, 2), (BEGIN + 10, 10, 1 << 62, 3), (0, 10, 0, 1), (1 << 63, 10, 0, 1),
    (BEGIN, 10, MIB - 9, 2),
    ((1 << 64) - 1, 10, 0, 1), (BEGIN, (1 << 64) - 1, 0, 1), (BEGIN, 1, (1 << 64) - 1, 2), (BEGIN, 1, 1, (1 << 16) + 1),
    (BEGIN, 1 << 63, 1 << 63, 2), (BEGIN, 10, 1, 1)]


@pytest.mark.parametrize("bad", OUTSIDE)
def test_nothing_beside_the_copy_is_sent_and_who_asks_for_it_has_ended_its_session(bad: tuple[int, int, int, int]) -> None:
    with end() as p, connected_sockets() as (far, near):
        p.attach(near, serves=True)
        p.pool.add(KEY, content(MIB), BEGIN)
        far.sendall(request(0, BEGIN + MIB - 16, 16) + request(1, *bad))
        assert exactly(far, HEADER.size + 16) == HEADER.pack(0, 0, 16) + content(MIB)[-16:]
        assert far.recv(1) == b""
        p.wait(lambda: p.ended)
        assert p.ended == [(p.session, LIED, 0)]


@pytest.mark.parametrize("bad", [request(1, BEGIN, 10), request(0, BEGIN, 10, zero=1), b"GET / HTTP/1.1\r\n" * 4])
def test_a_request_out_of_turn_or_of_another_kind_ends_its_session(bad: bytes) -> None:
    with end() as p, connected_sockets() as (far, near):
        p.attach(near, serves=True)
        p.pool.add(KEY, content(MIB), BEGIN)
        far.sendall(bad)
        assert far.recv(1) == b""
        p.wait(lambda: p.ended)
        assert p.ended == [(p.session, LIED, 0)]


def test_requests_are_read_no_faster_than_they_are_answered() -> None:
    with end() as p, connected_sockets() as (far, near):
        p.attach(near, serves=True)
        p.pool.add(KEY, content(MIB), BEGIN)
        far.settimeout(0.3)
        said = 0
        with contextlib.suppress(TimeoutError):
            while said < 32 * MIB:
                said += far.send(request(said // 64, BEGIN, MIB))
        assert said < 32 * MIB, "the kernel keeps them, and then nobody"
        p.collect()
        assert p.ended == []


# --- what decode is told ---

HEAD = HEADER.pack(0, 0, 512)
LIES = {"another request": HEADER.pack(1, 0, 512), "another size": HEADER.pack(0, 0, 513),
        "no state": HEADER.pack(0, 2, 512), "gone, with bytes": HEADER.pack(0, 1, 512),
        "another one is gone": HEAD + content(512) + HEADER.pack(2, 1, 0), "huge": HEADER.pack(0, 0, (1 << 64) - 1),
        "nothing": HEADER.pack(0, 0, 0), "http": b"HTTP/1.1 400 Bad Request\r\n\r\n"}


@pytest.mark.parametrize("what", LIES)
def test_what_prefill_may_not_send_ends_the_session_and_fails_its_orders(what: str) -> None:
    with end() as d:
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False)
            orders = [d.order(place(BEGIN, 512)), d.order(place(BEGIN, 70_000))]
            exactly(far, 128)
            far.sendall(LIES[what])
            d.wait(lambda: d.ended)
            assert d.ended == [(d.session, LIED, 0)]
            wanted = [(orders[0], True), (orders[1], False)] if what == "another one is gone" else [
                (number, False) for number in orders]
            assert sorted(d.answers) == wanted


def test_bytes_that_nobody_has_asked_for_end_the_session() -> None:
    with end() as d:
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False)
            far.sendall(HEAD)
            d.wait(lambda: d.ended)
            assert d.ended == [(d.session, LIED, 0)]


@pytest.mark.parametrize("sent", [b"", HEAD[:7], HEAD, HEAD + content(300), HEAD + content(512) + HEAD[:3]])
def test_a_peer_that_dies_fails_what_is_under_way(sent: bytes) -> None:
    with end() as d:
        near, far = socket.socketpair()
        d.attach(near, serves=False)
        orders = [d.order(place(BEGIN, 512)), d.order(place(BEGIN, 512), place(BEGIN, 100))]
        exactly(far, 192)
        far.sendall(sent)
        far.close()
        d.wait(lambda: d.ended)
        assert d.ended == [(d.session, LEFT, 0)]
        assert sorted(d.answers) == [(orders[0], len(sent) > 500), (orders[1], False)]


def test_ends_are_told_in_their_order_and_a_lie_before_what_follows_from_it() -> None:
    with end() as d:
        one, other = asked_each(d)
        one.sendall(HEADER.pack(0, 0, 601))
        assert one.recv(1) == b"", "it has ended"
        other.close()
        d.wait(lambda: len(d.ended) == 2)
        assert [why for _, why, _ in d.ended] == [LIED, LEFT]
        one.close()


def test_an_order_is_answered_when_its_last_piece_has_ended_on_whatever_stripe() -> None:
    with end() as d:
        one, other = asked_each(d)
        one.close()
        d.wait(lambda: d.ended)
        assert d.answers == [], "the other one may still write"
        other.sendall(HEADER.pack(0, 0, 600) + content(600))
        d.wait_answers(1)
        assert d.answers == [(0, False)]
        other.close()


# --- time, and the end ---

def test_who_owes_bytes_and_moves_none_is_given_up_and_who_owes_nothing_is_not() -> None:
    with end(threads=1, quiet=40) as d:
        pairs = [socket.socketpair() for _ in range(2)]
        idle = d.pool.open()
        d.attach(pairs[0][0], serves=False)
        d.attach(pairs[1][0], serves=False, session=idle)
        number = d.order(place(BEGIN, 2000))
        exactly(pairs[0][1], 64)
        pairs[0][1].sendall(HEADER.pack(0, 0, 2000))
        for _ in range(9):  # slow is not silent
            time.sleep(0.5)
            pairs[0][1].sendall(b"x")
        d.collect()
        assert d.ended == []
        d.wait(lambda: d.ended)
        assert (d.ended, d.answers) == ([(d.session, SILENT, 0)], [(number, False)])
        for _, far in pairs:
            far.close()


def test_a_peer_that_does_not_read_is_given_up() -> None:
    with end(quiet=3) as p, connected_sockets() as (far, near):
        p.attach(near, serves=True)
        p.pool.add(KEY, content(32 * MIB), BEGIN)
        far.sendall(request(0, BEGIN, 32 * MIB))
        p.wait(lambda: p.ended)
        assert p.ended == [(p.session, SILENT, 0)]
        assert p.pool.take(KEY)


def test_the_end_of_a_session_closes_its_stripes_answers_its_orders_and_frees_its_number() -> None:
    with end() as d:
        pairs = [socket.socketpair() for _ in range(3)]
        for near, _ in pairs:
            d.attach(near, serves=False)
        orders = [d.order(*[place(BEGIN, 5 * MIB)] * 5) for _ in range(3)]
        for _, far in pairs:
            exactly(far, 64)
        d.pool.end(d.session)
        d.wait(lambda: len(d.ended) == 3 and len(d.answers) == 3)
        assert sorted(d.answers) == [(number, False) for number in orders]
        assert {why for _, why, _ in d.ended} == {0}
        for _, far in pairs:
            far.settimeout(LIMIT_S)
            while far.recv(4096):
                pass
            far.close()
        assert d.pool.stripes == 0
        with pytest.raises(ValueError, match="no such session"):
            d.order(place(BEGIN, 1))
        assert d.pool.open() == d.session


def closes_in_the_middle(order: int) -> None:
    store = content(16 * MIB)
    with end() as p, end() as d, stripes_between(p, d, 4):
        p.pool.add(KEY, store, BEGIN)
        for _ in range(4):
            d.order(*[place(BEGIN + nth * MIB, MIB) for nth in range(16)])
        time.sleep(random.Random(order).random() / 50)
        began = time.monotonic()
        for one in (p, d) if order == 1 else (d, p):
            one.close()
            one.close()
        assert time.monotonic() - began < 60
        assert [number for number, _ in sorted(d.answers)] == [0, 1, 2, 3]
        assert all(b"".join(d.memory[number]) == store for number, here in d.answers if here)
        assert (len(d.ended), len(p.ended)) == (4, 4)
        assert p.pool.take(KEY)
        with pytest.raises(ValueError, match="closed"):
            d.order(place(BEGIN, 1))
        with pytest.raises(ValueError, match="closed"):
            p.pool.attach(p.session, 0, True, b"")


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_pool_that_closes_in_the_middle_answers_all_and_leaves_no_thread_or_file(order: int) -> None:
    before = set(Path("/proc/self/task").iterdir())
    files = len(os.listdir("/proc/self/fd"))
    closes_in_the_middle(order)
    wait_until(lambda: set(Path("/proc/self/task").iterdir()) <= before)  # one that was joined may show for a moment
    assert len(os.listdir("/proc/self/fd")) == files


def test_what_an_order_may_not_be_is_refused_before_anything_is_asked_for() -> None:
    with end() as d:
        memory = bytearray(100)

        def row() -> Any:
            return Scatter(memory, 50, 2, None, 0, 0, 0)

        good = place(BEGIN, 100)
        wrong = [(KEY[:-1], good, (row(),), None), (KEY, good[:-1], (row(),), None), (KEY, b"", (), None),
                 (KEY, good * 2, (row(),), None), (KEY, place(BEGIN, 99), (row(),), None),
                 (KEY, place(BEGIN, 100, 0, 0), (row(),), None), (KEY, place(BEGIN, 1 << 63, 0, 2), (row(),), None),
                 (KEY, place(BEGIN, 100, zero=1), (row(),), None)]
        for key, parts, rows, gate in wrong:
            with pytest.raises(ValueError):  # noqa: PT011  # each says it in its own words
                d.pool.order(d.session, 0, key, parts, rows, gate)
        for rows, gate in (((b"x",), None), ((row(),), object())):
            with pytest.raises(TypeError):
                d.pool.order(d.session, 0, KEY, good, rows, gate)
        for session in (-1, 5, 1 << 40):
            with pytest.raises(ValueError, match="no such session"):
                d.pool.order(session, 0, KEY, good, (row(),), None)
        d.collect()
        assert d.answers == []


def test_a_pool_has_some_threads_some_patience_and_so_many_sessions() -> None:
    for threads, quiet in ((0, 1), (9, 1), (1, 0)):
        with pytest.raises(ValueError, match="no threads"):
            Pool(threads, quiet)
    with end() as d:
        assert [d.pool.open() for _ in range(4095)] == list(range(1, 4096))
        with pytest.raises(ValueError, match="too many sessions"):
            d.pool.open()
        d.pool.end(17)
        assert d.pool.open() == 17


def test_a_key_is_of_one_copy_and_names_are_as_long_as_they_are() -> None:
    with end() as p:
        p.pool.add(KEY, b"x", 0)
        with pytest.raises(ValueError, match="there is a copy"):
            p.pool.add(KEY, b"y", 0)
        for call in (lambda: p.pool.add(b"k", b"x", 0), lambda: p.pool.take(b"k")):
            with pytest.raises(ValueError, match="another size"):
                call()
        with pytest.raises(TypeError):
            p.pool.add(OTHER, "no bytes", 0)
