"""A TCP proxy in front of a rank of prefill, with faults: what a test does to the bytes between two engines.

    wire = Wire(target_port)         listens at wire.port
    wire.corrupt = 1                 ruin the bytes of the next piece that comes from the target
    wire.ruin_header = 1             flip a bit in the header of the next frame or piece
    wire.ruin_piece = 1              … of the next piece
    wire.half = 1                    pass on half of the next piece, then close both ends
    wire.spare = 5                   let so many pieces pass before any of these
    wire.ruin_at = 6                 byte of the header in which the bit is flipped
    wire.slow_s = 0.05               keep every frame and every piece for so long
    wire.slow_piece_s = 0.05         keep every piece for so long
    wire.hold.set()                  take bytes from the target, pass none on (a stuck peer)
    wire.cut()                       close every connection

Control connections carry frames, whose headers alone can be read; stripes, which decode begins with NAME, carry
pieces. Both are parsed, so that a fault hits bytes of KV and never a header by chance. Of encrypted stripes (``sealed``)
nothing can be read: what comes of one at once stands for a piece.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Self

from xpyd_sidecar.kv.wire import PREFIX_BYTES, FrameKind

HEADER = struct.Struct("<IIQ")
"""Before each piece."""
ANSWER_BYTES = 32
"""That prefill begins a stripe with."""
LENGTH = slice(8, 12)
"""Of what follows, in a frame's header."""
KIND = 5


class Wire:
    """The proxy; its threads end with ``close``."""

    def __init__(self, target_port: int, *, sealed: bool = False) -> None:
        self.corrupt = self.ruin_header = self.ruin_piece = self.half = self.spare = 0
        self.ruin_at = PREFIX_BYTES // 2
        self.slow_s = self.slow_piece_s = 0.0
        self.hold = threading.Event()
        self.frames = 0
        """Pieces that have come from the target."""
        self._target = target_port
        self._sealed = sealed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and close every connection."""
        self._closed = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                if self._closed:
                    return
                near.close()
                continue
            far.settimeout(None)
            self._ends += [near, far]
            kind: queue.SimpleQueue[int] = queue.SimpleQueue()
            threading.Thread(target=self._forward, args=(near, far, kind), daemon=True).start()
            threading.Thread(target=self._back, args=(far, near, kind), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, kind: queue.SimpleQueue[int]) -> None:
        """From decode on; what its first frame is says what the connection is."""
        with contextlib.suppress(OSError, EOFError):
            first = _exactly(source, PREFIX_BYTES)
            kind.put(first[KIND])
            sink.sendall(first)
            while data := source.recv(65536):
                sink.sendall(data)
        kind.put(0)
        _end(source, sink)

    def _back(self, source: socket.socket, sink: socket.socket, kind: queue.SimpleQueue[int]) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._pass_frame(source, sink)  # CHALLENGE, which comes on each connection
            data = kind.get() == FrameKind.NAME
            if data:
                sink.sendall(_exactly(source, ANSWER_BYTES))
            while self._pass_piece(source, sink) if data else self._pass_frame(source, sink):
                pass
        _end(source, sink)

    def _pass_frame(self, source: socket.socket, sink: socket.socket) -> bool:
        head = _exactly(source, PREFIX_BYTES)
        rest = _exactly(source, int.from_bytes(head[LENGTH], "little"))
        self._send(source, sink, self._ruined_header(head) + rest)
        return True

    def _pass_piece(self, source: socket.socket, sink: socket.socket) -> bool:
        """Whether more may follow."""
        head, payload = self._piece(source)
        self.frames += 1
        if self.spare > 0:
            self.spare -= 1
            sink.sendall(head + payload)
            return True
        if self.corrupt > 0:
            self.corrupt -= 1
            payload = bytes(len(payload))
        if self.half > 0:
            self.half -= 1
            sink.sendall(head + payload[:len(payload) // 2])
            return False
        time.sleep(self.slow_piece_s)
        if self.ruin_piece > 0:
            self.ruin_piece, self.ruin_header = self.ruin_piece - 1, 1
        if head:
            self._send(source, sink, self._ruined_header(head) + payload)
        else:
            self._send(source, sink, self._ruined_header(payload))
        return True

    def _piece(self, source: socket.socket) -> tuple[bytes, bytes]:
        """The header of the next one, which is not to be seen of an encrypted one, and its bytes."""
        if self._sealed:
            data = source.recv(65536)
            if not data:
                raise EOFError
            return b"", data
        head = _exactly(source, HEADER.size)
        _, _, size = HEADER.unpack(head)
        return head, _exactly(source, size)

    def _ruined_header(self, head: bytes) -> bytes:
        if self.ruin_header <= 0:
            return head
        self.ruin_header -= 1
        at = min(self.ruin_at, len(head) - 1)
        return head[:at] + bytes([head[at] ^ 1]) + head[at + 1:]

    def _send(self, source: socket.socket, sink: socket.socket, data: bytes) -> None:
        if self.slow_s:
            time.sleep(self.slow_s)
        while self.hold.is_set() and not self._closed and source.fileno() >= 0:
            time.sleep(0.02)
        sink.sendall(data)


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
