"""Pools of stripes whose other ends are the test's: a session with its memory, orders, and what a peer says by hand."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from control_ends import connected_sockets

from xpyd_sidecar.kv.packing import sum_of

_moves = pytest.importorskip("xpyd_sidecar.transport._moves", exc_type=ImportError)
_stripes = pytest.importorskip("xpyd_sidecar.transport._stripes", exc_type=ImportError)
Gate, Pool, Scatter = _stripes.Gate, _stripes.Pool, _moves.Scatter

KEY = b"k" * 28
OTHER = b"o" * 28
BEGIN = 4096
"""Of the copy, in the store."""
PLACE = struct.Struct("<QQQII")
REQUEST = struct.Struct("<I28sQQQII")
HEADER = struct.Struct("<IIQ")
LEFT, FAILED, SILENT, LIED, TAMPERED = 1, 2, 3, 4, 5
LIMIT_S = 60.0


def place(offset: int, size: int, step: int = 0, count: int = 1, zero: int = 0) -> bytes:
    """Of a piece."""
    return PLACE.pack(offset, size, step, count, zero)


def request(serial: int, offset: int, size: int, step: int = 0, count: int = 1, *, key: bytes = KEY,
            zero: int = 0) -> bytes:
    """What decode says."""
    return REQUEST.pack(serial, key, offset, size, step, count, zero)


def content(size: int, seed: int = 1) -> bytes:
    """Bytes of a copy."""
    return random.Random(seed).randbytes(size)


def sums(data: bytes, size: int, part: int) -> bytes:
    """Of the parts of packed rows of ``size`` bytes, 8 bytes each."""
    return b"".join(sum_of(data[at + begin:min(at + begin + part, at + size)]).to_bytes(8, "little")
                    for at in range(0, len(data), size) for begin in range(0, size, part))


def exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes."""
    sock.settimeout(LIMIT_S)
    out = bytearray()
    while len(out) < size:
        some = sock.recv(min(size - len(out), 1 << 20))
        assert some, f"{len(out)} of {size} bytes have come"
        out += some
    return bytes(out)


class End:
    """A pool with one session, and all that it has told so far.

    ``quiet``: looks, ten a second, that a peer may be silent: a minute where the test is not about it.
    """

    def __init__(self, *, threads: int = 2, quiet: int = 600) -> None:
        self.pool = Pool(threads, quiet)
        self.session = self.pool.open()
        self.answers: list[tuple[int, bool]] = []
        self.ended: list[tuple[int, int, int]] = []
        self.freed: list[bytes] = []
        self.memory: dict[int, list[bytearray]] = {}
        self.rows: dict[int, tuple[Any, ...]] = {}
        self._next = 0

    def attach(self, sock: socket.socket, *, serves: bool, session: int | None = None, keys: bytes = b"") -> None:
        sock.setblocking(False)
        self.pool.attach(self.session if session is None else session, sock.detach(), serves, keys)

    def order(self, *places: bytes, gate: Any = None, key: bytes = KEY, part: int | None = None,
              session: int | None = None) -> int:
        """Have pieces brought; the number of the order."""
        number, self._next = self._next, self._next + 1
        shapes = [PLACE.unpack(one) for one in places]
        memory = self.memory[number] = [bytearray(size * count) for _, size, _, count, _ in shapes]
        rows = tuple(Scatter(one, size, count, None, 0, 0, size if part is None else part)
                     for one, (_, size, _, count, _) in zip(memory, shapes, strict=True))
        self.rows[number] = rows
        self.pool.order(self.session if session is None else session, number, key, b"".join(places), rows, gate)
        return number

    def collect(self, seconds: float = 0.0) -> None:
        """What has been told, after so long at most if nothing has."""
        select.select([self.pool], [], [], seconds)
        self._collect()

    def _collect(self) -> None:
        answers, ended, freed = self.pool.collect()
        self.answers += answers
        self.ended += ended
        self.freed += freed

    def wait(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < deadline, (self.answers, self.ended, self.freed)
            self.collect(0.05)

    def wait_answers(self, many: int) -> None:
        self.wait(lambda: len(self.answers) >= many)

    def close(self) -> None:
        self.pool.close()
        self._collect()


@contextlib.contextmanager
def end(**options: Any) -> Iterator[End]:
    """One that is closed."""
    made = End(**options)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def stripes_between(p: End, d: End, many: int, keys: Sequence[bytes] = ()) -> Iterator[None]:
    """Connect two pools' sessions. ``keys``: of each stripe; none: in clear."""
    with contextlib.ExitStack() as stack:
        for nth in range(many):
            near, far = stack.enter_context(connected_sockets())
            d.attach(near, serves=False, keys=keys[nth] if keys else b"")
            p.attach(far, serves=True, keys=keys[nth] if keys else b"")
        yield
