"""What the router of this host answers is read whole, however it comes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from xpyd_operator.local import agents
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import ServiceName
from xpyd_sidecar.contract.keys import ServiceKey

FLEET = Fleet(ServiceName("test"), "r", 1.0, True, ())


async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """In two pieces."""
    body = msgspec.json.encode(FLEET)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body[:20]))
    await asyncio.sleep(0.1)
    writer.write(body[20:])
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(("most", "read"), [(agents.ANSWER_MAX, FLEET), (30, None)])
async def test_a_fleet_that_comes_in_pieces_is_read_whole_and_one_that_is_too_long_is_none(
        monkeypatch: pytest.MonkeyPatch, most: int, read: Fleet | None) -> None:
    monkeypatch.setattr(agents, "ANSWER_MAX", most)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await agents.fleet("127.0.0.1", port, ServiceKey(bytes(32))) == read
