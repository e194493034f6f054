"""An agent beside an engine whose core stands still: what it tells routers and the probe of the engine's container."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from agent_fakes import KEY, FakeEngine, FakeRouter, config_of

from xpyd_sidecar.agent import app as app_module
from xpyd_sidecar.agent import ask
from xpyd_sidecar.agent.app import Agent
from xpyd_sidecar.contract import core_steps
from xpyd_sidecar.contract.core_steps import CoreSteps, WrittenSteps
from xpyd_sidecar.contract.ids import Incarnation, State
from xpyd_sidecar.contract.liveness import RestartWish

ENGINE = """
import sys, threading, time
from xpyd_sidecar.threads import stacks
stacks.listen()
def it_hangs_here():
    print("up", flush=True)
    time.sleep(1000)
threading.Thread(target=time.sleep, args=(1000,), name="another", daemon=True).start()
it_hangs_here()
"""
DEAF = "import time; print('up', flush=True); time.sleep(1000)"


def begin(code: str, log: BinaryIO) -> subprocess.Popen[bytes]:
    """A process that says when it is up."""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log)


class Stage:
    """The agent, with its engine and a router."""

    def __init__(self, folder: Path, engine: FakeEngine, router: FakeRouter) -> None:
        self.folder, self.engine, self.router = folder, engine, router

    def steps(self, turns: int, patience_s: float = 0.3) -> None:
        """What the core says."""
        core_steps.write(self.folder, 0, WrittenSteps(Incarnation("a" * 32), CoreSteps(turns, patience_s)))

    async def probe(self) -> int:
        """The exit code of the probe."""
        return await asyncio.to_thread(ask.main, ["live", "--run-dir", str(self.folder)])

    async def wait_probe(self, wanted: Callable[[int], bool]) -> None:
        """Until it ends so."""
        end = time.monotonic() + 60
        while not wanted(found := await self.probe()):
            assert time.monotonic() < end, found


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(app_module, "FAST_S", 0.05)
    monkeypatch.setattr(app_module, "LOOK_S", 0.05)
    monkeypatch.setattr(ask, "PROC", tmp_path / "proc")
    (tmp_path / "proc").mkdir()
    stop = asyncio.Event()
    router = FakeRouter()
    async with FakeEngine(tmp_path) as engine:
        engine.write_record()
        made = Stage(tmp_path, engine, router)
        made.steps(7)
        config = config_of(tmp_path, engine.address, (router.address,), heartbeat_s=0.3)
        running = asyncio.create_task(Agent(config, KEY).run(stop))
        await router.wait_beat(lambda beat: beat.state is State.READY and beat.core is not None)
        yield made
        stop.set()
        await running
    await router.close()


async def test_a_core_that_stands_still_fails_the_probe_and_one_that_is_idle_does_not(
        stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert await stage.probe() == 0, "no router says that it waits"
    stage.router.stalled = True
    await stage.router.wait_beat(lambda beat: beat.restart is RestartWish.WANTED)
    await stage.router.wait_beat(lambda beat: beat.restart is RestartWish.BEGUN)
    await stage.wait_probe(lambda code: code == 1)
    assert "its core has requests and has not stepped for" in capfd.readouterr().err
    stage.router.stalled = False
    assert await stage.probe() == 1, "requests that were moved say nothing for it"
    stage.steps(8)
    await stage.wait_probe(lambda code: code == 0)
    await stage.router.wait_beat(lambda beat: beat.restart is RestartWish.NONE)


async def test_a_router_that_holds_the_restart_keeps_the_probe_well(stage: Stage) -> None:
    stage.router.stalled = stage.router.hold = True
    await stage.router.wait_beat(lambda beat: beat.restart is RestartWish.WANTED)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert await stage.probe() == 0
    assert not any(beat.restart is RestartWish.BEGUN for beat in stage.router.beats)
    stage.router.hold = False
    await stage.wait_probe(lambda code: code == 1)


async def test_a_server_that_was_up_and_is_silent_fails_the_probe(stage: Stage) -> None:
    stage.engine.health = 500
    await stage.wait_probe(lambda code: code == 1)
    stage.engine.health = 200
    await stage.wait_probe(lambda code: code == 0)


async def test_the_stacks_of_processes_that_can_write_them_are_written_first_and_once(stage: Stage) -> None:
    log = stage.folder / "log"
    with log.open("wb") as out:
        processes = [begin(code, out) for code in (ENGINE, DEAF)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
            (ask.PROC / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        stage.router.stalled = True
        await stage.wait_probe(lambda code: code == 1)
        end = time.monotonic() + 30
        while "it_hangs_here" not in (text := log.read_text()):
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        for _ in range(3):
            assert await stage.probe() == 1
        await asyncio.sleep(0.3)
        text = log.read_text()
        assert text.count("in it_hangs_here") == 1
        assert text.count("hread 0x") == 2, "all threads"
        assert [process.poll() for process in processes] == [None, None], "who does not catch the signal does not get it"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize("there", ["no socket", "a socket that nobody answers", "an older agent"])
async def test_a_silent_agent_is_no_verdict(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ask, "PROBE_S", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if there == "an older agent":
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 404 Not Found\r\ncontent-length: 20\r\n\r\n{"error":"Not Found"}')
        else:
            await asyncio.sleep(5)
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "agent.sock") if there != "no socket" else None
    assert await asyncio.to_thread(ask.main, ["live", "--run-dir", str(tmp_path)]) == 0
    if there != "an older agent":
        assert "says nothing of its engine" in capfd.readouterr().err
    if server is not None:
        server.close()
