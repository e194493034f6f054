from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from beats import Beater, beat, bye
from processes import free_port
from router_fleet import KEY, fleet, read_answer, request_bytes
from scripted_engine import Play, ScriptedEngine

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import InstanceName, Role, ServiceName
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.errors import ConfigError, OurFault
from xpyd_sidecar.router.app import RouterProcess, run_router

LOOPS = ("uvloop",)
ADMIN = {"Authorization": f"Bearer {keys.admin_token(KEY)}"}


def config(**settings: Any) -> SidecarConfig:
    made: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "members_port": 0, "admin_port": 0,
                            "heartbeat_s": 0.1, "resolve_s": 0.0, "policy": "round_robin"}
    return SidecarConfig(service=ServiceName("test"), instance=InstanceName("r0"), key_file="", run_dir="",
                         router=RouterConfig(**(made | settings)))


async def test_agents_make_a_router_ready_and_a_goodbye_makes_it_unready() -> None:
    p, d = await ScriptedEngine("p0").start(), await ScriptedEngine("d0").start()
    async with fleet(prefills=0, decodes=0) as f:
        agent = Beater(f.router.members_port, KEY)
        try:
            ready = await f.get("/ready")
            assert (ready.status, ready.headers["retry-after"]) == (503, "1")
            ack = await agent.say(beat("d0", Role.DECODE, d.address, seq=7))
            assert (ack.seq, ack.router, ack.refused) == (7, "r0", "")
            await agent.say(beat("p0", Role.PREFILL, p.address))
            await f.wait(lambda: f.router.probes.not_ready() == "", "a settled router")
            assert (await f.get("/ready")).status == 200
            assert (await f.complete(stream=True)).text == "t0 t1 t2 "
            shown = msgspec.json.decode((await f.ask("/fleet", headers=ADMIN)).body, type=Fleet)
            assert [(i.instance, i.role) for i in shown.instances] == [("d0", Role.DECODE), ("p0", Role.PREFILL)]
            assert (shown.settled, shown.requests_total, shown.requests_failed) == (True, 1, 0)
            await agent.say(bye("d0"))
            ready = await f.get("/ready")
            assert (ready.status, ready.body) == (503, b"no decode instance is known\n")
        finally:
            agent.close()
            await p.stop()
            await d.stop()


async def test_silent_instances_are_probed_and_the_dead_evicted() -> None:
    async with fleet(1, 2) as f:
        for engine in (*f.p, *f.d):
            f.beat(engine, interval_s=0.05)
        await f.d[0].stop()
        await f.wait(lambda: [m.name for m in f.context.roster.members()] == ["d1", "p0"], "the dead one's eviction")
        assert (await f.complete(stream=True)).text == "t0 t1 t2 ", "silent, but alive: they still serve"


async def test_a_stopping_router_ends_its_streams_and_takes_no_new_connections() -> None:
    async with fleet() as f:
        held = asyncio.Event()
        f.d[0].plays.append(Play(chunks=3, hold_after=(1, held)))
        idle_reader, idle_writer = await f.connect()
        idle_writer.write(request_bytes("/health", method="GET"))
        await read_answer(idle_reader)
        task = asyncio.create_task(f.complete(stream=True))
        await f.wait(lambda: bool(f.d[0].seen), "the stream")
        stopping = asyncio.create_task(f.router.stop())
        assert await idle_reader.read() == b"", "an idle connection is closed at once"
        assert f.router.probes.not_ready() == "the router is stopping"
        await f.wait(lambda: f.router.server.listening is False, "the end of listening")
        with pytest.raises(ConnectionRefusedError):
            await f.connect()
        assert not stopping.done()
        held.set()
        assert (await task).text == "t0 t1 t2 "
        await stopping
        idle_writer.close()


async def test_while_it_still_listens_a_stopping_router_serves_and_says_close() -> None:
    async with fleet(listen_on_s=60.0) as f:
        stopping = asyncio.create_task(f.router.stop())
        await f.wait(lambda: f.router.probes.not_ready() == "the router is stopping", "it to be told")
        assert (await f.get("/ready")).status == 503
        answer = await f.complete()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert not stopping.done()
        stopping.cancel()
    async with fleet(listen_on_s=0.1) as f:
        began = asyncio.get_running_loop().time()
        await f.router.stop()
        assert asyncio.get_running_loop().time() - began >= 0.1
        assert f.router.server.listening is False


async def test_what_outlives_the_drain_is_cut_off_with_an_error() -> None:
    async with fleet(drain_timeout_s=0.1) as f:
        f.d[0].default = Play(chunks=3, hold_after=(1, asyncio.Event()))
        reader, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True}))
        begun = await reader.readuntil(b"t0 ")
        await f.router.stop()
        async with asyncio.timeout(30):
            rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert begun.startswith(b"HTTP/1.1 200 ")
        assert b'"text":' not in rest
        assert b"the router stopped" in rest
        writer.transport.abort()
        await f.wait(lambda: f.d[0].aborts == 1, "the engine's abort")


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a router that begins to listen about now."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(ConnectionError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.01)


async def test_run_router_runs_until_told_to_stop() -> None:
    port, stop = free_port(), asyncio.Event()
    task = asyncio.create_task(run_router(config(port=port), KEY, stop))
    reader, writer = await opened(port)
    writer.write(request_bytes("/health", method="GET"))
    assert (await read_answer(reader)).status == 200
    stop.set()
    async with asyncio.timeout(30):
        await task
    writer.close()


async def test_a_cancelled_router_lets_go_of_everything() -> None:
    port, members_port, admin_port = free_port(), free_port(), free_port()
    for _ in range(2):
        made = config(port=port, members_port=members_port, admin_port=admin_port)
        task = asyncio.create_task(run_router(made, KEY, asyncio.Event()))
        _, writer = await opened(port)
        writer.transport.abort()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_ports_that_are_taken_are_named() -> None:
    async with fleet(0, 0) as f:
        with pytest.raises(ConfigError, match=rf"router\.port: cannot listen on 127\.0\.0\.1:{f.router.port}: .*in use"):
            await run_router(config(port=f.router.port), KEY, asyncio.Event())
        with pytest.raises(ConfigError, match=rf"router\.members_port: .*:{f.router.members_port}"):
            await run_router(config(members_port=f.router.members_port), KEY, asyncio.Event())


async def test_wrong_settings_are_named(tmp_path: Path) -> None:
    for settings, words in (({"policy": "best"}, r"router\.policy"),
                            ({"policy_options": {"x": 1}}, r"router\.policy_options"),
                            ({"api_key_file": str(tmp_path / "none")}, r"router\.api_key_file")):
        with pytest.raises(ConfigError, match=words):
            RouterProcess(config(**settings), KEY)
    with pytest.raises(OurFault):
        RouterProcess(SidecarConfig(service=ServiceName("s"), instance=InstanceName("i"), key_file="", run_dir=""), KEY)
