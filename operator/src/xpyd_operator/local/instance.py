"""The processes and files of one instance: engine and agent, or as many of them as it has members.

    <instance>/instance.json   engine.log   agent.json   agent.log        the leader's, or the only ones
                               engine-1.log agent-1.json agent-1.log …    of the other members
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Collection, Sequence
from functools import partial
from random import Random

import msgspec

from xpyd_operator.local import logs, ports, shm, store
from xpyd_operator.local.paths import ServiceFolder, make_private, matching, member_folder, run_folder
from xpyd_operator.local.procs import Scan
from xpyd_operator.local.store import InstanceRecord, MemberRecord, Settings
from xpyd_operator.local.units import Unit
from xpyd_operator.render.process import port_args, sidecar_process
from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.group import ROUND, STATE
from xpyd_sidecar.contract.ids import InstanceName, join_host_port
from xpyd_sidecar.contract.launch import SidecarConfig

AGENT_GRACE_S = 3.0
"""The agent says goodbye to the routers."""
ENGINE_GRACE_S = 5.0
"""A drained engine has nothing left to do; one that is not had its time before."""


class LocalMember:
    """Engine and agent of one member; the engine's process is its launcher where there are several."""

    def __init__(self, service: ServiceFolder, settings: Settings, name: InstanceName, index: int) -> None:
        folder, suffix = service.instance(name), f"-{index}" if index else ""
        self.index = index
        self.run_dir = member_folder(run_folder(settings.run_dir, service.service, name), index)
        self.engine = Unit(f"engine{suffix}", folder, service.marker("instances", name, f"engine{suffix}"))
        self.agent = Unit(f"agent{suffix}", folder, service.marker("instances", name, f"agent{suffix}"))
        self.agent_file = folder / f"agent{suffix}.json"

    def agent_config(self) -> SidecarConfig | None:
        """What the agent was started with.

        Raises:
            LocalError: the file is damaged.
        """
        return store.load_config(self.agent_file)


class LocalInstance:
    """One instance on this host."""

    def __init__(self, service: ServiceFolder, settings: Settings, name: InstanceName) -> None:
        self.name = name
        self.folder = service.instance(name)
        self.python = settings.python
        self.leader = LocalMember(service, settings, name, 0)
        self.run_dir, self.engine, self.agent = self.leader.run_dir, self.leader.engine, self.leader.agent
        self.agent_file = self.leader.agent_file
        self._others: dict[int, LocalMember] = {}
        self._make = partial(LocalMember, service, settings, name)
        self._previous = service.path / "previous" / name
        self._record = self.folder / "instance.json"
        self._shm = self.folder / "shm"

    @property
    def members(self) -> tuple[LocalMember, ...]:
        """The leader first; as the files say, so that all are found also where the record is damaged."""
        for path in matching(self.folder, "agent-*.json"):
            index = path.stem.rpartition("-")[2]
            if index.isdecimal() and int(index) not in self._others:
                self._others[int(index)] = self._make(int(index))
        return (self.leader, *(one for _, one in sorted(self._others.items())))

    @property
    def units(self) -> tuple[Unit, ...]:
        """Its processes."""
        return tuple(unit for member in self.members for unit in (member.engine, member.agent))

    def record(self) -> InstanceRecord | None:
        """What it was made from; None where it was never made (or is gone).

        Raises:
            LocalError: the record is damaged.
        """
        return store.load(self._record, InstanceRecord)

    def write(self, record: InstanceRecord, agents: Sequence[SidecarConfig]) -> None:
        """Write down what it is made from, with the agents of all members; from now on it exists. What a former one of its
        name was told is forgotten.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        members = [self.leader, *(self._others.setdefault(index, self._make(index)) for index in range(1, len(agents)))]
        if not self._record.exists():
            for member in members:
                for kept in (assignment.KEPT, ROUND, STATE):
                    (member.run_dir / kept).unlink(missing_ok=True)
        for member, agent in zip(members, agents, strict=True):
            store.save(member.agent_file, agent)
        store.save(self._record, record)

    def written_assignment(self) -> Assignment | None:
        """The role of the instance as its record has it; None where it was never made.

        Raises:
            LocalError: the record is damaged.
        """
        record = self.record()
        return None if record is None else Assignment(record.role, record.epoch, record.assigned)

    async def start(self, unit: Unit, taken: Collection[int], random: Random) -> None:
        """Start one of its processes; raises as ``start_engine`` and ``start_agent`` do."""
        member = next(one for one in self.members if unit in (one.engine, one.agent))
        if unit is member.agent:
            await self.start_agent(member)
        else:
            await self.start_engine(taken, random, member)

    async def start_engine(self, taken: Collection[int], random: Random, member: LocalMember | None = None) -> None:
        """Start the (leader's) engine, at its port or at another one if that is taken by now; then its agent has to know.

        Raises:
            LocalError: it did not come up.
        """
        one, record = member or self.leader, self.record()
        assert record is not None, f"{self.name} has not been written"
        self.remember_shm()  # of what lives on of one that has ended since it was looked at
        await one.engine.kill()
        self.clean()
        make_private(one.run_dir)
        for stale in matching(one.run_dir, "engine-*.json"):
            stale.unlink(missing_ok=True)
        mine = record.member(one.index)
        if "--host" in mine.process.argv:
            host = mine.process.argv[mine.process.argv.index("--host") + 1]
            if not ports.is_free(host, mine.port):
                mine = await self._move(record, one, host, ports.choose(host, taken, random))
        await one.engine.start((*mine.process.argv, *port_args(mine.process, mine.port)), mine.process.env)

    async def _move(self, record: InstanceRecord, member: LocalMember, host: str, port: int) -> MemberRecord:
        """Give a member's server another port."""
        configs = [found for each in self.members if (found := each.agent_config()) is not None]
        config = configs[member.index]
        assert config.agent is not None
        agent = msgspec.structs.replace(config.agent, engine=join_host_port(host, port), advertise_host=host,
                                        advertise_port=port)
        configs[member.index] = msgspec.structs.replace(config, agent=agent)
        moved = record.with_port(member.index, port)
        self.write(moved, configs)
        await self.start_agent(member)
        return moved.member(member.index)

    async def start_agent(self, member: LocalMember | None = None) -> None:
        """Start the (leader's) agent, again if it runs: killed, so that it says no goodbye and routers go on.

        Raises:
            LocalError: it did not come up.
        """
        one = member or self.leader
        make_private(one.run_dir)
        process = sidecar_process(self.python, str(one.agent_file))
        await one.agent.start(process.argv, process.env)

    def remember_shm(self, scan: Scan | None = None) -> None:
        """Write down the shared memory that the engine's processes use now."""
        shm.remember(self._shm, shm.used_by([each for member in self.members for each in member.engine.processes(scan)]))

    def clean(self) -> list[str]:
        """Remove the shared memory of engine processes that are gone; what was removed."""
        return shm.clean(self._shm)

    async def remove(self, *, now: bool = False) -> None:
        """End everything and leave nothing but the last logs, under ``previous/``.

        Raises:
            LocalError: a process does not end.
        """
        self.remember_shm()
        for member in self.members:
            await member.agent.stop(0.0 if now else AGENT_GRACE_S)
        await asyncio.gather(*(member.engine.stop(0.0 if now else ENGINE_GRACE_S) for member in self.members))
        self.clean()
        for member in self.members:
            shutil.rmtree(member.run_dir, ignore_errors=True)
        shutil.rmtree(self._previous, ignore_errors=True)
        self._previous.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._previous)

    def bound_logs(self) -> None:
        """Keep the logs small."""
        for unit in self.units:
            logs.bound(unit.log)
