"""Encrypted stripes: right bytes and sums, nothing to read on the way, nothing of a record that was changed."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import random
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable

import pytest
from control_ends import connected_sockets
from sealed_stripes import KEYS, RECORD, REKEY_AFTER, TAG, answer, of_decode, of_prefill, records_of
from stripe_ends import (
    BEGIN,
    HEADER,
    KEY,
    LEFT,
    LIED,
    LIMIT_S,
    TAMPERED,
    End,
    Gate,
    Scatter,
    content,
    end,
    exactly,
    place,
    request,
    stripes_between,
    sums,
)

from xpyd_sidecar.transport.tcp import cipher

pytestmark = pytest.mark.skipif(bool(cipher.lack()), reason="there is no libcrypto here")
MIB = 1 << 20
ASKED = 64 + TAG
OTHERS = bytes(range(64, 128))


# --- both ends ---

@pytest.mark.parametrize("stripes", [1, 4])
@pytest.mark.parametrize("size", [1, 100, 2047, 2048, 65_535, 65_536, 65_600, 200_000])
def test_pieces_come_to_their_places_with_their_sums(stripes: int, size: int) -> None:
    store, count = content(2 * MIB), max(1, min(40, MIB // size // 2))
    keys = [KEYS[nth:] + KEYS[:nth] for nth in range(stripes)]
    with end() as p, end() as d, stripes_between(p, d, stripes, keys):
        p.pool.add(KEY, store, BEGIN)
        combed = [d.order(place(BEGIN + 7, size, size + 13 if count > 1 else 0, count), place(BEGIN, 64)) for _ in range(3)]
        bare = d.order(place(BEGIN + 7, size, size + 13 if count > 1 else 0, count), part=0)
        packed = d.order(*[place(BEGIN + size * nth, size) for nth in range(count)])
        d.wait_answers(5)
        assert sorted(d.answers) == [(number, True) for number in (*combed, bare, packed)]
        wanted = b"".join(store[7 + nth * (size + 13):][:size] for nth in range(count))
        for number in combed:
            assert d.memory[number] == [wanted, store[:64]]
            assert d.rows[number][0].sums() == sums(wanted, size, size)
        assert d.memory[bare] == [wanted]
        assert b"".join(d.memory[packed]) == store[:size * count]
        assert (d.ended, p.ended) == ([], [])


@pytest.mark.parametrize(("size", "part"), [
    (4096, 4096), (65_536, 65_536), (RECORD * 3, RECORD * 3), (RECORD * 2 + 4160, 4160), (MIB, 256 << 10), (MIB + 64, MIB),
    (MIB + 8, MIB), (300_000, 300_000), (64, 64)])
@pytest.mark.parametrize("shift", [0, 8])
def test_sums_are_right_however_parts_lie_across_records_and_lines(size: int, part: int, shift: int) -> None:
    store, count = content(4 * MIB), 3
    with end() as p, end() as d, stripes_between(p, d, 1, [KEYS]), mmap.mmap(-1, (size + 64) * 8) as memory:
        p.pool.add(KEY, store, BEGIN)
        ids = memoryview(array("q", [5, 0, 3]))
        rows = Scatter(memory, size, count, ids, size + 64, shift, part)
        d.pool.order(d.session, 0, KEY, place(BEGIN + 64, size * count), (rows,), None)
        d.wait_answers(1)
        data = store[64:64 + size * count]
        assert d.answers == [(0, True)]
        wanted = bytearray(len(memory))
        for nth, block in enumerate(ids):
            at = block * (size + 64) + shift
            wanted[at:at + size] = data[nth * size:(nth + 1) * size]
        assert memory[:] == wanted
        assert rows.sums() == sums(data, size, part)
        del rows


# --- what each end says, and takes ---

def test_all_that_is_said_is_sealed_as_the_protocol_says_and_holds_nothing_to_read() -> None:
    store, asks, says = content(MIB), of_decode(), of_prefill()
    with end() as d, end() as p:
        near, far = socket.socketpair()
        mine, prefill = socket.socketpair()
        with far, mine:
            d.attach(near, serves=False, keys=KEYS)
            p.attach(prefill, serves=True, keys=KEYS)
            p.pool.add(KEY, store, BEGIN)
            number = d.order(place(BEGIN, 200_000), place(BEGIN + 300_000, 1000, 3000, 50))
            heard = exactly(far, 2 * ASKED)
            assert KEY not in heard
            asked = [asks.open(heard[:ASKED]), asks.open(heard[ASKED:])]
            assert asked == [request(0, BEGIN, 200_000), request(1, BEGIN + 300_000, 1000, 3000, 50)]
            mine.sendall(heard)
            for serial, data in enumerate((store[:200_000],
                                           b"".join(store[300_000 + 3000 * nth:][:1000] for nth in range(50)))):
                head = exactly(mine, 16 + TAG)
                records = [exactly(mine, size) for size in records_of(len(data))]
                assert says.open(head) == HEADER.pack(serial, 0, len(data))
                assert b"".join(map(says.open, records)) == data
                assert not any(data[at:at + 16] in record for record in records for at in range(0, len(data), 997))
                far.sendall(head + b"".join(records))
            d.wait_answers(1)
            assert d.answers == [(number, True)]
            assert d.memory[number][0] == store[:200_000]


def test_records_that_come_and_leave_in_small_cuts_are_whole() -> None:
    draw, asks, says = random.Random(5), of_decode(), of_prefill()
    data = content(300_000)
    with end() as d, end() as p:
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False, keys=KEYS)
            orders = [d.order(place(BEGIN, size)) for size in (1, 65_536, 300_000)]
            exactly(far, 3 * ASKED)
            stream = b"".join(record for serial, size in enumerate((1, 65_536, 300_000))
                              for record in answer(says, serial, data[:size]))
            at = 0
            while at < len(stream):
                cut = draw.choice([1, 15, 17, 1000, 65_552, 70_000])
                far.sendall(stream[at:at + cut])
                at += cut
            d.wait_answers(3)
            assert [d.memory[number] for number in orders] == [[data[:1]], [data[:65_536]], [data]]
        prefill, mine = socket.socketpair()
        with mine:
            prefill.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            p.attach(prefill, serves=True, keys=KEYS)
            p.pool.add(KEY, data, BEGIN)
            mine.sendall(b"".join(asks.seal(request(serial, BEGIN + 11, 250_000)) for serial in range(2)))
            again = of_prefill()
            for serial in range(2):
                stream = exactly(mine, 16 + TAG)
                assert again.open(stream) == HEADER.pack(serial, 0, 250_000)
                came = b"".join(again.open(exactly(mine, size)) for size in records_of(250_000))
                assert came == data[11:11 + 250_000]


def test_a_manifest_that_is_gone_is_said_in_one_record_and_the_next_answer_is_whole() -> None:
    store = content(MIB)
    with end() as p, end() as d, stripes_between(p, d, 1, [KEYS]):
        p.pool.add(KEY, store, BEGIN)
        gone, here = d.order(place(BEGIN, 5), key=b"x" * 28), d.order(place(BEGIN, 70_000))
        d.wait_answers(2)
        assert sorted(d.answers) == [(gone, False), (here, True)]
        assert d.memory[here] == [store[:70_000]]


def test_keys_are_replaced_at_both_ends_and_in_both_directions_at_once() -> None:
    many, at_once = REKEY_AFTER + 64, 32  # requests; there are twice as many records of prefill's
    asks, says = of_decode(), of_prefill()
    with end(threads=1, quiet=600) as d:
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False, keys=KEYS)
            for first in range(0, many, 8192):
                d.order(*[place(BEGIN + nth, 1) for nth in range(first, min(many, first + 8192))])
            for first in range(0, many, at_once):
                batch = range(first, first + at_once)
                heard = exactly(far, at_once * ASKED)
                assert [asks.open(heard[at:at + ASKED]) for at in range(0, len(heard), ASKED)] == [
                    request(serial, BEGIN + serial, 1) for serial in batch]
                far.sendall(b"".join(record for serial in batch for record in answer(says, serial, bytes([serial % 256]))))
            d.wait_answers(len(d.memory))
            assert all(here for _, here in d.answers)
            came = b"".join(itertools.chain.from_iterable(d.memory[number] for number in sorted(d.memory)))
            assert came == bytes(serial % 256 for serial in range(many))
    asks, says = of_decode(), of_prefill()
    near, far = socket.socketpair()
    with end(threads=1, quiet=600) as p, far:
        p.attach(near, serves=True, keys=KEYS)
        p.pool.add(KEY, bytes(range(256)), BEGIN)
        for first in range(0, many, at_once):
            batch = range(first, first + at_once)
            far.sendall(b"".join(asks.seal(request(serial, BEGIN + serial % 256, 1)) for serial in batch))
            heard = exactly(far, at_once * (16 + TAG + 1 + TAG))
            for at, serial in zip(range(0, len(heard), 17 + 2 * TAG), batch, strict=True):
                assert says.open(heard[at:at + 16 + TAG]) == HEADER.pack(serial, 0, 1)
                assert says.open(heard[at + 16 + TAG:at + 17 + 2 * TAG]) == bytes([serial % 256])


# --- what somebody on the way does ---

SIZE = 3 * RECORD + 100
Records = list[bytes]


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1:]


def changed(which: int, at: int) -> Callable[[Records], Records]:
    return lambda records: [*records[:which], flipped(records[which], at), *records[which + 1:]]


FAULTS: dict[str, tuple[Callable[[Records], Records], int]] = {
    "the first byte of a header": (changed(0, 0), 0),
    "the length in a header": (changed(0, 8), 0),
    "the tag of a header": (changed(0, 31), 0),
    "the first byte of the piece": (changed(1, 0), 0),
    "a byte of its second record": (changed(2, 40_000), 1),
    "the tag of its third record": (changed(3, RECORD + TAG - 1), 2),
    "the last byte": (changed(4, 100 + TAG - 1), 3),
    "a record is left out": (lambda r: [*r[:2], *r[3:], *r[3:]], 1),
    "two change places": (lambda r: [r[0], r[2], r[1], *r[3:]], 0),
    "one comes twice": (lambda r: [*r[:3], r[2], *r[3:]], 2),
    "the header comes twice": (lambda r: [r[0], *r], 0),
    "of another stripe": (lambda r: answer(of_prefill(OTHERS), 0, content(SIZE)), 0),
    "what decode would seal": (lambda r: answer(of_decode(), 0, content(SIZE)), 0),
    "in clear": (lambda r: [HEADER.pack(0, 0, SIZE) + content(SIZE) + bytes(5 * TAG)], 0),
    "of an earlier session": (lambda r: answer(of_prefill(KEYS[::-1]), 0, content(SIZE)), 0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("part", [SIZE, 0])
def test_nothing_of_a_record_that_was_not_sealed_as_the_next_one_is_written(fault: str, part: int) -> None:
    change, whole = FAULTS[fault]
    data = content(SIZE)
    with end() as d:
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False, keys=KEYS)
            first, second = d.order(place(BEGIN, SIZE), part=part), d.order(place(BEGIN, 10))
            exactly(far, 2 * ASKED)
            with contextlib.suppress(BrokenPipeError):  # it was ended before all had come
                far.sendall(b"".join(change(answer(of_prefill(), 0, data))))
            d.wait(lambda: d.ended)
            assert d.ended == [(d.session, TAMPERED, 0)]
            d.pool.end(d.session)
            d.wait_answers(2)
            assert sorted(d.answers) == [(first, False), (second, False)]
            assert d.memory[first] == [data[:whole * RECORD] + bytes(SIZE - whole * RECORD)]
            assert d.memory[second] == [bytes(10)]


@pytest.mark.parametrize("kept", [0, 10, 31, 32, 1000, 32 + RECORD + TAG, 32 + 2 * (RECORD + TAG) + 5])
def test_a_cut_ends_the_session_and_only_whole_records_are_written(kept: int) -> None:
    data = content(SIZE)
    with end() as d:
        near, far = socket.socketpair()
        d.attach(near, serves=False, keys=KEYS)
        number = d.order(place(BEGIN, SIZE))
        exactly(far, ASKED)
        far.sendall(b"".join(answer(of_prefill(), 0, data))[:kept])
        far.shutdown(socket.SHUT_WR)
        d.wait(lambda: d.ended)
        far.close()
        assert d.ended == [(d.session, LEFT, 0)]
        d.pool.end(d.session)
        d.wait_answers(1)
        whole = max(0, kept - 32) // (RECORD + TAG) * RECORD
        assert (d.answers, d.memory[number]) == ([(number, False)], [data[:whole] + bytes(SIZE - whole)])


def test_a_sealed_word_that_may_not_be_said_is_a_lie_all_the_same() -> None:
    for wrong in (HEADER.pack(1, 0, 100), HEADER.pack(0, 2, 0), HEADER.pack(0, 0, 99)):
        with end() as d:
            near, far = socket.socketpair()
            with far:
                d.attach(near, serves=False, keys=KEYS)
                d.order(place(BEGIN, 100))
                exactly(far, ASKED)
                far.sendall(of_prefill().seal(wrong))
                d.wait(lambda d=d: d.ended)  # type: ignore[misc]
                assert d.ended == [(d.session, LIED, 0)]


REQUESTS: dict[str, bytes] = {
    "changed": flipped(of_decode().seal(request(0, BEGIN, 10)), 33),
    "its tag": flipped(of_decode().seal(request(0, BEGIN, 10)), ASKED - 1),
    "in clear": request(0, BEGIN, 10) + bytes(TAG),
    "of the other direction": of_prefill().seal(request(0, BEGIN, 10)),
    "of another stripe": of_decode(OTHERS).seal(request(0, BEGIN, 10)),
}


@pytest.mark.parametrize("fault", REQUESTS)
def test_prefill_answers_no_request_that_was_not_sealed_as_the_next_one(fault: str) -> None:
    with end() as p, connected_sockets() as (far, near):
        p.attach(near, serves=True, keys=KEYS)
        p.pool.add(KEY, content(MIB), BEGIN)
        far.sendall(REQUESTS[fault])
        p.wait(lambda: p.ended)
        assert p.ended == [(p.session, TAMPERED, 0)]
        far.settimeout(LIMIT_S)
        assert far.recv(1) == b""
        assert p.pool.take(KEY)


def test_a_request_that_is_said_again_is_not_answered_again() -> None:
    with end() as p, connected_sockets() as (far, near):
        p.attach(near, serves=True, keys=KEYS)
        p.pool.add(KEY, content(MIB), BEGIN)
        said = of_decode().seal(request(0, BEGIN, 10))
        far.sendall(said)
        exactly(far, 16 + TAG + 10 + TAG)
        far.sendall(said)
        p.wait(lambda: p.ended)
        assert p.ended == [(p.session, TAMPERED, 0)]


# --- gates, ends, what may not be ---

def test_what_comes_behind_a_closed_gate_is_checked_and_not_written() -> None:
    data, says = content(2 * RECORD), of_prefill()
    with end() as d:
        near, far = socket.socketpair()
        with far:
            d.attach(near, serves=False, keys=KEYS)
            gate = Gate()
            first, second = d.order(place(BEGIN, 2 * RECORD), gate=gate), d.order(place(BEGIN, 1000))
            exactly(far, 2 * ASKED)
            head, one, two = answer(says, 0, data)
            far.sendall(head + one)
            d.wait(lambda: d.memory[first][0][:RECORD] == data[:RECORD])
            gate.close()
            d.wait(gate.done)
            far.sendall(two + b"".join(answer(says, 1, data[:1000])))
            d.wait_answers(2)
            assert sorted(d.answers) == [(first, False), (second, True)]
            assert d.memory[first] == [data[:RECORD] + bytes(RECORD)]
            assert d.memory[second] == [data[:1000]]
            third = d.order(place(BEGIN, 2 * RECORD), gate=gate)
            d.wait_answers(3)
            assert d.answers[2] == (third, False)
            assert d.ended == []


def closes_in_the_middle(order: int) -> tuple[End, End]:
    store = content(16 * MIB)
    with end() as p, end() as d, stripes_between(p, d, 4, [KEYS] * 4):
        p.pool.add(KEY, store, BEGIN)
        for _ in range(4):
            d.order(*[place(BEGIN + nth * MIB, MIB) for nth in range(16)])
        d.collect(random.Random(order).random() / 20)
        for one in (p, d) if order == 1 else (d, p):
            one.close()
        assert [number for number, _ in sorted(d.answers)] == [0, 1, 2, 3]
        assert all(b"".join(d.memory[number]) == store for number, here in d.answers if here)
        assert p.pool.take(KEY)
    return p, d


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_pool_that_closes_in_the_middle_answers_all(order: int) -> None:
    p, d = closes_in_the_middle(order)
    assert (len(d.ended), len(p.ended)) == (4, 4)


def test_keys_are_of_one_size_and_need_a_library() -> None:
    with end() as d:
        for keys in (KEYS[:-1], KEYS + b"x", b"k"):
            with pytest.raises(ValueError, match="keys of another size"):
                d.pool.attach(d.session, 0, False, keys)
        assert d.pool.stripes == 0
    program = ("from xpyd_sidecar.transport._stripes import Pool, open_libcrypto\n"
               "pool = Pool(1, 1)\n"
               "assert not open_libcrypto('libnothing.so.3') and not open_libcrypto('libc.so.6')\n"
               "try:\n    pool.attach(pool.open(), 0, False, bytes(64))\n"
               "except ValueError as error:\n    print(error)\n")
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "no library to encrypt with" in said
