"""A loop whose thread is the test's, and sockets of this process for it: what is due is done when the test says so."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Still(socket.socket):
    """A socket of this process that takes what is set of one of TCP."""

    def setsockopt(self, *_: Any) -> None:
        """It has no such option."""

    def getsockname(self) -> tuple[str, int]:
        return "near", 1

    def getpeername(self) -> tuple[str, int]:
        return "far", 1


class HeldLoop:
    """A ``Loop`` whose thread is whoever calls ``run_…``."""

    def __init__(self, name: str, on_tick: Callable[[float], None] = lambda now: None) -> None:
        self.thread = SimpleNamespace(words="", name=name)
        self.posted: deque[Callable[[], None]] = deque()
        self._on_tick = on_tick
        self._watched: dict[Any, tuple[int, Callable[[int], None]]] = {}
        self._ends: list[Callable[[], None]] = []

    def start(self) -> None:
        """It is called instead."""

    def post(self, call: Callable[[], None]) -> None:
        self.posted.append(call)

    def at_end(self, call: Callable[[], None]) -> None:
        self._ends.append(call)

    def watch(self, sock: Any, events: int, call: Callable[[int], None]) -> None:
        if events:
            self._watched[sock] = events, call
        else:
            self._watched.pop(sock, None)

    def ready(self) -> list[Any]:
        """Sockets that it would serve now."""
        poll, by_file = select.poll(), {}
        found = []
        for sock, (events, _) in self._watched.items():
            if isinstance(sock, HeldListener):
                if sock.waiting:
                    found.append(sock)
            else:
                by_file[sock.fileno()] = sock
                poll.register(sock, (select.POLLIN if events & 1 else 0) | (select.POLLOUT if events & 2 else 0))
        return found + [by_file[number] for number, seen in poll.poll(0) if seen]

    def run_socket(self, sock: Any) -> None:
        events, call = self._watched[sock]
        call(events)

    def run_post(self) -> None:
        self.posted.popleft()()

    def run_all(self) -> bool:
        """All posts and sockets; whether there were any."""
        did = bool(self.posted)
        while self.posted:
            self.run_post()
        for sock in self.ready():
            if sock in self._watched:  # and not closed by the one before
                self.run_socket(sock)
                did = True
        return did

    def run_until_idle(self) -> None:
        """All that is due, and all that follows from it."""
        while self.run_all():
            pass

    def tick(self, now: float) -> None:
        self._on_tick(now)

    @property
    def watched(self) -> list[Any]:
        """Sockets that it looks at."""
        return list(self._watched)

    def stop(self) -> None:
        for call in self._ends:
            call()


class HeldListener:
    """What a sender listens on."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.waiting: deque[socket.socket] = deque()

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.popleft(), ("d", 1)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def setblocking(self, _: bool) -> None:
        """It does not wait."""

    def close(self) -> None:
        """Nobody comes any more."""
