"""What comes on an encrypted stripe, at either end, against readers that are written out here, by another library.

    byte 0      128: prefill's end, which is asked; else decode's: how many orders (of 4) · 4 the gate of the second one
                closes before anything comes
    byte 1      how many bytes come at once, times 37; 0: all
    byte 2      what somebody on the way does: 0 nothing, else one of ``DEEDS``; · 16 to which record
    byte 3      where in it
    the rest    headers, or requests, sealed as they stand there, and bytes of a piece behind a header that says so; what is
                no whole one comes as it is. Then the connection ends
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Hashable
from typing import Any

from cryptography.exceptions import InvalidTag
from sealed_stripes import KEYS as SECRETS
from sealed_stripes import RECORD, TAG, answer, of_decode, of_prefill, records_of

from fuzz.pieces import (
    BEGIN,
    FAILED,
    HEADER,
    KEYS,
    LEFT,
    LIED,
    LIMIT_S,
    PLACE,
    REQUEST,
    STORE,
    TAMPERED,
    Watched,
    answers_to,
    asks,
    exactly,
    rest_of,
)
from xpyd_sidecar.kv.packing import sum_of
from xpyd_sidecar.transport import _moves, _stripes
from xpyd_sidecar.transport.tcp import cipher

MODULES = ("xpyd_sidecar.transport._stripes",)
SIZES = ((RECORD + 64, 64), (1,), (2 * RECORD, 17, 8))
"""Bytes of the pieces of each order. Those of whole cache lines come to pages."""
PIECES = [(number, size) for number, sizes in enumerate(SIZES) for size in sizes]
BYTES_MOST = 4 * RECORD
"""Behind a header; one that says more is followed by none."""
Records = list[bytes]
_lack = cipher.lack()
assert not _lack, _lack


def _flip(records: Records, at: int, where: int) -> Records:
    record = bytearray(records[at])
    record[where * len(record) >> 8] ^= 1 << where % 8
    return [*records[:at], bytes(record), *records[at + 1:]]


DEEDS: tuple[Callable[[Records, int, int], Records], ...] = (
    _flip,
    lambda records, at, _: [*records[:at], *records[at + 1:]],
    lambda records, at, _: [*records[:at + 1], *records[at:]],
    lambda records, at, _: [*records[:at], *records[at:at + 2][::-1], *records[at + 2:]],
    lambda records, at, where: [*records[:at], records[at][:where * len(records[at]) >> 8]],
    lambda records, at, where: [*records[:at], bytes([where]) * len(records[at]), *records[at + 1:]],
    lambda records, at, where: [*records[:at], records[at][where % len(records[at]):], *records[at + 1:]],
    lambda records, at, where: [*records[:at], records[where % len(records)], *records[at:]],
)
TOKENS = (*(HEADER.pack(serial, 0, size) for serial, (_, size) in enumerate(PIECES)),
          *(HEADER.pack(n, 1, 0) for n in range(6)), asks(0, 0, 8192), asks(1, 0, 1), asks(1, 8, 64, 128, 60),
          asks(2, 8191, 1), *KEYS, bytes(16), bytes(64))


def check(data: bytes) -> Hashable:
    """What the first bytes say."""
    flags, cut, deed, where = (*data[:4], 0, 0, 0, 0)[:4]
    raw = data[4:]
    records = _sealed_requests(raw) if flags & 128 else _sealed_answers(raw)
    if records and deed % 16 and (which := deed % 16 - 1) < len(DEEDS):
        records = DEEDS[which](records, deed // 16 % len(records), where)
    wire = b"".join(records)
    return _prefill(wire, cut * 37) if flags & 128 else _decode(wire, cut * 37, min(flags % 4, 3), 1 if flags & 4 else -1)


def _sealed_requests(raw: bytes) -> Records:
    seals, whole = of_decode(), len(raw) // REQUEST.size * REQUEST.size
    return [*(seals.seal(raw[at:at + REQUEST.size]) for at in range(0, whole, REQUEST.size)), *filter(None, [raw[whole:]])]


def filler(serial: int, size: int) -> bytes:
    """Bytes of a piece."""
    return (serial.to_bytes(4, "little") + b"piece") * (size // 9 + 1)


def _sealed_answers(raw: bytes) -> Records:
    seals, whole = of_prefill(), len(raw) // HEADER.size * HEADER.size
    records: Records = []
    for nth, at in enumerate(range(0, whole, HEADER.size)):
        _, state, size = HEADER.unpack_from(raw, at)
        records.append(seals.seal(raw[at:at + HEADER.size]))
        if not state and size <= BYTES_MOST:
            data = filler(nth, size)[:size]
            records += [seals.seal(data[begin:begin + RECORD]) for begin in range(0, size, RECORD)]
    return [*records, *filter(None, [raw[whole:]])]


class RecordReader:
    """Opens records of a stream, one by one."""

    def __init__(self, wire: bytes) -> None:
        self._wire = wire
        self._at = 0
        self._opens = of_prefill()
        self.tampered = False

    def record(self, size: int) -> bytes | None:
        """The next one, of so many bytes; None: it is not there whole, or (``tampered``) is another one."""
        raw = self._wire[self._at:self._at + size + TAG]
        if self.tampered or len(raw) < size + TAG:
            return None
        self._at += len(raw)
        try:
            return self._opens.open(raw)
        except InvalidTag:
            self.tampered = True
            return None


def _decode(wire: bytes, cut: int, orders: int, closed: int) -> Hashable:
    """Each order is answered once, with the bytes that were sealed; of a record that was not, none is written."""
    one = Watched(serves=False, keys=SECRETS)
    memory = [[memoryview(bytearray(size) if size % 64 else mmap.mmap(-1, size)) for size in sizes] for sizes in SIZES]
    gate = _stripes.Gate()
    held: list[tuple[Any, ...]] = []
    for number in range(orders):
        rows = tuple(_moves.Scatter(part, len(part), 1, None, 0, 0, len(part)) for part in memory[number])
        held.append(rows)
        parts = b"".join(PLACE.pack(BEGIN, size, 0, 1, 0) for size in SIZES[number])
        one.pool.order(one.session, number, KEYS[0], parts, rows, gate if number == closed else None)
    exactly(one.far, (REQUEST.size + TAG) * sum(map(len, SIZES[:orders])))
    gate.close()
    one.says(wire, cut)
    one.wait(lambda: one.ended, time.monotonic() + LIMIT_S)
    one.pool.end(one.session)
    one.wait(lambda: len(one.answers) == orders, time.monotonic() + LIMIT_S)
    one.close()
    whole, written, whys = _expected(wire, orders, closed)
    assert sorted(one.answers) == [(number, number in whole) for number in range(orders)], (one.answers, whole)
    (_, why, _), = one.ended
    assert why in whys, (why, whys)
    for number in range(orders):
        assert [bytes(part) for part in memory[number]] == [
            data + bytes(size - len(data)) for data, size in zip(written[number], SIZES[number], strict=True)]
    for number in whole:
        assert [row.sums() for row in held[number]] == [sum_of(part).to_bytes(8, "little") for part in memory[number]]
    return tuple(sorted(whole)), why


def _expected(wire: bytes, orders: int, closed: int) -> tuple[set[int], list[list[bytes]], set[int]]:
    """Orders that have come whole, what is written of each, and how the stripe may have ended."""
    reader, failed = RecordReader(wire), {closed}
    written = [[b""] * len(sizes) for sizes in SIZES]
    waiting = [(number, nth, size) for number in range(orders) for nth, size in enumerate(SIZES[number])]
    for serial, (number, nth, size) in enumerate(waiting):
        header = reader.record(HEADER.size)
        if header == HEADER.pack(serial, 1, 0):
            failed.add(number)
            continue
        lied = header not in {None, HEADER.pack(serial, 0, size)}
        for record in records_of(size) if header is not None and not lied else ():
            data = reader.record(record - TAG)
            if data is None:
                header = None
                break
            if number not in failed:
                written[number][nth] += data
        if lied or header is None:
            failed |= {one for one, _, _ in waiting[serial:]}
            whys = {LIED} if lied else {TAMPERED} if reader.tampered else {LEFT, FAILED}
            return set(range(orders)) - failed, written, whys
    header = reader.record(HEADER.size)
    whys = {LIED} if header is not None else {TAMPERED} if reader.tampered else {LEFT, FAILED}
    return set(range(orders)) - failed, written, whys


def _prefill(wire: bytes, cut: int) -> Hashable:
    """What leaves is sealed, of the copy, and was asked for by decode; whoever says something else ends the stripe."""
    one = Watched(serves=True, keys=SECRETS)
    one.pool.add(KEYS[0], STORE, BEGIN)
    opens, said, tampered = of_decode(), b"", False
    for at in range(0, len(wire) // (REQUEST.size + TAG) * (REQUEST.size + TAG), REQUEST.size + TAG):
        try:
            said += opens.open(wire[at:at + REQUEST.size + TAG])
        except InvalidTag:
            tampered = True
            break
    answers, lied = answers_to(said)
    sealed, at = b"", 0
    seals = of_prefill()
    while at < len(answers):
        serial, state, size = HEADER.unpack_from(answers, at)
        at += HEADER.size + size
        sealed += seals.seal(HEADER.pack(serial, 1, 0)) if state else b"".join(answer(seals, serial, answers[at - size:at]))
    wrong, sock = lied or tampered, one.far
    sock.settimeout(LIMIT_S)
    try:
        for begin in range(0, len(wire), cut or max(len(wire), 1)):
            sock.sendall(wire[begin:begin + (cut or len(wire))])
        assert wrong or exactly(sock, len(sealed)) == sealed
        sock.shutdown(1)
    except OSError:
        assert wrong
    if wrong:  # what was asked for before may have left
        assert sealed.startswith(rest_of(sock))
    one.wait(lambda: one.ended, time.monotonic() + LIMIT_S)
    (_, why, _), = one.ended
    # who reads nothing while much is owed is not asked further: then the end is seen first
    assert why in ({LIED if lied else TAMPERED, LEFT, FAILED} if wrong else {LEFT, FAILED}), why
    assert one.pool.take(KEYS[0]), "nobody sends of it any more"
    one.close()
    return len(answers), lied, tampered


def seeds() -> list[bytes]:
    """What prefill says of three orders, and what decode asks for, whole and changed in each way."""
    says = b"".join(HEADER.pack(serial, 0, size) for serial, (_, size) in enumerate(PIECES))
    gone = HEADER.pack(0, 1, 0)
    answers = (says, gone + says[16:], says[:-5], says + gone, says[:32], b"")
    asked = (asks(0, 0, 8192), asks(0, 8, 64, 128, 60) + asks(1, 0, 1, key=KEYS[1]) + asks(2, 8191, 1), asks(0, 0, 8193),
             asks(0, 5, 10)[:-1], b"")
    whole = [*(bytes([flags, cut, 0, 0]) + one for one in answers for flags, cut in ((3, 0), (7, 0), (2, 27), (1, 255))),
             *(bytes([128, cut, 0, 0]) + one for one in asked for cut in (0, 1))]
    return [*whole, *(bytes([flags, 0, 1 + nth + 16 * which, 129]) + one
                      for nth in range(len(DEEDS)) for which in (0, 2, 5) for flags, one in ((3, says), (128, asked[1])))]
