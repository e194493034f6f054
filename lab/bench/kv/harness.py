"""A byte from decode to prefill and back, for contenders that prefill must begin, or that cannot tell decode of the end."""

from __future__ import annotations

import socket


class Trigger:
    """One TCP connection."""

    def listen(self) -> int:
        """Port to connect to."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    def accept(self) -> None:
        self._socket, _ = self._listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        self._socket.sendall(b"x")

    def wait(self) -> None:
        if self._socket.recv(1) != b"x":
            raise RuntimeError("the other side has ended")

    @staticmethod
    def free_port() -> int:
        with socket.create_server(("127.0.0.1", 0)) as one:
            return int(one.getsockname()[1])
