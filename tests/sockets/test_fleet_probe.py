from __future__ import annotations

import asyncio

import pytest
from scripted_engine import ScriptedEngine

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.router.fleet.member import HealthResult
from xpyd_sidecar.router.fleet.watch import probe, probe_all

LOOPS = ("uvloop",)


async def test_healthy_sick_and_gone() -> None:
    engine = await ScriptedEngine("e").start()
    address = HostPort(engine.address)
    assert await probe(address) == (HealthResult.HEALTHY, "")
    engine.health = 503
    assert await probe(address) == (HealthResult.DEAD, "GET /health answered 503")
    await engine.stop()
    result, words = await probe(address)
    assert result is HealthResult.DEAD
    assert "refused" in words.lower() or "connect" in words.lower()
    assert (await probe(HostPort("nonsense")))[0] is HealthResult.DEAD


async def test_of_several_servers_the_worst_one_counts() -> None:
    one, other = await ScriptedEngine("e").start(), await ScriptedEngine("f").start()
    doors = (HostPort(one.address), HostPort(other.address))
    assert await probe_all(doors) == (HealthResult.HEALTHY, "")
    other.health = 503
    assert await probe_all(doors) == (HealthResult.DEAD, "GET /health answered 503")
    await other.stop()
    assert (await probe_all(doors))[0] is (await probe_all(doors[::-1]))[0] is HealthResult.DEAD
    await one.stop()


@pytest.mark.parametrize(("answer", "result"), [
    (b"", HealthResult.DEAD), (b"SMTP\r\n\r\n", HealthResult.DEAD),
    (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, HealthResult.DEAD),
    (b"HTTP/1.1 20", HealthResult.DEAD), (None, HealthResult.SILENT),
])
async def test_what_is_no_answer(answer: bytes | None, result: HealthResult) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await asyncio.sleep(60)
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        address = HostPort(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert (await probe(address, 0.1 if result is HealthResult.SILENT else 60.0))[0] is result
    finally:
        server.close()
