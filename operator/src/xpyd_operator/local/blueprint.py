"""What the document asks for on this host: counts and revisions for the planner, processes and settings for the backend."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from xpyd_operator.api.durations import seconds
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import LocalError
from xpyd_operator.local import gpus, ports, store
from xpyd_operator.local.paths import ServiceFolder, member_folder, run_folder
from xpyd_operator.local.store import InstanceRecord, MemberRecord, PlannedCounts, Settings, StopRequest
from xpyd_operator.plan.actions import Create
from xpyd_operator.plan.counts import counts, target
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.render.engine import adapter_order, engine_revision
from xpyd_operator.render.process import (
    EngineBinding,
    ProcessPlace,
    agent_config,
    engine_process,
    model_of,
    router_config,
    sidecar_revision,
)
from xpyd_operator.render.switch import NEVER, local_difference
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role, ServiceName, join_host_port
from xpyd_sidecar.contract.launch import SidecarConfig


class LocalBlueprint:
    """The document of one service, read again when its file changes."""

    def __init__(self, folder: ServiceFolder, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self._service: DisaggService | None = None
        self._read_at = 0

    def service(self) -> DisaggService:
        """The document as it is now.

        Raises:
            XpydError: it is wrong or cannot be read.
        """
        try:
            changed = self.folder.desired.stat().st_mtime_ns
        except OSError as error:
            raise LocalError(f"cannot read {self.folder.desired}: {error.strerror}") from None
        if self._service is None or changed != self._read_at:
            self._service = store.load_desired(self.folder)
            self._read_at = changed
        return self._service

    def stop_request(self) -> StopRequest | None:
        """The wish to end the service, if there is one."""
        try:
            return store.load(self.folder.stop, StopRequest)
        except LocalError:  # half a file, or that of another version, still is a wish to end
            return StopRequest()

    def desired_service(self) -> DesiredService:
        """For the planner.

        Raises:
            XpydError: the document is wrong or cannot be read.
        """
        service = self.service()
        spec = service.spec
        model = model_of(service)
        found = counts(service, self._planned(service))
        targets = {
            role: target(found.count_of(role), engine_revision(service, role, model), spec.rollout) for role in Role
        }
        no_switch = local_difference(service)
        return DesiredService(
            service=ServiceName(service.name),
            prefill=targets[Role.PREFILL],
            decode=targets[Role.DECODE],
            router=sidecar_revision(self.router()),
            drain_timeout_s=spec.drain.timeout_s,
            startup_timeout_s=seconds(spec.engine.startup_timeout),
            switches=not no_switch,
            no_switch="" if no_switch == NEVER else no_switch,
            switch_window_s=spec.rollout.switch_window_s,
            held=found.held,
            adapters=adapter_order(service),
            stopping=self.stop_request() is not None,
        )

    def _planned(self, service: DisaggService) -> dict[Role, int | None]:
        """What the planner set, in its mode auto; without that a role with ``scaling`` has its least. A service that may
        have none at all has one of each: nothing here would start them.
        """
        planned = self.planned_counts() if service.spec.planner.mode == "auto" else None
        if planned is None and service.spec.decode.min_instances < 1:
            return dict.fromkeys(Role, 1)
        return {} if planned is None else {Role.PREFILL: planned.prefill, Role.DECODE: planned.decode}

    def planned_counts(self) -> PlannedCounts | None:
        """What the planner said last; None before that, or where it cannot be read."""
        try:
            return store.load(self.folder.planned, PlannedCounts)
        except LocalError:
            return None

    def instance(self, action: Create, others: Sequence[InstanceRecord], random: Random) -> InstanceRecord:
        """A new instance beside the others, with a port and GPUs of its own.

        Raises:
            LocalError: no port is free.
        """
        service = self.service()
        role = service.spec.role(action.role)
        devices = gpus.assign(role, gpus.count(), [record.all_devices for record in others])
        taken, host = [port for record in others for port in record.ports], self.settings.host
        members = []
        for index, share in enumerate(gpus.shares(devices, role.parallelism.pods)):
            taken.append(ports.choose(host, taken, random))
            binding = EngineBinding(action.instance, action.role, share, index)
            process = engine_process(service, self._place(action.instance, index), binding)
            members.append(MemberRecord(process, taken[-1], binding.devices))
        leader, *followers = members
        return InstanceRecord(
            action.instance, action.ordinal, action.role, action.revision, leader.process, leader.port, leader.devices,
            followers=tuple(followers), meeting=ports.choose(host, taken, random) if followers else 0,
        )

    def agent(self, record: InstanceRecord) -> tuple[SidecarConfig, ...]:
        """Settings of the agents beside an instance, the leader's first."""
        service, host = self.service(), self.settings.host
        routers = (join_host_port(host, service.spec.router.ports.members),)
        meeting = join_host_port(host, record.meeting) if record.meeting else HostPort("")
        found = []
        for index, port in enumerate((record.port, *(one.port for one in record.followers))):
            binding = EngineBinding(record.name, record.role, index=index, meeting=meeting)
            config = agent_config(service, self._place(record.name, index), binding, port, routers)
            assert config.agent is not None
            found.append(msgspec.structs.replace(config, agent=msgspec.structs.replace(config.agent, epoch=record.epoch)))
        return tuple(found)

    def agents(self, records: Sequence[InstanceRecord]) -> dict[InstanceName, tuple[SidecarConfig, ...]]:
        """Settings of the agents of instances that are of the wanted revision; the others keep theirs until they go."""
        service = self._service
        if service is None:
            return {}
        model = model_of(service)
        wanted = {role: engine_revision(service, role, model) for role in Role}
        return {record.name: self.agent(record) for record in records if record.revision == wanted[record.role]}

    def router(self) -> SidecarConfig:
        """Settings of the router."""
        return router_config(self.service(), self._place("router"), self.settings.listen)

    def _place(self, name: str, index: int = 0) -> ProcessPlace:
        settings = self.settings
        run_dir = member_folder(run_folder(settings.run_dir, self.folder.service, name), index)
        return ProcessPlace(settings.python, str(self.folder.key), str(run_dir), settings.host)
