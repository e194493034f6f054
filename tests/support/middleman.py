"""Somebody between decode and a rank of prefill, who has no key: passes their frames on, or does something to one of them.

    man = Middleman(prefill.place[0], Deed("flip a bit", "decode", 3))          decode is told of ``man.port``
    man.seen         all bytes that have passed, as they were said
    man.ended        connections that the two have ended since
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self

from xpyd_sidecar.contract.ids import HostPort, split_host_port
from xpyd_sidecar.kv.session_keys import Sealing
from xpyd_sidecar.kv.wire import PREFIX_BYTES, FrameKind, Wire

Who = Literal["prefill", "decode"]
Frames = list[bytes]


def flipped(raw: bytes, at: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1
    return bytes(changed)


def cut(raw: bytes) -> bytes:
    """A frame that is shorter, and says so."""
    size = int.from_bytes(raw[8:12], "little") - 1
    return raw[:8] + size.to_bytes(4, "little") + raw[PREFIX_BYTES:-1]


def forged() -> bytes:
    """A frame that was sealed by somebody else."""
    wire = Wire()
    wire.seal(Sealing(secrets.token_bytes(32)), Sealing(secrets.token_bytes(32)))
    return wire.frame(FrameKind.PING)


REJECTION: Final = b"\x82\xa7outcome\xacincompatible\xa6reason\xa2no"
DEEDS: Final[dict[str, Callable[[bytes, bytes], Frames]]] = {
    "another kind": lambda raw, _: [flipped(raw, 5)],
    "as if in clear": lambda raw, _: [flipped(raw, 6)],
    "a bit at the begin": lambda raw, _: [flipped(raw, PREFIX_BYTES)],
    "a bit at the end": lambda raw, _: [flipped(raw, len(raw) - 1)],
    "shorter": lambda raw, _: [cut(raw)],
    "twice": lambda raw, _: [raw, raw],
    "another one before it": lambda raw, _: [forged(), raw],
    "in clear before it": lambda raw, _: [Wire().frame(FrameKind.REJECT, REJECTION), raw],
    "the one before again": lambda raw, before: [before or flipped(raw, 12)],
}
"""By name: what is passed on in place of a frame, which the other one came before."""
LATE: Final = ("left out", "after the next")
"""Deeds that are noticed with the next frame."""


class Deed(NamedTuple):
    """What is done to the frame with a number, of those that one side says in the first connection."""

    name: str = ""
    who: Who = "decode"
    number: int = -1


class Middleman:
    """Listens on ``port``."""

    def __init__(self, target: HostPort, deed: Deed = Deed(), change: Callable[[Who, bytes], bytes] | None = None) -> None:  # noqa: B008
        """``change``: of what travels on data connections, and of each frame where there is no deed."""
        self.seen: dict[Who, bytearray] = {"prefill": bytearray(), "decode": bytearray()}
        self.kinds: dict[Who, list[FrameKind]] = {"prefill": [], "decode": []}
        """Of the first connection."""
        self.ended = 0
        self.connections = 0
        self.done = threading.Event()
        """The deed is."""
        self._target = split_host_port(target)
        self._deed = deed
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._socks: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._socks += [near, far]
                number, self.connections = self.connections, self.connections + 1
                data = threading.Event(), threading.Event()
                for who, one, other in (("decode", near, far), ("prefill", far, near)):
                    pump = threading.Thread(target=self._pump, args=(number, who, one, other, data), daemon=True)
                    self._threads.append(pump)
                    pump.start()

    def _pump(self, connection: int, who: Who, one: socket.socket, other: socket.socket,
              begun: tuple[threading.Event, threading.Event]) -> None:
        with contextlib.suppress(OSError):
            try:
                for raw in self._passed(connection, who, one, begun):
                    other.sendall(raw)
            finally:
                if who == "decode":
                    begun[0].set()
                for sock in (one, other):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                if who == "decode":
                    self.ended += 1

    def _passed(self, connection: int, who: Who, sock: socket.socket,
                begun: tuple[threading.Event, threading.Event]) -> Iterator[bytes]:
        """``begun``: decode's first frame has come; it is the name of a data connection."""
        number, before, held = 0, b"", b""
        first, data = begun
        while True:
            if number and who == "prefill":
                first.wait(20)
            if data.is_set():
                break
            raw = self._frame(sock)
            self.seen[who] += raw
            kind = FrameKind(raw[5])
            if who == "decode" and not number:
                if kind is FrameKind.NAME:
                    data.set()
                first.set()
            if connection == 0:
                self.kinds[who].append(kind)
            if (connection, who, number) == (0, self._deed.who, self._deed.number):
                self.done.set()
                if self._deed.name == "after the next":
                    held = raw
                elif self._deed.name != "left out":
                    yield from DEEDS[self._deed.name](raw, before)
            else:
                yield raw if self._change is None or self._deed.name else self._change(who, raw)
                if held:
                    yield held
                    held = b""
            number, before = number + 1, raw
        while more := sock.recv(1 << 16):
            self.seen[who] += more
            yield more if self._change is None else self._change(who, more)

    @staticmethod
    def _frame(sock: socket.socket) -> bytes:
        head = whole(sock, PREFIX_BYTES)
        return head + whole(sock, int.from_bytes(head[8:12], "little"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)


def whole(sock: socket.socket, size: int) -> bytes:
    """So many bytes.

    Raises:
        ConnectionError: the other side has ended before.
    """
    found = bytearray()
    while len(found) < size:
        if not (more := sock.recv(size - len(found))):
            raise ConnectionError("ended")
        found += more
    return bytes(found)
