"""Accepting connections: real sockets; what accept(2) says is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from xpyd_sidecar.process import accepting, resources
from xpyd_sidecar.process.accepting import Acceptor, bind, same_host

LOOPS = ("asyncio", "uvloop")


class Scripted(socket.socket):
    """A listening socket that first says what it is told to."""

    says: list[OSError]
    accepted = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.says:
            raise self.says.pop(0)
        made = super().accept()
        self.accepted += 1
        return made


class Hello(asyncio.Protocol):
    """Says hello to who comes."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.site.open.append(transport)
        transport.write(b"hello")


class Site:
    """An acceptor, and what it made."""

    def __init__(self, listening: Scripted, most: int) -> None:
        self.open: list[asyncio.BaseTransport] = []
        self.most = most
        self.listening = listening
        self.acceptor = Acceptor([listening], lambda: Hello(self), self.full, None)

    def full(self, opening: int) -> bool:
        return len(self.open) + opening >= self.most

    def come(self, count: int) -> list[socket.socket]:
        """Clients connect: in the kernel, before anybody accepts them."""
        return [socket.create_connection(("127.0.0.1", self.acceptor.port), timeout=10) for _ in range(count)]

    async def served(self, count: int) -> None:
        await until(lambda: len(self.open) >= count)


async def until(condition: Callable[[], bool]) -> None:
    """Look at every turn of the loop: some of what is waited for is there for a few of them."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (the state of sockets and of an acceptor has no event)
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def site(*says: OSError, most: int = 1000) -> AsyncIterator[Site]:
    [bound] = await bind("127.0.0.1", 0)
    listening = Scripted(fileno=bound.detach())
    listening.setblocking(False)
    listening.says = list(says)
    made = Site(listening, most)
    try:
        yield made
    finally:
        made.acceptor.close()
        for transport in made.open:
            transport.abort()
        await asyncio.sleep(0)


async def test_who_comes_is_served() -> None:
    async with site() as s:
        clients = s.come(5)
        await s.served(5)
        assert [await asyncio.to_thread(client.recv, 5) for client in clients] == [b"hello"] * 5


async def test_who_was_accepted_before_the_end_of_listening_is_served() -> None:
    """Its request may be served before it is known who opened the connection."""
    async with site() as s:
        closing: list[int] = []

        class Last(Hello):
            """In the middle of whose opening listening ends."""

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                s.acceptor.close()
                closing.append(s.acceptor.opening)

        s.acceptor._make = lambda: Last(s)
        [client] = s.come(1)
        await s.served(1)
        await until(lambda: not s.acceptor.opening)
        assert (closing, s.acceptor.listening) == ([1], False)
        assert not s.open[0].is_closing()
        s.open[0].write(b"more")  # type: ignore[attr-defined]
        assert await asyncio.to_thread(client.recv, 9, socket.MSG_WAITALL) == b"hellomore"


async def test_at_once_who_was_accepted_is_cut_off_too() -> None:
    async with site() as s:
        [client] = s.come(1)
        await until(lambda: bool(s.acceptor.opening or s.open))
        assert s.acceptor.opening == 1
        s.acceptor.close(at_once=True)
        assert (await asyncio.to_thread(client.recv, 9)) in {b"", b"hello"}
        assert await asyncio.to_thread(client.recv, 9) == b""


async def test_no_more_are_accepted_in_a_turn_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "AT_ONCE", 4)
    async with site() as s:
        s.come(20)
        turns, loop = [0], asyncio.get_running_loop()

        def turn() -> None:
            turns.append(s.listening.accepted)
            if s.listening.accepted < 20:
                loop.call_soon(turn)

        loop.call_soon(turn)
        await s.served(20)
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 4


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_where_a_file_is_lacking_nobody_is_accepted_for_a_while(
        number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(accepting, "LACK_S", 0.1)
    monkeypatch.setattr(resources, "SAY_S", 60.0)
    with caplog.at_level(logging.WARNING):
        async with site(*[OSError(number, "lacking")] * 3) as s:
            s.come(3)
            await s.served(3)  # they waited in the kernel
            assert s.acceptor.errors == 3, "one try each time"
    assert len([one for one in caplog.records if one.name.startswith("xpyd_")]) == 1, "a line for all of them"
    assert "not accepted for a second" in caplog.text


async def test_a_client_that_has_gone_again_stops_nobody() -> None:
    async with site(OSError(errno.ECONNABORTED, "aborted"), OSError(errno.EPROTO, "protocol")) as s:
        s.come(2)
        await s.served(2)
        assert s.acceptor.errors == 0


async def test_beyond_what_may_be_open_clients_wait_in_the_kernel() -> None:
    async with site(most=3) as s:
        clients = s.come(5)
        await s.served(3)
        await asyncio.sleep(3 * accepting.FULL_S)
        assert s.listening.accepted == 3
        s.open.pop().abort()
        s.open.pop().abort()
        await s.served(3)
        assert s.listening.accepted == 5
        assert len(clients) == 5


async def test_after_its_end_nobody_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "LACK_S", 600.0)
    async with site(OSError(errno.EMFILE, "lacking")) as s:
        port = s.acceptor.port
        s.come(1)
        await asyncio.sleep(0.02)  # it waits for its next try
        s.acceptor.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
        assert not s.open


async def test_a_port_that_is_taken_is_told_and_nothing_stays_open() -> None:
    [first] = await bind("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        await bind("127.0.0.1", first.getsockname()[1])
    first.close()


@pytest.mark.parametrize(("peer", "own", "here"), [
    (("127.0.0.1", 5), ("127.0.0.1", 80), True), (("127.9.9.9", 5), ("10.0.0.1", 80), True),
    (("::1", 5, 0, 0), ("::1", 80, 0, 0), True),
    (("::ffff:127.0.0.1", 5, 0, 0), ("::ffff:127.0.0.1", 80, 0, 0), True), (("10.0.0.1", 5), ("10.0.0.1", 80), True),
    (("10.0.0.2", 5), ("10.0.0.1", 80), False), (("::ffff:10.0.0.2", 5, 0, 0), ("::", 80, 0, 0), False),
    (("fe80::1%eth0", 5, 0, 2), ("fe80::2%eth0", 80, 0, 2), False), ("", "", False), (None, None, False),
    (("x", 1), ("y", 2), False),
])
def test_who_is_on_this_host(peer: object, own: object, *, here: bool) -> None:
    assert same_host(peer, own) is here
