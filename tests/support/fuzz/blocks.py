"""Frames, copies and sums (``_moves.c``): random sizes, places, alignments and cuts, against a placement in plain Python.

    byte 0      which way the blocks come (``WAYS``)
    the rest    numbers that it asks for, each from one byte or two; none is left: 0
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import socket
import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from xpyd_sidecar.kv import frames
from xpyd_sidecar.transport import _moves

MODULES = ("xpyd_sidecar.transport._moves",)
TOKENS = tuple(bytes([one, other]) for one in (0, 1, 2, 3, 7, 255) for other in (0, 1, 3, 64, 255))
SIZES = (1, 63, 64, 100, 255, 256, 257, 1024, 1088, 4095, 4096, 4160, 65_535, 65_536, 65_537, 65_600, 70_000, 131_072,
         131_136, 200_000)
BLOB = random.Random(1).randbytes(1 << 20)
MOST = (70_000, 70_000, 5_000, 700_000)
"""Bytes of all frames together; large ones are slow."""
FILLER = 0xee
LIMIT_S = 10.0
TICKET = 32


class Numbers:
    """An input as numbers."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """The next one, of 0 to limit - 1."""
        many = 1 if limit <= 256 else 2 if limit <= 65536 else 3
        found = int.from_bytes(self._data[self._at:self._at + many], "little")
        self._at += many
        return found % limit

    def one(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[self.below(len(options))]


class Frame:
    """Blocks, the memory that they are to come to, and what it must look like then."""

    def __init__(self, numbers: Numbers, most: int) -> None:
        self.size: int = min(numbers.one(SIZES) + numbers.one((0, 0, 0, 1, 3, 64)), max(most, 1))
        self.count = 1 + numbers.below(max(1, min(5, most // self.size)))
        self.stride = self.size + numbers.one((0, 0, 1, 63, 64, 4096))
        self.offset = numbers.one((0, 0, 1, 7, 64, 100))
        self.cover = bool(numbers.below(4))
        self.head = _blob(numbers, 64)
        self.payload = _blob(numbers, self.size * self.count)
        room = self.offset + self.stride * 7 + self.size
        self.ids = array("q", random.Random(numbers.below(256)).sample(range(8), self.count))
        self.packed = not numbers.below(5)  # without ids
        if self.packed:
            room, self.stride, self.offset, self.ids = len(self.payload), self.size, 0, array("q", range(self.count))
        # Memory of the C library ends where it ends, which the sanitizer watches; mapped memory lies on a page's start.
        self.mapped = mmap.mmap(-1, room) if numbers.below(2) else None
        self.memory: Any = self.mapped if self.mapped is not None else bytearray(room)
        self.memory[:] = bytes([FILLER]) * room
        self.scatter = _moves.Scatter(self.memory, self.size, self.count, None if self.packed else memoryview(self.ids),
                                      self.stride, self.offset, self.cover)

    def check(self) -> None:
        """All is in its place, nothing else is touched, and the sums are right."""
        expected = bytearray(bytes([FILLER]) * len(self.memory))
        for n, block in enumerate(self.ids):
            at = block * self.stride + self.offset
            expected[at:at + self.size] = self.payload[n * self.size:(n + 1) * self.size]
        assert self.scatter.missing == 0
        assert self.memory[:] == expected, (self.size, self.count, self.stride, self.offset)
        assert self.scatter.sums() == (frames.sums(self.payload, self.size) if self.cover else b"")

    def close(self) -> None:
        """Give the memory back."""
        del self.scatter
        if self.mapped is not None:
            self.mapped.close()


def check(data: bytes) -> Hashable:
    """What the input asks for."""
    numbers = Numbers(data)
    return numbers.one(WAYS)(numbers)


def seeds() -> list[bytes]:
    """Each way, with a few numbers."""
    return [bytes([way]) + random.Random(seed).randbytes(size)
            for way in range(len(WAYS)) for seed, size in ((0, 0), (1, 20), (2, 60), (3, 200))]


def _blob(numbers: Numbers, size: int) -> bytes:
    start = numbers.below(1 << 16)
    return BLOB[start:start + size]


def _some(numbers: Numbers) -> list[Frame]:
    found: list[Frame] = []
    left = numbers.one(MOST)
    for _ in range(1 + numbers.below(6)):
        found.append(Frame(numbers, left))
        left -= len(found[-1].payload)
        if left <= 0:
            break
    return found


def receive(numbers: Numbers) -> Hashable:
    """Frames through a socket in pieces, as a link receives them: a header, its blocks, the next header …"""
    expected = _some(numbers)
    ending = BLOB[:64]
    wire = b"".join(one.head + one.payload for one in expected) + ending
    odd = numbers.below(4 * len(expected))  # of this one another header is expected
    known = [one.head[:47] + bytes([one.head[47] ^ (n == odd)]) for n, one in enumerate(expected)]
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        if numbers.below(2):
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        calls = _received(numbers, expected, known, wire, near, far)
    for one in expected:
        one.check()
        one.close()
    return "received", len(expected), calls > 2 * len(expected)


def _received(numbers: Numbers, expected: list[Frame], known: list[bytes], wire: bytes,  # noqa: PLR0917
              near: socket.socket, far: socket.socket) -> int:
    tail, out = bytearray(64), memoryview(wire)
    at, sent, got, calls = -1, 0, 0, 0  # the frame that is received; bytes of the header behind it
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < deadline, "nothing more comes"
        with contextlib.suppress(BlockingIOError):
            if sent < len(wire):
                sent += near.send(out[sent:sent + numbers.one((1 << 20, 1 << 16, 5000, 1000, 65, 64, 63, 1))])
        follow = tuple(one for n in range(at + 1, len(expected)) for one in (known[n], expected[n].scatter))
        follow = follow if numbers.below(3) else follow[:2 * numbers.below(3)]
        patience = numbers.below(2)
        calls += 1
        with contextlib.suppress(BlockingIOError):
            missing = expected[at].scatter.missing if at >= 0 else 0
            if missing:
                many, heads = expected[at].scatter.receive(far.fileno(), tail, patience, 1, follow, -1, False)
            elif follow and not got:
                many, heads = _moves.receive(far.fileno(), tail, patience, 1, follow, -1, False)
            else:
                many, heads = far.recv_into(memoryview(tail)[got:]), b""
                got, many = got + many, 0
            for head in (heads[n:n + 64] for n in range(0, len(heads), 64)):
                many -= missing + 64
                at += 1
                assert head == expected[at].head, "a header that was kept"
                missing = len(expected[at].payload)
            if at >= 0:
                assert expected[at].scatter.missing == max(0, missing - many)
            if many > missing:
                got += many - missing
        if got == 64:
            if at + 1 == len(expected):
                assert tail == wire[-64:]
                return calls
            at, got = at + 1, 0
            assert tail == expected[at].head


def read(numbers: Numbers) -> Hashable:
    """From this process's own memory, as from memory that another has mapped, too: alone or with a helper."""
    frame = Frame(numbers, numbers.one(MOST))
    threads = 1 + numbers.below(2)
    source = ctypes.create_string_buffer(frame.payload, len(frame.payload))
    ticket = ctypes.create_string_buffer(b"t" * TICKET, TICKET)
    right = numbers.below(4) > 0
    where = ctypes.addressof(source)
    expected = (b"t" if right else b"u") * TICKET
    done = frame.scatter.read(where, ctypes.addressof(ticket), expected, threads)
    assert done == right
    if right:
        frame.check()
    frame.close()
    return "read", right, threads


