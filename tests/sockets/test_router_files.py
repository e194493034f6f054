"""A router process with few files: crowds of streams, of which none may end with an engine's name on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from beats import SERVICE, Beater, beat
from engines import free_port
from made_streams import MadeReplay, made_line
from router_fleet import KEY, read_answer, request_bytes
from scripted_engine import Play, ScriptedEngine

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig

LINE = made_line("completions", random.Random(5))
CROWD = 350
"""Streams of two seconds, all at once: they take three files each."""
FEW, MANY = 704, 4096
pytestmark = pytest.mark.unsanitized  # clients and engines would take a minute there, and what is tested is no C
BEAT_S = 5.0
"""Clients and engines share the loop of this test, which is late with beats while it serves a crowd."""


@contextlib.asynccontextmanager
async def process(folder: Path, limits: tuple[int, int], engines: list[ScriptedEngine]) -> AsyncIterator[tuple[int, Path]]:
    """A router process under limits of open files, soft and hard, that has heard of the engines; its port and log."""
    port, members_port, log = free_port(), free_port(), folder / "log"
    key_file, config_file = folder / "key", folder / "router.json"
    keys.write(key_file, KEY)
    config_file.write_bytes(msgspec.json.encode(SidecarConfig(
        service=SERVICE, instance=InstanceName("r0"), key_file=str(key_file), run_dir=str(folder), log_format="text",
        router=RouterConfig(host="127.0.0.1", port=port, members_port=members_port, admin_port=free_port(),
                            heartbeat_s=BEAT_S, resolve_s=0.5, queue_size=0))))
    with log.open("wb") as file:
        router = await asyncio.create_subprocess_exec(
            "prlimit", f"--nofile={limits[0]}:{limits[1]}", sys.executable, "-m", "xpyd_sidecar", "--config",
            str(config_file), stderr=file, stdout=file)
    beaters: list[tuple[Beater, ScriptedEngine]] = []
    beating: asyncio.Task[None] | None = None

    async def beat_on() -> None:
        while True:
            for beater, engine in beaters:
                role = Role.PREFILL if engine.name.startswith("p") else Role.DECODE
                await beater.send(beat(engine.name, role, engine.address, interval_s=BEAT_S))
            await asyncio.sleep(1.0)

    try:
        async with asyncio.timeout(60):
            while b"router listens" not in log.read_bytes():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
            beaters += [(Beater(members_port, KEY, engine.name.encode()), engine) for engine in engines]
            beating = asyncio.create_task(beat_on())
            while (await ask(port, "/ready", None))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield port, log
    finally:
        if beating is not None:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        for beater, _ in beaters:
            beater.close()
        router.kill()
        await router.wait()


async def ask(port: int, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
    """One request on a connection of its own: its status and how it ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(request_bytes(path, body, method="GET" if body is None else "POST"))
        answer = await read_answer(reader, 60.0)
        if answer.status != 200 or body is None:
            return answer.status, "retry" if answer.headers.get("retry-after") == "1" else answer.body.decode()[-200:]
        return answer.status, "whole" if answer.events[-1] == "[DONE]" else json.dumps(answer.events[-1])
    finally:
        writer.transport.abort()


async def crowd(port: int, count: int) -> Counter[tuple[int, str]]:
    body = {"model": "tiny", **LINE.body, "stream": True, "max_tokens": 24}
    return Counter(await asyncio.gather(*(ask(port, "/v1/completions", body) for _ in range(count))))


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("limits", [(FEW, MANY), pytest.param((FEW, FEW), marks=pytest.mark.test_all)])
async def test_a_crowd_under_a_low_limit_of_files(tmp_path: Path, limits: tuple[int, int], dies: bool) -> None:
    """One of three decode engines may end meanwhile."""
    engines = [await ScriptedEngine(name, MadeReplay(LINE)).start() for name in ("p0", "d0", "d1", "d2")]
    for engine in engines[1:]:
        engine.choose = lambda _: Play(delay=0.1)
    try:
        async with process(tmp_path, limits, engines) as (port, log):
            coming = asyncio.create_task(crowd(port, CROWD))
            if dies:
                while not engines[3].seen:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.5)
                await engines[3].stop()
            found = await coming
            words = log.read_text()
            assert f"files={limits[1]}" in words
            accused = {name for name in ("p0", "d0", "d1", "d2") if re.search(rf"{name}: .*suspended", words)}
            assert accused == ({"d2"} if dies else set())
            if limits[1] == MANY:
                assert found == {(200, "whole"): CROWD}
            else:
                assert set(found) == {(200, "whole"), (503, "retry")}
                assert found[200, "whole"] >= 90, "as many as there are files for"
                assert await ask(port, "/health", None) == (200, "ok\n")
                assert set(await crowd(port, 50)) == {(200, "whole")}, "nothing is left behind"
    finally:
        for engine in engines:
            await engine.stop()
