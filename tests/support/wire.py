"""A TCP proxy in front of a data link, with faults: what a test does to the bytes between two engines.

    wire = Wire(target_port)         listens at wire.port
    wire.corrupt = 1                 ruin the payload of the next data frame that comes from the target
    wire.ruined = {2}                ruin the payload of all data frames of these arrays, as long as it is set
    wire.ruin_header = 1             flip a bit in the header of the next frame
    wire.half = 1                    pass on half of the next data frame, then close both ends
    wire.spare = 5                   let so many data frames pass before any of these
    wire.ruin_at = 32                byte of the header in which the bit is flipped
    wire.slow_s = 0.05               keep every frame for so long
    wire.hold.set()                  take bytes from the target, pass none on (a stuck peer)
    wire.cut()                       close every connection

The stream from the target is parsed into frames, so that a fault hits a payload and never the header by chance.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.frames import HEADER_BYTES, FrameKind


class Wire:
    """The proxy; its threads end with ``close``."""

    def __init__(self, target_port: int) -> None:
        self.corrupt = self.ruin_header = self.half = self.spare = 0
        self.ruin_at = HEADER_BYTES // 2
        self.slow_s = 0.0
        self.hold = threading.Event()
        self.frames = 0
        """Data frames that have come from the target."""
        self.ruined: set[int] = set()
        self.arrays: set[int] = set()
        """Of which data frames have come."""
        self._target = target_port
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
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
            threading.Thread(target=self._frames, args=(far, near), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _frames(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                raw = _exactly(source, HEADER_BYTES)
                header = frames.decode(raw)
                payload = _exactly(source, header.length)
                if header.kind is FrameKind.DATA:
                    self.frames += 1
                    self.arrays.add(header.region)
                    if self.spare > 0:
                        self.spare -= 1
                        sink.sendall(raw + payload)
                        continue
                    if self.corrupt > 0:
                        self.corrupt -= 1
                        payload = bytes(len(payload))
                    if header.region in self.ruined:
                        payload = bytes(len(payload))
                    if self.half > 0:
                        self.half -= 1
                        sink.sendall(raw + payload[:len(payload) // 2])
                        break
                if self.ruin_header > 0:
                    self.ruin_header -= 1
                    raw = raw[:self.ruin_at] + bytes([raw[self.ruin_at] ^ 1]) + raw[self.ruin_at + 1:]
                if self.slow_s:
                    time.sleep(self.slow_s)
                while self.hold.is_set() and not self._closed and source.fileno() >= 0:
                    time.sleep(0.02)
                sink.sendall(raw + payload)
        for end in (source, sink):
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
