"""The processes and files of one instance: engine and agent."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection
from random import Random

import msgspec

from xpyd_operator.local import logs, ports, shm, store
from xpyd_operator.local.paths import ServiceFolder, make_private, run_folder
from xpyd_operator.local.procs import Scan
from xpyd_operator.local.store import InstanceRecord, Settings
from xpyd_operator.local.units import Unit
from xpyd_operator.render.process import port_args, sidecar_process
from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.ids import InstanceName, join_host_port
from xpyd_sidecar.contract.launch import SidecarConfig

AGENT_GRACE_S = 3.0
"""The agent says goodbye to the routers."""
ENGINE_GRACE_S = 5.0
"""A drained engine has nothing left to do; one that is not had its time before."""


class LocalInstance:
    """One instance on this host."""

    def __init__(self, service: ServiceFolder, settings: Settings, name: InstanceName) -> None:
        self.name = name
        self.folder = service.instance(name)
        self.run_dir = run_folder(settings.run_dir, service.service, name)
        self.python = settings.python
        self.engine = Unit("engine", self.folder, service.marker("instances", name, "engine"))
        self.agent = Unit("agent", self.folder, service.marker("instances", name, "agent"))
        self.agent_file = self.folder / "agent.json"
        self._previous = service.path / "previous" / name
        self._record = self.folder / "instance.json"
        self._shm = self.folder / "shm"

    @property
    def units(self) -> tuple[Unit, Unit]:
        """Its processes."""
        return (self.engine, self.agent)

    def record(self) -> InstanceRecord | None:
        """What it was made from; None where it was never made (or is gone).

        Raises:
            LocalError: the record is damaged.
        """
        return store.load(self._record, InstanceRecord)

    def agent_config(self) -> SidecarConfig | None:
        """What the agent was started with.

        Raises:
            LocalError: the file is damaged.
        """
        return store.load(self.agent_file, SidecarConfig)

    def write(self, record: InstanceRecord, agent: SidecarConfig) -> None:
        """Write down what it is made from; from now on it exists. The role of a former one of its name is forgotten."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._record.exists():
            (self.run_dir / assignment.KEPT).unlink(missing_ok=True)
        store.save(self.agent_file, agent)
        store.save(self._record, record)

    def told(self) -> Assignment | None:
        """Its role as it is written down; None where it was never made.

        Raises:
            LocalError: the record is damaged.
        """
        record = self.record()
        return None if record is None else Assignment(record.role, record.epoch, record.assigned)

    async def start_engine(self, taken: Collection[int], random: Random) -> None:
        """Start the engine, at its port or at another one if that is taken by now; then the agent has to know.

        Raises:
            LocalError: it did not come up.
        """
        record = self.record()
        assert record is not None, f"{self.name} has not been written"
        await self.engine.kill()
        self.clean()
        make_private(self.run_dir)
        for stale in self.run_dir.glob("engine-*.json"):
            stale.unlink(missing_ok=True)
        host = record.process.argv[record.process.argv.index("--host") + 1]
        if not ports.is_free(host, record.port):
            port = ports.choose(host, taken, random)
            record = msgspec.structs.replace(record, port=port)
            config = self.agent_config()
            assert config is not None
            assert config.agent is not None
            address = join_host_port(host, port)
            agent = msgspec.structs.replace(
                config.agent, engine=address, advertise_host=host, advertise_port=port, advertise_http=None
            )
            self.write(record, msgspec.structs.replace(config, agent=agent))
            await self.start_agent()
        await self.engine.start((*record.process.argv, *port_args(record.port)), record.process.env)

    async def start_agent(self) -> None:
        """Start the agent, again if it runs: killed, so that it says no goodbye and routers go on with the engine.

        Raises:
            LocalError: it did not come up.
        """
        make_private(self.run_dir)
        process = sidecar_process(self.python, str(self.agent_file))
        await self.agent.start(process.argv, process.env)

    def remember_shm(self, scan: Scan | None = None) -> None:
        """Write down the shared memory that the engine's processes use now."""
        shm.remember(self._shm, shm.used_by(self.engine.processes(scan)))

    def clean(self) -> list[str]:
        """Remove the shared memory of engine processes that are gone; what was removed."""
        return shm.clean(self._shm)

    async def remove(self, *, now: bool = False) -> None:
        """End everything and leave nothing but the last logs, under ``previous/``.

        Raises:
            LocalError: a process does not end.
        """
        self.remember_shm()
        await self.agent.stop(0.0 if now else AGENT_GRACE_S)
        await self.engine.stop(0.0 if now else ENGINE_GRACE_S)
        self.clean()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        shutil.rmtree(self._previous, ignore_errors=True)
        self._previous.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._previous)

    def bound_logs(self) -> None:
        """Keep the logs small."""
        for unit in self.units:
            logs.bound(unit.log)
