"""Ends of local processes while the supervisor looks: each is counted, and what ended is started by a round that knows."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from render_service import service

from xpyd_operator.local import hangs as hangs_module
from xpyd_operator.local import store
from xpyd_operator.local.agents import AgentStatus
from xpyd_operator.local.backend import LocalBackend
from xpyd_operator.local.hangs import END_S
from xpyd_operator.local.observe import Work
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.units import Unit, wait_until
from xpyd_operator.plan.actions import Action, Restart, StartRouter
from xpyd_operator.plan.desired import Revision
from xpyd_sidecar.contract.ids import InstanceName, Role, State

NAME = InstanceName("qwen-e0")
SLEEP = ("sleep", "1000")


class Backend(LocalBackend):
    """Of one instance with one process, and a router; what it starts is written down."""

    def __init__(self, folder: ServiceFolder) -> None:
        settings = store.settings_for(folder, "127.0.0.1")
        store.service_key(folder)
        super().__init__(folder, settings, Random(1))
        self.engine = Unit("engine", folder.instance(NAME), folder.marker(NAME, "engine"))
        self.started: list[str] = []
        there: Any = SimpleNamespace(units=(self.engine,))
        self._instances[NAME] = there

    async def _start(self, instance: object, *units: Unit) -> None:
        self.started += [unit.name for unit in units]

    async def _start_router(self) -> None:
        self.started.append("router")

    async def do(self, action: Action) -> dict[str, Work]:
        """Apply it; what that began, which has ended by then."""
        await self.apply(action)
        begun = self._tasks.working()
        await self.close()
        return begun


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    folder = ServiceFolder("qwen", tmp_path)
    folder.make()
    store.save_desired(folder, service())
    made = Backend(folder)
    yield made
    for unit in (made.engine, made.router.unit):
        await unit.kill()


@pytest.mark.parametrize(("name", "action"), [
    ("engine", Restart(NAME, "engine", "it was not started yet")),
    ("router", StartRouter(Revision("1"), "it was not started yet"))])
async def test_what_ended_after_ends_were_counted_is_counted_and_not_started_before_a_round_knows(
        backend: Backend, caplog: pytest.LogCaptureFixture, name: str, action: Action) -> None:
    unit = backend.engine if name == "engine" else backend.router.unit
    leader = await unit.start(SLEEP, {})
    assert unit._child is not None
    unit._child.kill()  # while the round looks: what is seen has neither a process nor an end
    await asyncio.to_thread(unit._child.wait)
    assert await backend.do(action) == {}
    assert (backend.started, unit.leader()) == ([], leader)
    ends = unit.ends()
    assert (ends.total, ends.crashes, ends.exit) == (1, 1, "killed by SIGKILL")
    assert "ended: killed by SIGKILL (1 in a row)" in caplog.text
    assert list((await backend.do(action)).values()) == [Work.STARTING]
    assert backend.started == [name]
    assert unit.ends() == ends, "and once"


ENGINE = """
import subprocess, time
from xpyd_sidecar.threads import stacks
stacks.listen()
subprocess.Popen(["sleep", "1000"])
print("up", flush=True)
def it_hangs_here():
    time.sleep(1000)
it_hangs_here()
"""


def seen(hangs: str) -> Any:
    """What a look has found, as far as it counts here."""
    status = AgentStatus(State.READY, Role.DECODE, hangs=hangs)
    return SimpleNamespace(sights=[SimpleNamespace(instance=SimpleNamespace(name=NAME), status=status)])


async def test_an_engine_of_which_its_agent_says_that_it_stands_still_is_ended_as_a_crash_after_its_stacks(
        backend: Backend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(hangs_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    unit = backend.engine
    there: Any = SimpleNamespace(units=(unit,), engine=unit)
    backend._instances[NAME] = there
    leader = await unit.start((sys.executable, "-c", ENGINE), {})
    assert await wait_until(lambda: "up" in unit.log.read_text() and len(unit.processes()) == 2, 60)
    for at, hangs in ((0.0, "its core stands still"), (10.0, ""), (11.0, "its core stands still")):
        clock[0] = at
        backend._hangs.end_hung(seen(hangs), {}, backend._instances)
        assert unit.leader() == leader
    assert await wait_until(lambda: unit.log.read_text().count("in it_hangs_here") == 2, 60), "for each time once"
    assert f"{leader.pid} (S)" in caplog.text
    while clock[0] < 11.0 + END_S:
        assert unit.alive()
        backend._hangs.end_hung(seen("its core stands still"), {}, backend._instances)
        clock[0] += 10.0
    backend._hangs.end_hung(seen("its core stands still"), {}, backend._instances)
    assert await wait_until(lambda: not unit.alive() and not unit.processes(), 60), "its children, too"
    ends = unit.note_end(time.time())
    assert ends is not None
    assert (ends.crashes, ends.exit) == (1, "killed by SIGKILL"), "so it is started again"
    assert f"the engine of {NAME} is ended, since it stands still: its core stands still" in caplog.text