def copy(numbers: Numbers) -> Hashable:
    """From this process's memory, wherever it begins."""
    frame = Frame(numbers, numbers.one(MOST))
    skip = numbers.below(65)
    source = ctypes.create_string_buffer(bytes(skip) + frame.payload, skip + len(frame.payload))
    frame.scatter.copy(ctypes.addressof(source) + skip)
    frame.check()
    frame.close()
    return "copy", skip % 64 == 0


def send(numbers: Numbers) -> Hashable:
    """Views into a socket that takes some at a time: what it says it took has come, in order."""
    views = [_blob(numbers, numbers.one((0, 1, 64, 1000, 5000, 70_000))) for _ in range(1 + numbers.below(70))]
    wanted = b"".join(views[:64])
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, numbers.one((4096, 1 << 16, 1 << 20)))
        try:
            sent = _moves.send(near.fileno(), views, numbers.below(2), -1, False)
        except BlockingIOError:
            sent = 0
        came = bytearray()
        with contextlib.suppress(BlockingIOError):
            while part := far.recv(1 << 20):
                came += part
    assert came == wanted[:sent], (sent, len(came))
    assert sent or not wanted
    return "send", sent == len(wanted)


def place(numbers: Numbers) -> Hashable:
    """Blocks in and outside of a memory: what lies outside is refused, and nothing is written before."""
    room, size, count = numbers.below(5000), numbers.below(300), numbers.below(6)
    stride = numbers.one((0, 1, 64, size, size + 1, 1 << 40, (1 << 62) + 1))
    offset = numbers.one((0, 1, 100, 1 << 40, (1 << 63) - 1))
    odd = (0, 1, 2, 3, 5, 17, -1, 1 << 20, 1 << 40, (1 << 63) - 1, -(1 << 63))
    ids = array("q", [numbers.one(odd) for _ in range(count)])
    if not numbers.below(8):
        ids.append(0)
    fits = size > 0 and 0 < count == len(ids) and all(
        one >= 0 and one * stride + offset + size <= room for one in ids)
    memory = bytearray(room)
    try:
        scatter = _moves.Scatter(memory, size, count, ids, stride, offset, True)
    except ValueError:
        assert not fits, (room, size, count, stride, offset, ids)
        return "refused", len(ids) == count
    assert fits, (room, size, count, stride, offset, ids)
    source = ctypes.create_string_buffer(BLOB[:size * count], size * count)
    scatter.copy(ctypes.addressof(source))
    assert scatter.sums() == frames.sums(source.raw, size)
    return "placed"


def sums(numbers: Numbers) -> Hashable:
    """Of packed blocks, whole or not."""
    size, count, more = numbers.one(SIZES) + numbers.below(3) - 1, numbers.below(4), numbers.one((0, 0, 0, 1))
    start = numbers.below(65)
    data = memoryview(BLOB)[start:start + size * count + more]
    if size < 1 or len(data) % size:
        try:
            _moves.sums(data, size)
        except ValueError:
            return "no sums"
        raise AssertionError("sums of parts of blocks")
    assert _moves.sums(data, size) == frames.sums(data, size)
    return "sums"


WAYS: tuple[Callable[[Numbers], Hashable], ...] = (receive, receive, receive, read, copy, send, place, sums)
