"""What is there on this host: records, processes, agents and router, put together for the planner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from xpyd_operator.errors import LocalError
from xpyd_operator.local import agents
from xpyd_operator.local.agents import AgentStatus
from xpyd_operator.local.instance import LocalInstance
from xpyd_operator.local.procs import Identity
from xpyd_operator.local.router import LocalRouter
from xpyd_operator.local.store import InstanceRecord, Settings
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.observed import Instance, ObservedRouter, ObservedService, ObservedUnit, Phase
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance, words_of_ejection
from xpyd_sidecar.contract.ids import InstanceName, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import SidecarConfig

logger = logging.getLogger(__name__)


class Work(StrEnum):
    """What this process is doing to an instance or the router at this moment."""

    STARTING = "starting"
    REMOVING = "removing"


class Sight(msgspec.Struct, frozen=True):
    """One instance as it was found."""

    record: InstanceRecord
    instance: Instance
    status: AgentStatus | None


class Picture(msgspec.Struct, frozen=True):
    """Everything that was found at one time."""

    observed: ObservedService
    sights: tuple[Sight, ...]
    fleet: Fleet | None


class Observer:
    """Looks; remembers only since when a phase lasts, and whether an engine was ready before."""

    def __init__(self, settings: Settings, key: ServiceKey, router: LocalRouter) -> None:
        self._settings = settings
        self._key = key
        self._router = router
        self._phases: dict[str, tuple[Phase, float]] = {}
        self._served: dict[str, Identity] = {}

    async def observe(
        self,
        instances: Mapping[InstanceName, LocalInstance],
        work: Mapping[str, Work],
        agents_wanted: Mapping[InstanceName, tuple[SidecarConfig, ...]],
        now: float,
    ) -> Picture:
        """Look at everything; takes at most the agents' timeout."""
        config = self._router.config()
        port = self._router.admin_port()
        statuses, fleet = await asyncio.gather(
            asyncio.gather(*(agents.agent_status(instance.run_dir) for instance in instances.values())), self._fleet(port)
        )
        heard = {each.instance: each for each in fleet.instances} if fleet is not None else {}
        sights = []
        for instance, status in zip(instances.values(), statuses, strict=True):
            try:
                record = instance.record()
            except LocalError as error:
                logger.warning("%s", error)
                record = None
            if record is not None:
                wanted = agents_wanted.get(instance.name)
                seen = self._instance(instance, record, now, status=status, work=work.get(instance.name), wanted=wanted)
                seen = _told(seen, record, status, heard.get(instance.name))
                sights.append(Sight(record, seen, status))
        for name in self._phases.keys() - instances.keys():
            del self._phases[name]
            self._served.pop(name, None)
        found = tuple(sight.instance for sight in sorted(sights, key=lambda sight: sight.record.ordinal))
        known = fleet is not None and fleet.settled
        router = None
        if config is not None or "router" in work:
            router = self._seen_router(fleet, found, work.get("router"), now)
        told = fleet.disaggregation if fleet is not None and fleet.settled else None
        observed = ObservedService(found, router, fleet_known=known, disaggregation=told)
        return Picture(observed, tuple(sorted(sights, key=lambda sight: sight.record.ordinal)), fleet)

    async def _fleet(self, port: int | None) -> Fleet | None:
        if port is None or not self._router.unit.alive():
            return None
        return await agents.fleet(self._settings.host, port, self._key)

    def _instance(
        self,
        instance: LocalInstance,
        record: InstanceRecord,
        now: float,
        *,
        status: AgentStatus | None,
        work: Work | None,
        wanted: tuple[SidecarConfig, ...] | None,
    ) -> Instance:
        units, engines = [], []
        leader = instance.engine.leader()
        for member in instance.members:
            engine, agent = member.engine.observe(now), member.agent.observe(now)
            config = wanted[member.index] if wanted is not None and member.index < len(wanted) else None
            if config is not None and agent.alive and member.agent_config() != config:
                agent = msgspec.structs.replace(agent, outdated=True)
            engines.append(engine)
            units += [engine, agent]
        phase = _phase(next((engine for engine in engines if not engine.alive), engines[0]), status, work)
        if phase is Phase.READY and leader is not None:
            self._served[instance.name] = leader
        since = self._since(instance.name, phase, leader.unix if leader is not None else now, now)
        load = status.load if status is not None else None
        return Instance(
            name=instance.name,
            ordinal=record.ordinal,
            role=record.role,
            revision=record.revision,
            phase=phase,
            since=since,
            load=load.running + load.waiting + load.transfers if load is not None else 0,
            was_ready=leader is not None and self._served.get(instance.name) == leader,
            units=() if work is not None else tuple(units),
        )

    def _since(self, name: str, phase: Phase, started: float, now: float) -> float:
        before = self._phases.get(name)
        if before is None or before[0] is not phase:
            self._phases[name] = (phase, started if before is None and phase is Phase.STARTING else now)
        return self._phases[name][1]

    def _seen_router(
        self, fleet: Fleet | None, instances: tuple[Instance, ...], work: Work | None, now: float
    ) -> ObservedRouter:
        unit = self._router.unit.observe(now)
        if work is Work.STARTING:
            unit = ObservedUnit("router", alive=True, crashes=unit.crashes)
        heard = {seen.instance for seen in fleet.instances if seen.state is State.READY} if fleet is not None else set()
        ready = fleet is not None and fleet.settled and all(i.name in heard for i in instances if i.ready)
        return ObservedRouter(self._router.revision() or Revision(""), unit, ready, stopping=work is Work.REMOVING)


def _told(seen: Instance, record: InstanceRecord, status: AgentStatus | None, heard: FleetInstance | None) -> Instance:
    """With what agent and router know of it."""
    late = any(known.epoch < record.epoch for known in (status, heard) if known is not None)
    seen = msgspec.structs.replace(seen, epoch=record.epoch, assigned=record.assigned, switching=late)
    if heard is None:
        return seen
    refuses = tuple((one.instance, one.reason) for one in heard.refused)
    told = {"cached": heard.cached, "fingerprint": heard.fingerprint, "refuses": refuses, "links": heard.links,
            "adapters": heard.adapters, "ejected": words_of_ejection(heard)}
    return msgspec.structs.replace(seen, **told)


def _phase(engine: ObservedUnit, status: AgentStatus | None, work: Work | None) -> Phase:
    if work is not None:
        return Phase.STOPPING if work is Work.REMOVING else Phase.STARTING
    if not engine.alive:
        return Phase.CRASHED if engine.ended else Phase.STARTING
    if status is None or status.state is State.STARTING:
        return Phase.STARTING
    if status.state is State.READY:
        return Phase.READY
    return Phase.DRAINED if status.drained else Phase.DRAINING
