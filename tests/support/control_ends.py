"""Both ends of a control connection on one loop, over a real socket: what they have heard, and how they ended."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from xpyd_sidecar.errors import PeerError
from xpyd_sidecar.kv.wire import Frame
from xpyd_sidecar.session.control_connection import ControlConnection
from xpyd_sidecar.threads.loop import Loop


class End:
    """One end."""

    def __init__(self, loop: Loop, sock: socket.socket, *, connecting: bool = False) -> None:
        self.frames: list[Frame] = []
        self.errors: list[PeerError] = []
        self.heard: Callable[[Frame], object] = self.frames.append
        self.link = ControlConnection(loop, sock, "peer", self, connecting=connecting)

    def frame(self, frame: Frame) -> None:
        self.heard(frame)

    def on_closed(self, error: PeerError) -> None:
        self.errors.append(error)


@contextlib.contextmanager
def connected_sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            yield near, far


def on(loop: Loop, call: Callable[[], object]) -> None:
    """Have a call made on the loop, and wait for it."""
    over = threading.Event()

    def made() -> None:
        try:
            call()
        finally:
            over.set()

    loop.post(made)
    assert over.wait(60)


def wait_until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.005)
