"""What comes on a stripe, at either end, against readers that are written out here.

    byte 0      128: prefill's end, which is asked; else decode's: how many orders (of 4) · 4 the gate of the second one
                closes before anything comes
    byte 1      how many bytes come at once; 0: all
    the rest    what comes; then the connection ends
"""

from __future__ import annotations

import mmap
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Hashable
from typing import Any

from xpyd_sidecar.kv.packing import sum_of
from xpyd_sidecar.transport import _moves, _stripes

MODULES = ("xpyd_sidecar.transport._stripes",)
KEYS = (b"k" * 28, b"o" * 28)
"""Of what is there, and of what is not."""
SIZES = ((100, 64), (1,), (2112, 17, 8))
"""Bytes of the pieces of each order; those of whole cache lines come to pages."""
BEGIN = 1 << 20
STORE = random.Random(1).randbytes(8192)
PLACE = struct.Struct("<QQQII")
REQUEST = struct.Struct("<I28sQQQII")
HEADER = struct.Struct("<IIQ")
LEFT, FAILED, SILENT, LIED, TAMPERED = 1, 2, 3, 4, 5
COUNT_MOST = 1 << 16
LIMIT_S = 10.0


def asks(serial: int, offset: int, size: int, step: int = 0, count: int = 1, *, key: bytes = KEYS[0]) -> bytes:
    """A request."""
    return REQUEST.pack(serial, key, BEGIN + offset, size, step, count, 0)


PIECES = [size for sizes in SIZES for size in sizes]
TOKENS = (*(HEADER.pack(serial, 0, size) for serial, size in enumerate(PIECES)), *(HEADER.pack(n, 1, 0) for n in range(6)),
          *(bytes([number]) * 4 for number in (0, 1, 255)), bytes(100), bytes(16), *KEYS, asks(0, 0, 8192), asks(1, 0, 1),
          asks(1, 8, 64, 128, 60), asks(2, 8191, 1), asks(2, 0, 1, 1, 2, key=KEYS[1]),
          *(one.to_bytes(8, "little")
            for one in (BEGIN, BEGIN - 1, BEGIN + 8191, BEGIN + 8192, 1 << 63, (1 << 64) - 1, 8192)))


def check(data: bytes) -> Hashable:
    """What the flags say."""
    flags, cut, raw = data[0] if data else 0, data[1] if len(data) > 1 else 0, data[2:]
    return prefill(raw, cut) if flags & 128 else decode(raw, cut, flags % 4, 1 if flags & 4 else -1)


class Watched:
    """A pool with one stripe, and what it has told. ``keys``: of an encrypted one."""

    def __init__(self, *, serves: bool, keys: bytes = b"") -> None:
        self.pool = _stripes.Pool(1, 600)
        self.session = self.pool.open()
        near, self.far = socket.socketpair()
        near.setblocking(False)
        self.pool.attach(self.session, near.detach(), serves, keys)
        self.answers: list[tuple[int, bool]] = []
        self.ended: list[tuple[int, int, int]] = []

    def wait(self, what: Callable[[], object], deadline: float) -> None:
        while not what():
            assert time.monotonic() < deadline, "it does not come about"
            select.select([self.pool], [], [], 0.5)
            answers, ended, _ = self.pool.collect()
            self.answers += answers
            self.ended += ended

    def says(self, raw: bytes, cut: int) -> None:
        """It comes, and then nothing more."""
        self.far.settimeout(LIMIT_S)
        step = cut or max(len(raw), 1)
        try:
            for at in range(0, len(raw), step):
                self.far.sendall(raw[at:at + step])
            self.far.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it was ended before all had come

    def close(self) -> None:
        self.far.close()
        self.pool.close()


def decode(raw: bytes, cut: int, orders: int, closed: int) -> Hashable:
    """Orders get the bytes that the layout says, and a peer that says something else has lied."""
    one = Watched(serves=False)
    memory = [[memoryview(bytearray(size) if size % 64 else mmap.mmap(-1, size)) for size in sizes] for sizes in SIZES]
    gate = _stripes.Gate()
    held: list[tuple[Any, ...]] = []
    for number in range(min(orders, 3)):
        rows = tuple(_moves.Scatter(part, len(part), 1, None, 0, 0, len(part)) for part in memory[number])
        held.append(rows)
        parts = b"".join(PLACE.pack(BEGIN, size, 0, 1, 0) for size in SIZES[number])
        one.pool.order(one.session, number, KEYS[0], parts, rows, gate if number == closed else None)
    asked = sum(map(len, SIZES[:min(orders, 3)]))
    exactly(one.far, REQUEST.size * asked)
    gate.close()
    one.says(raw, cut)
    one.wait(lambda: one.ended, time.monotonic() + LIMIT_S)
    one.pool.end(one.session)
    one.wait(lambda: len(one.answers) == min(orders, 3), time.monotonic() + LIMIT_S)
    one.close()
    whole, lied = _expected(raw, min(orders, 3), closed)
    assert sorted(one.answers) == [(number, number in whole) for number in range(min(orders, 3))], (raw, one.answers, whole)
    (_, why, _), = one.ended
    assert (why == LIED) == lied, (raw, why)
    for number, data in whole.items():
        assert b"".join(memory[number]) == data, raw
        assert [row.sums() for row in held[number]] == [sum_of(part).to_bytes(8, "little") for part in memory[number]]
    assert closed < 0 or closed >= orders or not any(map(any, memory[closed])), raw
    return tuple(sorted(whole)), lied


