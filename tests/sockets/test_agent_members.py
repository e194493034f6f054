"""Agents of an instance of two members: what their probes say, and a drain that any of them is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from agent_fakes import KEY, FakeEngine, config_of
from group_on_host import ENGINE, OVER_S, wait_for
from processes import free_port
from prometheus_client.parser import text_string_to_metric_families

from xpyd_sidecar.agent import ask
from xpyd_sidecar.agent import rounds as rounds_module
from xpyd_sidecar.agent.app import Agent
from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.group import READY_PATH, ROUND, Pulse, pulse_path
from xpyd_sidecar.contract.ids import HostPort, State
from xpyd_sidecar.contract.launch import GroupConfig

LIVE = "/live"
"""Asked by the agent's socket, of which the probe runs in the engine's container."""
LEADER = "test-e0-0.test-engines.models.svc.cluster.local."
"""As a cluster's name service knows it."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "LOOK_S", 0.03)
    monkeypatch.setattr(rounds_module, "HELLO_S", 0.1)
    monkeypatch.setattr("xpyd_sidecar.agent.app.FAST_S", 0.05)
    monkeypatch.setattr("xpyd_sidecar.agent.app.LOOK_S", 0.05)
    monkeypatch.setattr("xpyd_sidecar.agent.app.ROLE_S", 0.05)
    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == LEADER else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


