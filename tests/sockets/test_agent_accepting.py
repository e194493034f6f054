"""The agent's sockets accept a bounded number at a time, and go on when there are files again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_fakes import KEY
from files import no_files
from processes import free_port

from xpyd_sidecar.agent import control, remote
from xpyd_sidecar.agent.control import Control
from xpyd_sidecar.agent.remote import Remote
from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.contract.launch import AGENT_SOCKET
from xpyd_sidecar.process import accepting, resources

STATUS = b"GET /status HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Agent:
    """Says the same to everybody."""

    def status(self) -> dict[str, Any]:
        return {"state": "ready"}

    def drain(self) -> None: ...

    def undrain(self) -> None: ...

    async def wait_drained(self, timeout_s: float | None) -> tuple[bool, str]:
        return True, ""

    def assign(self, told: Assignment) -> None: ...


@contextlib.asynccontextmanager
async def listening(run_dir: Path) -> AsyncIterator[Control]:
    server = Control(run_dir, Agent())
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def come(run_dir: Path, count: int) -> list[Client]:
    return [await asyncio.open_unix_connection(str(run_dir / AGENT_SOCKET)) for _ in range(count)]


async def answers(clients: list[Client]) -> None:
    for _, writer in clients:
        writer.write(STATUS)
    for reader, writer in clients:
        raw = await asyncio.wait_for(reader.read(), 10.0)
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert json.loads(raw.split(b"\r\n\r\n", 1)[1]) == {"state": "ready"}
        writer.close()


def opened(server: Control | Remote) -> int:
    assert server._runner.server is not None
    return len(server._runner.server.connections)


async def wait_full(server: Control | Remote, most: int) -> None:
    """Until so many are open; and it stays so."""
    async with asyncio.timeout(10):
        while opened(server) < most:  # noqa: ASYNC110 (the server's state has no event)
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert opened(server) == most


async def test_connections_beyond_the_bound_wait_and_are_answered_when_others_go(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MOST", 3)
    monkeypatch.setattr(accepting, "FULL_S", 0.01)
    async with listening(tmp_path) as server:
        clients = await come(tmp_path, 8)
        await wait_full(server, 3)
        await answers(clients)


async def test_a_lack_of_files_ends_nobody_and_is_over_when_there_are_some(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(accepting, "LACK_S", 0.05)
    monkeypatch.setattr(resources, "SAY_S", 60.0)
    async with listening(tmp_path) as server:
        assert server._acceptor is not None
        early = await come(tmp_path, 1)
        async with asyncio.timeout(10):
            while not opened(server):  # noqa: ASYNC110 (the server's state has no event)
                await asyncio.sleep(0.005)
        made = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        with no_files():
            for one in made:
                one.connect(str(tmp_path / AGENT_SOCKET))
            async with asyncio.timeout(10):
                while not server._acceptor.errors:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        waiting = [await asyncio.open_unix_connection(sock=one) for one in made]
        await answers(early + waiting)
    said = [record.message for record in caplog.records]
    assert said == ["the agent's clients are not accepted for a second: no file descriptors are left to this process"]


async def test_the_endpoint_on_the_network_has_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MOST", 2)
    monkeypatch.setattr(accepting, "FULL_S", 0.01)
    server = Remote(HostPort(f"127.0.0.1:{free_port()}"), KEY, Agent(), "test-e0")
    await server.start()
    try:
        assert server._acceptor is not None
        clients = [await asyncio.open_connection("127.0.0.1", server._acceptor.port) for _ in range(5)]
        await wait_full(server, 2)
        for _, writer in clients:
            writer.write(b"POST /role HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        for reader, writer in clients:
            assert (await asyncio.wait_for(reader.read(), 10.0)).startswith(b"HTTP/1.1 401 ")
            writer.close()
    finally:
        await server.close()
    assert server._runner.server is None or not server._runner.server.connections


async def test_strangers_that_hold_every_place_make_room_for_who_signs_and_who_has_signed_stays(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MOST", 3)
    monkeypatch.setattr(remote, "STRANGER_S", 0.2)
    server = Remote(HostPort(f"127.0.0.1:{free_port()}"), KEY, Agent(), "test-e0")
    await server.start()
    try:
        assert server._acceptor is not None
        port = server._acceptor.port

        def call() -> bytes:
            signature = signing.sign(keys.derive(KEY, "agent call"), signing.SignedCall("POST", "/role", "test-e0"))
            return f"POST /role HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n{signing.HEADER}: {signature}\r\n\r\n".encode()

        async def answered(client: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
            client[1].write(call())
            head = await asyncio.wait_for(client[0].readuntil(b"\r\n\r\n"), 10.0)
            assert head.startswith(b"HTTP/1.1 400 "), "it is signed, and no assignment"
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await client[0].readexactly(int(length.partition(b":")[2]))

        await answered(known := await asyncio.open_connection("127.0.0.1", port))
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        held[0][1].write(b"POST /role HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")  # and the rest never comes
        await answered(late := await asyncio.open_connection("127.0.0.1", port))
        await answered(known)
        for _, writer in (known, late, *held):
            writer.close()
    finally:
        await server.close()
