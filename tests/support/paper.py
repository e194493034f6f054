"""A connection of the router without a socket: a transport that writes down what happens, and a handler that echoes."""

from __future__ import annotations

from typing import Any

from xpyd_sidecar.proxy.reply import Handler, HttpRequest, Reply


class Paper:
    """A transport that writes down what happens to it."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def write(self, data: bytes) -> None:
        self.seen.append(bytes(data))

    def get_extra_info(self, name: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.seen.append(name)


class Echo:
    """Answers at once, says what it was asked."""

    def __init__(self) -> None:
        self.seen: list[HttpRequest] = []

    def enter(self, request: HttpRequest, client: object) -> None:
        """Leave everything to ``handle``."""

    def handle(self, request: HttpRequest, reply: Reply) -> Handler | None:
        self.seen.append(request)
        reply.whole(200, [], request.body)
        return None