class Pair:
    """Two agents with their launchers; the leader's engine has a server."""

    def __init__(self, folder: Path, **agent: object) -> None:
        self.folders = [folder / str(index) for index in range(2)]
        for one in self.folders:
            one.mkdir()
        self.engine = FakeEngine(self.folders[0])
        self.listen = [HostPort(f"127.0.0.1:{free_port()}") for _ in range(2)]
        self.agents: list[Agent] = []
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._agent = agent
        self._stops: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.engine.start()
        for index, folder in enumerate(self.folders):
            leader = HostPort(self.listen[0].replace("127.0.0.1", LEADER)) if index else HostPort("")
            group = GroupConfig(index, 2, "x", leader, "127.0.0.1", OVER_S)
            config = config_of(folder, self.engine.address, (), listen=self.listen[index], group=group,
                               heartbeat_s=0.1, drain_timeout_s=20.0, **self._agent)
            self.agents.append(Agent(config, KEY))
            self._stops.append(asyncio.Event())
            self._tasks.append(asyncio.create_task(self.agents[-1].run(self._stops[-1])))
        return self

    async def __aexit__(self, *_: object) -> None:
        for index in range(2):
            await self.stop(index)
        for launcher in self.launchers:
            launcher.terminate()
            launcher.wait(60)
        await self.engine.stop()

    def launch(self) -> None:
        """The launchers of both."""
        for folder in self.folders:
            command = [sys.executable, "-c", ENGINE, str(folder / "engine.log")]
            self.launchers.append(subprocess.Popen(
                [sys.executable, "-m", "xpyd_sidecar.member", "--run-dir", str(folder), "--grace-s", "1", "--", *command],
                stderr=subprocess.DEVNULL))

    async def stop(self, index: int) -> None:
        """An agent, in good order."""
        self._stops[index].set()
        await asyncio.gather(self._tasks[index])

    async def wait_serves(self) -> None:
        """Until both are ready."""
        self.launch()
        await wait_for(lambda: all((folder / "engine.log").exists() for folder in self.folders))
        self.engine.write_record()
        await wait_for(lambda: self.agents[0].status()["state"] == State.READY)
        await self.wait_probe(READY_PATH, 1)

    async def probe(self, path: str, index: int) -> str:
        """What a kubelet hears: empty where all is well."""
        if path == LIVE:
            return await asyncio.to_thread(ask.live, self.folders[index])
        try:
            async with (aiohttp.ClientSession() as session,
                        session.get(f"http://{self.listen[index]}{path}") as answer):
                assert answer.status in (200, 503)
                return "" if answer.status == 200 else str((await answer.json())["error"])
        except aiohttp.ClientConnectorError:
            return "it does not listen"

    async def wait_probe(self, path: str, index: int, says: Callable[[str], bool] = lambda said: not said) -> str:
        """Until it says so."""
        end = time.monotonic() + 60
        while not says(said := await self.probe(path, index)):
            assert time.monotonic() < end, said
            await asyncio.sleep(0.02)
        return said

    async def metrics(self, index: int) -> dict[str, float]:
        """What a member tells, by name."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.listen[index]}/metrics") as answer:
            assert answer.status == 200
            assert answer.content_type == "text/plain"
            families = text_string_to_metric_families(await answer.text())
        samples = [sample for family in families for sample in family.samples]
        assert {(one.labels["group"], one.labels["member"]) for one in samples} == {("test-e0", str(index))}
        return {one.name.removeprefix("xpyd_member_"): one.value for one in samples}

    def asking(self) -> list[int]:
        """The members that the leader hears ask for a drain."""
        return list(self.agents[0].status()["group"]["asking"])

    def state(self) -> str:
        """Of the leader."""
        return str(self.agents[0].status()["state"])


async def test_both_are_ready_once_the_group_serves_and_not_while_it_is_drained(tmp_path: Path) -> None:
    async with Pair(tmp_path) as pair:
        for index in range(2):
            await pair.wait_probe(LIVE, index, lambda said: "launcher does not answer" in said)
            assert await pair.probe(READY_PATH, index)
        await pair.wait_serves()
        for path, index in itertools.product((READY_PATH, LIVE), range(2)):
            await pair.wait_probe(path, index)
        pair.agents[0].drain()
        for index in range(2):
            await pair.wait_probe(READY_PATH, index, lambda said: "drained" in said)
            await pair.wait_probe(LIVE, index)
        pair.agents[0].undrain()
        for index in range(2):
            await pair.wait_probe(READY_PATH, index)


async def test_a_drain_of_a_follower_drains_the_whole_group(tmp_path: Path) -> None:
    async with Pair(tmp_path) as pair:
        await pair.wait_serves()
        pair.engine.running = 1
        pair.agents[1].drain()
        await wait_for(lambda: pair.state() == State.DRAINING)
        over = asyncio.create_task(pair.agents[1].wait_drained(None))
        await asyncio.sleep(0.5)
        assert not over.done(), "a request runs at the leader"
        pair.engine.running = 0
        assert await asyncio.wait_for(over, 60) == (True, "the group is drained")
        assert pair.agents[0].status()["drained"]


async def test_a_follower_takes_back_its_own_drain_and_no_other(tmp_path: Path) -> None:
    async with Pair(tmp_path) as pair:
        await pair.wait_serves()
        pair.engine.running = 1
        pair.agents[1].drain()
        await wait_for(lambda: pair.state() == State.DRAINING)
        pair.agents[1].undrain()
        await wait_for(lambda: pair.state() == State.READY)
        pair.agents[1].drain()
        pair.agents[0].drain()
        await wait_for(lambda: pair.state() == State.DRAINING)
        await wait_for(lambda: pair.asking() == [1])
        pair.agents[1].undrain()
        await wait_for(lambda: pair.asking() == [])
        assert pair.state() == State.DRAINING, "the leader was asked as well"
        pair.agents[1].drain()
        await wait_for(lambda: pair.asking() == [1])
        pair.agents[0].undrain()
        assert pair.state() == State.DRAINING, "the follower still asks"


async def test_a_follower_whose_leader_has_gone_is_drained_once_its_engine_has_ended(tmp_path: Path) -> None:
    async with Pair(tmp_path) as pair:
        await pair.wait_serves()
        await pair.stop(0)
        rounds = pair.agents[1]._rounds
        assert rounds is not None
        heard = rounds._seat.heard
        pair.agents[1].drain()
        assert await asyncio.wait_for(pair.agents[1].wait_drained(None), 60) == (True, "nothing runs here")
        assert time.monotonic() - heard > OVER_S
        await pair.wait_probe(READY_PATH, 1, bool)


async def test_a_server_that_was_up_and_does_not_answer_is_not_alive(tmp_path: Path) -> None:
    async with Pair(tmp_path) as pair:
        await pair.wait_serves()
        pair.engine.health = 500
        assert "was up in this life" in await pair.wait_probe(LIVE, 0, bool)
        assert await pair.probe(LIVE, 1) == ""
        assert "server is not up" in await pair.wait_probe(READY_PATH, 1, bool), "a budget sees the group as one"
        pair.engine.health = 200
        for path in (LIVE, READY_PATH):
            for index in range(2):
                await pair.wait_probe(path, index)


async def test_a_server_that_does_not_come_up_in_its_time_is_not_alive(tmp_path: Path) -> None:
    async with Pair(tmp_path, startup_timeout_s=1.0) as pair:
        pair.engine.health = 503
        pair.launch()
        await wait_for(lambda: all((folder / "engine.log").exists() for folder in pair.folders))
        assert "not up 1 s after" in await pair.wait_probe(LIVE, 0, lambda said: "not up" in said)


async def test_each_member_tells_of_itself_at_metrics(tmp_path: Path) -> None:
    async with Pair(tmp_path) as pair:
        for index in range(2):
            await pair.wait_probe(READY_PATH, index, lambda said: said != "it does not listen")
        assert (await pair.metrics(1))["serving"] == (await pair.metrics(1))["lives_total"] == 0
        await pair.wait_serves()
        life = json.loads((pair.folders[1] / ROUND).read_text())["life"]
        run_folder.write(pulse_path(pair.folders[1], 7), Pulse(7, life, 1, steps=3))
        told = {"steps_total": 3, "serving": 1, "engine_running": 1, "lives_total": 1, "workers": 1}
        end = time.monotonic() + 30
        while not told.items() <= (found := await pair.metrics(1)).items():
            assert time.monotonic() < end, found
            await asyncio.sleep(0.02)
        for index in range(2):  # a launcher that had no processor for a while is heard again
            while (await pair.metrics(index))["silent_seconds"] >= 2:
                assert time.monotonic() < end + 60
                await asyncio.sleep(0.02)
        assert (await pair.metrics(0))["steps_total"] == 0, "a member tells of its own workers"
        pair.launchers[1].kill()
        while (await pair.metrics(0))["serving"]:
            assert time.monotonic() < end + 60
            await asyncio.sleep(0.02)


async def test_an_agent_without_members_has_no_such_probe(tmp_path: Path) -> None:
    listen, stop = HostPort(f"127.0.0.1:{free_port()}"), asyncio.Event()
    running = asyncio.create_task(Agent(config_of(tmp_path, routers=(), listen=listen), KEY).run(stop))
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(2000):
                with contextlib.suppress(aiohttp.ClientError):
                    for path in (READY_PATH, "/metrics"):
                        async with session.get(f"http://{listen}{path}") as answer:
                            assert answer.status == 404
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("the agent does not listen")
    finally:
        stop.set()
        await running