def _expected(raw: bytes, orders: int, closed: int) -> tuple[dict[int, bytes], bool]:
    """The bytes of each order that has come whole, and whether something else has come."""
    waiting = [(number, size) for number in range(orders) for size in SIZES[number]]
    came: dict[int, bytes] = dict.fromkeys(range(orders), b"")
    failed = {closed}
    at = 0
    for serial, (number, size) in enumerate(waiting):
        if len(raw) - at < HEADER.size:
            failed |= {one for one, _ in waiting[serial:]}
            return {one: data for one, data in came.items() if one not in failed}, False
        header = HEADER.unpack_from(raw, at)
        at += HEADER.size
        if header == (serial, 1, 0):
            failed.add(number)
            continue
        if header != (serial, 0, size) or len(raw) - at < size:
            failed |= {one for one, _ in waiting[serial:]}
            return {one: data for one, data in came.items() if one not in failed}, header != (serial, 0, size)
        came[number] += raw[at:at + size]
        at += size
    return {one: data for one, data in came.items() if one not in failed}, len(raw) - at >= HEADER.size


def prefill(raw: bytes, cut: int) -> Hashable:
    """What leaves is of the copy, and is what was asked for; whoever asks for something else has lied."""
    one = Watched(serves=True)
    one.pool.add(KEYS[0], STORE, BEGIN)
    answers, lied = answers_to(raw)
    sock = one.far
    step = cut or max(len(raw), 1)
    sock.settimeout(LIMIT_S)
    try:
        for at in range(0, len(raw), step):
            sock.sendall(raw[at:at + step])
        assert lied or exactly(sock, len(answers)) == answers, raw
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        assert lied, raw
    if lied:  # what was asked for before may have left
        came = rest_of(sock)
        assert answers.startswith(came), raw
    one.wait(lambda: one.ended, time.monotonic() + LIMIT_S)
    (_, why, _), = one.ended
    assert not lied or why in {LIED, LEFT, FAILED}, (raw, why)
    assert lied or why in {LEFT, FAILED}, (raw, why)
    assert one.pool.take(KEYS[0]), "nobody sends of it any more"
    one.close()
    return len(answers), lied


def answers_to(raw: bytes) -> tuple[bytes, bool]:
    """What prefill answers to whole requests, and whether one follows that no honest decode says."""
    out = b""
    for serial in range(len(raw) // REQUEST.size):
        said, key, offset, size, step, count, zero = REQUEST.unpack_from(raw, serial * REQUEST.size)
        combed = step >= size if count > 1 else step == 0
        if said != serial or not size or not 0 < count <= COUNT_MOST or zero or not combed:
            return out, True
        if key != KEYS[0]:
            out += HEADER.pack(serial, 1, 0)
            continue
        begin = offset - BEGIN
        if begin < 0 or begin + step * (count - 1) + size > len(STORE):
            return out, True
        out += HEADER.pack(serial, 0, size * count)
        out += b"".join(STORE[begin + nth * step:][:size] for nth in range(count))
    return out, False


def exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes."""
    out = b""
    sock.settimeout(LIMIT_S)
    while len(out) < size:
        some = sock.recv(size - len(out))
        assert some, "it has ended"
        out += some
    return out


def rest_of(sock: socket.socket) -> bytes:
    """All that still comes."""
    out = b""
    sock.settimeout(LIMIT_S)
    try:
        while some := sock.recv(1 << 16):
            out += some
    except ConnectionError:
        return out
    return out


def seeds() -> list[bytes]:
    """What prefill sends of three orders, and what decode asks for, whole and in part."""
    sent = b"".join(HEADER.pack(serial, 0, size) + random.Random(serial).randbytes(size)
                    for serial, size in enumerate(PIECES))
    gone = HEADER.pack(0, 1, 0)
    streams = (sent, gone + sent[116:], sent[:-20], sent[:30], sent + gone, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"")
    asked = (asks(0, 0, 8192), asks(0, 8, 64, 128, 60) + asks(1, 0, 1, key=KEYS[1]) + asks(2, 8191, 1), asks(1, 0, 1),
             asks(0, 0, 8193), asks(0, 5, 10)[:-1], asks(0, 0, 10) + asks(1, 0, 10, 9, 2), b"")
    return [*(bytes([flags, cut]) + one for one in streams for flags, cut in ((3, 0), (3, 7), (7, 0), (2, 100), (0, 0))),
            *(bytes([128, cut]) + one for one in asked for cut in (0, 7))]
