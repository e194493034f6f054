"""The backend of this host: actions become processes.

Starting and ending processes takes seconds, so each is a task of its own, one at a time per instance and for the router;
while it runs, the next observations show it (``observe.Work``), and the planner leaves that part alone. A task that fails
leaves the facts behind, from which the next rounds plan again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from random import Random

import msgspec

from xpyd_operator.errors import LocalError, NotFound, XpydError
from xpyd_operator.local import agents, procs, remains, store
from xpyd_operator.local.blueprint import LocalBlueprint
from xpyd_operator.local.hangs import Hangs
from xpyd_operator.local.instance import LocalInstance
from xpyd_operator.local.observe import Observer, Picture, Work
from xpyd_operator.local.paths import ServiceFolder, matching
from xpyd_operator.local.router import LocalRouter
from xpyd_operator.local.store import InstanceRecord, PlannedCounts, Settings
from xpyd_operator.local.tasks import Tasks
from xpyd_operator.local.units import Unit
from xpyd_operator.plan.actions import (
    Action,
    Create,
    Drain,
    Label,
    Remove,
    Restart,
    StartRouter,
    StopRouter,
    Switch,
    Undrain,
)
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import ObservedService
from xpyd_operator.plan.planner.run import Planning
from xpyd_operator.plan.round import Round
from xpyd_sidecar.contract.adapters import follows
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.ids import InstanceName

logger = logging.getLogger(__name__)
KEEPING_S = 5.0
"""Between two rounds of housekeeping: shared memory written down, logs kept small."""
END_S = 60.0
"""How long the processes of a service may take to end once nothing holds them up."""


class LocalBackend:
    """See the module. ``folder`` must have settings; one supervisor at a time (``supervisor``) may apply."""

    def __init__(self, folder: ServiceFolder, settings: Settings, random: Random) -> None:
        self.folder = folder
        self.settings = settings
        self.blueprint = LocalBlueprint(folder, settings)
        self.router = LocalRouter(folder, settings)
        self.key = store.service_key(folder)
        self.picture: Picture | None = None
        self.last: Round | None = None
        self._random = random
        self._observer = Observer(settings, self.key, self.router)
        self._instances: dict[InstanceName, LocalInstance] = {}
        self._tasks = Tasks()
        self._kept_at = float("-inf")
        self._planning = Planning()
        self._hangs = Hangs()

    async def desired_service(self) -> DesiredService:
        """What the document asks for, and whether the service is to end."""
        return self.blueprint.desired_service()

    # What is there

    async def observe(self, now: float) -> ObservedService:
        """Count ends that nobody asked for, keep house, and look.

        Raises:
            LocalError: the folder of the service was removed; nothing can be told from what is left.
        """
        if not self.folder.settings.exists():
            raise LocalError(f"{self.folder.path} was removed")
        self._adopt()
        working = self._tasks.working()
        for name, instance in self._instances.items():
            if name not in working:
                self._count_ends(instance.units, now, name)
        if "router" not in working and self.router.config() is not None:
            self._count_ends((self.router.unit,), now, "router")
        if now - self._kept_at >= KEEPING_S or now < self._kept_at:
            self._kept_at = now
            self._keep_house(working)
        self.picture = await self._look(working, now)
        self._hangs.end_hung(self.picture, working, self._instances)
        self._plan(self.picture, now)
        return self.picture.observed

    def _plan(self, picture: Picture, now: float) -> None:
        """Let the planner look, and decide when an interval is over; what it sets is in force from the next round on."""
        fleet = picture.fleet
        self._planning.observe(fleet, picture.observed.instances, now)
        try:
            service, before = self.blueprint.service(), self.blueprint.desired_service()
        except XpydError as error:
            logger.warning("the planner waits: %s", error)
            return
        if before.stopping or not self._planning.is_due(service, now):
            return
        wanted = (before.prefill.replicas, before.decode.replicas)
        fleets = {fleet.router: fleet} if fleet is not None and fleet.settled else {}
        verdict = self._planning.conclude(service, fleets, wanted, now)
        if verdict is not None:
            if verdict.news:
                logger.info("%s", self._planning.sentence)
            counts = (verdict.prefill, verdict.decode) if verdict.acts else wanted
            store.save(self.folder.planned, PlannedCounts(*counts, self._planning.sentence))

    async def view(self, now: float) -> Picture:
        """Look without writing anything down, for ``xpyd status``."""
        self._adopt()
        return await self._look({}, now)

    async def _look(self, working: dict[str, Work], now: float) -> Picture:
        wanted = self.blueprint.agents(self._records())
        return await self._observer.observe(self._instances, working, wanted, now)

    def _adopt(self) -> None:
        """Know every instance that has a folder; forget those that have none."""
        names = {InstanceName(entry.name) for entry in matching(self.folder.instances, "*") if entry.is_dir()}
        for name in names - self._instances.keys():
            self._instances[name] = LocalInstance(self.folder, self.settings, name)
        for name in self._instances.keys() - names:
            if name not in self._tasks.working():
                del self._instances[name]

    def _count_ends(self, units: tuple[Unit, ...], now: float, name: str) -> bool:
        """Whether there were any that nobody asked for, and that are new."""
        new = [(unit, ends) for unit in units if (ends := unit.note_end(now)) is not None]
        for unit, ends in new:
            logger.error("%s of %s ended: %s (%d in a row); see %s", unit.name, name, ends.exit, ends.crashes, unit.log)
        return bool(new)

    def _keep_house(self, working: dict[str, Work]) -> None:
        self.router.bound_log()
        scan = procs.Scan()
        for name, instance in list(self._instances.items()):
            instance.bound_logs()
            if name in working:
                continue
            instance.remember_shm(scan)
            try:
                damaged = instance.record() is None
            except LocalError as error:
                logger.warning("%s; ending what it belonged to", error)
                damaged = True
            if damaged:
                self._tasks.begin(name, Work.REMOVING, instance.remove(now=True))

    def instance(self, name: InstanceName) -> LocalInstance:
        """One instance.

        Raises:
            NotFound: there is none of this name.
        """
        instance = self._instances.get(name)
        if instance is None:
            raise NotFound(f"no instance {name}")
        return instance

    # What is done

    width = 1
    """One action at a time: they share the host's devices and ports."""

    async def prepare(self, round_: Round) -> None:
        """Tell agents their role where they, or the router, do not know it yet, and their adapters where others are told.

        Raises:
            LocalError: one does not answer.
        """
        order, working = round_.desired.adapters, self._tasks.working()
        for seen in [each for each in round_.observed.instances if each.name not in working]:
            instance = self.instance(seen.name)
            if seen.switching and not seen.leaving and (told := instance.written_assignment()) is not None:
                await agents.assign(instance.run_dir, told)
            if seen.ready and not follows(seen.adapters.order if seen.adapters is not None else "", order):
                await agents.order_adapters(instance.run_dir, order)

    async def apply(self, action: Action) -> None:
        """Begin one action; a drain is asked for at once.

        What has ended since ends were counted is counted now, and started again by a later round, which knows of it: who
        starts a process forgets the one before.
        """
        match action:
            case Create():
                self._create(action)
            case Drain():
                await agents.drain(self.instance(action.instance).run_dir)
            case Undrain():
                await agents.undrain(self.instance(action.instance).run_dir)
            case Remove():
                self._tasks.begin(action.instance, Work.REMOVING, self.instance(action.instance).remove())
            case Restart():
                instance = self.instance(action.instance)
                unit = next(unit for unit in instance.units if unit.name == action.unit)
                if not self._count_ends((unit,), time.time(), action.instance):
                    self._tasks.begin(action.instance, Work.STARTING, self._start(instance, unit))
            case Switch():
                await self._switch(action)
            case Label():
                raise LocalError("local instances do not route")
            case StartRouter():
                if not self._count_ends((self.router.unit,), time.time(), "router"):
                    self._tasks.begin("router", Work.STARTING, self._start_router())
            case StopRouter():
                grace_s = self.blueprint.service().spec.drain.timeout_s
                self._tasks.begin("router", Work.REMOVING, self.router.stop(grace_s))

    def report(self, round_: Round) -> None:
        """Remember the last round, for whoever shows progress in this process."""
        self.last = round_

    async def end_now(self) -> None:
        """Kill everything of the service at once, known or not, and remove what it leaves.

        Raises:
            LocalError: something does not end.
        """
        await self._tasks.cancel()
        self._adopt()
        for instance in self._instances.values():
            instance.remember_shm()
        await self.router.stop(0.0)
        await asyncio.gather(*(instance.remove(now=True) for instance in self._instances.values()))
        await self.sweep()

    async def sweep(self) -> None:
        """End every process that carries a mark of this service, and remove the run folder: the last step of an end.

        Raises:
            LocalError: a process does not end.
        """
        if left := remains.processes(self.folder):
            logger.warning("ending %d processes that were left: %s", len(left), [process.pid for process in left])
        await remains.end(self.folder)
        shutil.rmtree(self.settings.run_dir, ignore_errors=True)

    async def close(self) -> None:
        """Wait for what has begun; nothing begun is left half done."""
        await self._tasks.finish(END_S)

    def _create(self, action: Create) -> None:
        record = self.blueprint.instance(action, self._records(), self._random)
        instance = LocalInstance(self.folder, self.settings, action.instance)
        instance.write(record, self.blueprint.agent(record))
        self._instances[action.instance] = instance
        self._tasks.begin(action.instance, Work.STARTING, self._start(instance, *instance.units))

    async def _switch(self, action: Switch) -> None:
        """Written down first: an agent that starts meanwhile, or a supervisor, goes on from there."""
        instance = self.instance(action.instance)
        record = instance.record()
        assert record is not None, f"{action.instance} has not been written"
        record = msgspec.structs.replace(record, role=action.role, epoch=action.epoch, assigned=time.time())
        instance.write(record, self.blueprint.agent(record))
        await agents.assign(instance.run_dir, Assignment(record.role, record.epoch, record.assigned))

    async def _start(self, instance: LocalInstance, *units: Unit) -> None:
        for unit in units:
            try:
                taken = [port for record in self._records() for port in record.ports]
                await instance.start(unit, taken, self._random)
            except (LocalError, OSError) as error:
                unit.note_failed_start(time.time(), str(error))
                raise

    async def _start_router(self) -> None:
        try:
            await self.router.start(self.blueprint.router())
        except (LocalError, OSError) as error:
            self.router.unit.note_failed_start(time.time(), str(error))
            raise

    def _records(self) -> list[InstanceRecord]:
        """Of every instance whose record can be read; the others are dealt with by ``_keep_house``."""
        found = []
        for instance in self._instances.values():
            with contextlib.suppress(LocalError):
                record = instance.record()
                if record is not None:
                    found.append(record)
        return found
