"""Members of a group on this host, without engines: real agents' rounds over real sockets, real launchers.

    async with GroupOnHost(tmp_path, 2) as group:
        life = await group.wait_serves()
        group.members[1].kill_engine();  …
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from processes import free_port

from xpyd_sidecar.agent.remote import Remote
from xpyd_sidecar.agent.rounds import Rounds
from xpyd_sidecar.contract import group, keys, run_folder
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.group import STATE, MemberAnswer, MemberState, Pulse
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role, ServiceName, join_host_port
from xpyd_sidecar.contract.launch import AgentConfig, GroupConfig, SidecarConfig

KEY = keys.ServiceKey(bytes(range(32)))
NAME = InstanceName("s-e0")
ENGINE = """
import os, sys, time
with open(sys.argv[1], "a") as log:
    log.write(" ".join([str(os.getpid()), os.environ["XPYD_LIFE"], *sys.argv[2:]]) + "\\n")
while True:
    time.sleep(0.05)
"""
OVER_S = 5.0
"""A hello is answered within it also where this process has little of a processor."""


class MemberOnHost:
    """One member: its agent's rounds in this process, its launcher beside it."""

    def __init__(self, folder: Path, index: int, size: int, leader: HostPort, *, layout: str = "x",
                 data: int = 1) -> None:
        """``data``: ranks of all members together."""
        self.folder = folder / str(index)
        self.folder.mkdir(exist_ok=True)
        self.log = self.folder / "engine.log"
        mine = GroupConfig(index, size, layout, leader if index else HostPort(""), over_s=OVER_S)
        agent = AgentConfig(Role.DECODE, HostPort("127.0.0.1:1"), (), advertise_host="127.0.0.1", advertise_port=1,
                            listen=leader if index == 0 else None, group=mine, data_parallel=data)
        self.config = SidecarConfig(ServiceName("s"), NAME, "", str(self.folder), agent=agent)
        self.mine = mine
        self.launcher: subprocess.Popen[bytes] | None = None
        self.answers: list[MemberAnswer] = []
        self.rounds: Rounds | None = None
        self._remote: Remote | None = None
        self._task: asyncio.Task[None] | None = None

    def launch(self) -> None:
        """Start the launcher."""
        command = [sys.executable, "-c", ENGINE, str(self.log), "{xpyd:leader}", "{xpyd:port}"]
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "xpyd_sidecar.member", "--run-dir", str(self.folder), "--grace-s", "1", "--", *command],
            stderr=subprocess.DEVNULL)

    async def start_agent(self) -> None:
        """Start the agent's side, or start it again."""
        await self.stop_agent()
        self.rounds = Rounds(self.config, self.mine, KEY, lambda: (Assignment(Role.DECODE, 3), False, False),
                             self.answers.append)
        assert self.config.agent is not None
        if self.config.agent.listen is not None:
            self._remote = Remote(self.config.agent.listen, KEY, None, NAME, members=True)  # type: ignore[arg-type]
            self._remote.rounds = self.rounds
            await self._remote.start()
        self._task = asyncio.create_task(self.rounds.run())

    async def stop_agent(self) -> None:
        """As a process that is killed: nobody is told."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._remote is not None:
            await self._remote.close()
        self._task = self._remote = None

    def engines(self) -> list[list[str]]:
        """Process, life, leader and port of each engine that was begun."""
        return [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def pid(self) -> int:
        """Of the engine that runs, or ran last."""
        return int(self.engines()[-1][0])

    def runs(self) -> str:
        """The life of the engine that really runs; empty: none does."""
        for pid, life, *_ in reversed(self.engines()):
            if Path(f"/proc/{pid}").exists():
                return life
        return ""

    def pulse(self, beat: int, *, pid: int = 7) -> None:
        """As a worker would."""
        run_folder.write(group.pulse_path(self.folder, pid), Pulse(pid, self.runs(), beat))

    def state(self) -> MemberState:
        """What the launcher says."""
        found = run_folder.read(self.folder / STATE, MemberState)
        assert found is not None
        return found

    async def close(self) -> None:
        """End it."""
        await self.stop_agent()
        if self.launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                self.launcher.send_signal(signal.SIGCONT)
            self.launcher.terminate()
            try:
                self.launcher.wait(5)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
        for pid, *_ in self.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


class GroupOnHost:
    """All members."""

    def __init__(self, folder: Path, size: int, *, data: int = 1) -> None:
        leader = join_host_port("127.0.0.1", free_port())
        self.members = [MemberOnHost(folder, index, size, leader, data=data) for index in range(size)]

    async def __aenter__(self) -> Self:
        for member in self.members:
            member.launch()
            await member.start_agent()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            await member.close()

    @property
    def problem(self) -> str:
        """As the leader says it."""
        rounds = self.members[0].rounds
        assert rounds is not None
        return rounds.problem

    async def wait_serves(self, *, after: str = "") -> str:
        """Wait until the group has no problem, in another life than ``after``; its life."""
        def lives() -> set[str]:
            return {member.runs() for member in self.members}

        await wait_for(lambda: self.problem == "" and len(lives()) == 1 and not lives() & {"", after})
        return lives().pop()


async def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for what has no event."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.02)
