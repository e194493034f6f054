"""A service as ``xpyd status`` shows it: one snapshot, made without changing anything."""

from __future__ import annotations

from random import Random

import msgspec

from xpyd_operator.api.status import ServiceStatus
from xpyd_operator.errors import NotFound
from xpyd_operator.local import lock, store
from xpyd_operator.local.backend import LocalBackend
from xpyd_operator.local.observe import Sight
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.progress import latest
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_operator.plan.round import Round, think
from xpyd_operator.plan.status import complete, is_true
from xpyd_operator.render.engine import step_sync
from xpyd_sidecar.contract.fleet import FleetInstance, words_of_ejection
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.membership import Load


class InstanceView(msgspec.Struct, frozen=True):
    """One row."""

    name: str
    role: str
    state: str
    ready: bool
    load: Load
    address: str
    uptime_s: float
    """Of the engine process; 0 when it does not run."""
    restarts: int
    pid: int
    """Of the engine; 0 when it does not run."""
    problem: str
    """What is wrong, lacking or waited for; empty when nothing is."""
    log: str
    progress: str = ""
    """How far the start of the engine has come; empty when it is not starting."""
    joined: bool = False
    """Added by hand (``xpyd join``), not started from the document."""


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that is shown."""

    service: str
    model: str
    url: str
    supervisor: int
    """Process id; 0: none runs, so nothing is restarted or changed."""
    stopping: bool
    status: ServiceStatus
    instances: tuple[InstanceView, ...]
    router: InstanceView | None
    requests_total: int
    requests_failed: int

    @property
    def ready(self) -> bool:
        """Everything that is asked for serves."""
        return complete(self.status)

    @property
    def settled(self) -> bool:
        """Ready, nothing is going on, and nothing is stuck."""
        return self.ready and not is_true(self.status, "Progressing") and not is_true(self.status, "Degraded")

    @property
    def runs(self) -> bool:
        """Something of it is there."""
        return bool(self.supervisor or self.instances or self.router)


class Viewer:
    """Makes snapshots of one service."""

    def __init__(self, folder: ServiceFolder) -> None:
        """Raises NotFound when the service was never started here, LocalError when its files are damaged."""
        if not folder.desired.is_file() or not folder.settings.is_file():
            raise NotFound(f"no service {folder.service} in {folder.path.parent}")
        self.folder = folder
        self._backend = LocalBackend(folder, store.load_settings(folder), Random(0))

    async def take_snapshot(self, now: float) -> Snapshot:
        """What the service is like now; bounded by the timeouts of agents and router.

        Raises:
            XpydError: the document is damaged.
        """
        backend = self._backend
        desired = await backend.desired_service()
        picture = await backend.view(now)
        thought = think(desired, picture.observed, now)
        service = backend.blueprint.service()
        url = f"http://{join_host_port(_reachable(backend.settings.listen), service.spec.router.ports.http)}"
        fleet = picture.fleet
        ours = {sight.record.name for sight in picture.sights}
        joined = [_joined(seen) for seen in fleet.instances if seen.instance not in ours] if fleet is not None else []
        planned = self._backend.blueprint.planned_counts() if service.spec.planner.mode != "disabled" else None
        plan = "; ".join(part for part in (thought.status.plan, planned.sentence if planned else "") if part) or None
        ours_only = {"url": url, "model": service.served_name, "step_sync": step_sync(service)}
        status = msgspec.structs.replace(thought.status, plan=plan, **ours_only)
        return Snapshot(
            service=service.name,
            model=service.served_name,
            url=url,
            supervisor=lock.holder(self.folder.lock),
            stopping=desired.stopping,
            status=status,
            instances=(*(self._instance(sight, now, ends=desired.stopping) for sight in picture.sights), *joined),
            router=self._router(thought, url, now),
            requests_total=fleet.requests_total if fleet is not None else 0,
            requests_failed=fleet.requests_failed if fleet is not None else 0,
        )

    def _instance(self, sight: Sight, now: float, *, ends: bool) -> InstanceView:
        """``ends``: the service is being taken down, so what does not serve yet, or no more, never will."""
        local = self._backend.instance(sight.record.name)
        leader = local.engine.leader()
        living = leader is not None and local.engine.alive()
        status = sight.status
        problem = progress = ""
        state = sight.instance.phase
        if local.engine.stopping() or (ends and state is Phase.STARTING):
            state = Phase.STOPPING
        if state is Phase.STOPPING:
            problem = "its processes are ending"
        elif state is Phase.CRASHED:
            problem = local.engine.ends().exit
        elif not local.agent.alive():
            problem = "no agent runs"
        elif status is not None:
            problem = status.waits_for or (_wanting(sight.instance) if sight.instance.ready else status.problem)
        if state is Phase.STARTING and living:
            progress = latest(local.engine.log).phase
        return InstanceView(
            name=sight.record.name,
            role=sight.record.role,
            state=state,
            ready=sight.instance.ready,
            load=status.load if status is not None else Load(),
            address=join_host_port(self._backend.settings.host, sight.record.port),
            uptime_s=max(0.0, now - leader.unix) if leader is not None and living else 0.0,
            restarts=local.engine.ends().total,
            pid=leader.pid if leader is not None and living else 0,
            problem=problem,
            progress=progress,
            log=str(local.engine.log),
        )

    def _router(self, thought: Round, url: str, now: float) -> InstanceView | None:
        seen = thought.observed.router
        if seen is None:
            return None
        unit = self._backend.router.unit
        leader = unit.leader()
        state = "ready" if seen.ready else "starting" if seen.unit.alive or not seen.unit.ended else "crashed"
        return InstanceView(
            name="router",
            role="router",
            state=state,
            ready=seen.ready,
            load=Load(),
            address=url.removeprefix("http://"),
            uptime_s=max(0.0, now - leader.unix) if leader is not None and seen.unit.alive else 0.0,
            restarts=unit.ends().total,
            pid=leader.pid if leader is not None and seen.unit.alive else 0,
            problem=seen.unit.exit if state == "crashed" else "",
            log=str(unit.log),
        )


def _joined(seen: FleetInstance) -> InstanceView:
    return InstanceView(
        name=seen.instance,
        role=seen.role,
        state=seen.state,
        ready=seen.state == "ready" and not seen.suspended,
        load=seen.load,
        address=seen.http[0] if seen.http else "",
        uptime_s=0.0,
        restarts=0,
        pid=0,
        problem=seen.suspended or words_of_ejection(seen),
        log="",
        joined=True,
    )


def _reachable(listen: str) -> str:
    """An address for people: the loopback one stands for all interfaces."""
    return "127.0.0.1" if listen in ("0.0.0.0", "::") else listen


def _wanting(instance: Instance) -> str:
    """What could be better of an instance that serves: it is not picked, cannot take KV from peers, has not all links."""
    ejected = (f"ejected: {instance.ejected}",) if instance.ejected else ()
    refused = [f"cannot take KV from {name}: {why}" for name, why in instance.refuses]
    return "; ".join((*ejected, *refused, *instance.links))
