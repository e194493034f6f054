"""From processes, agents and the router to what the planner sees."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from processes import free_port

from xpyd_operator.local import agents, store
from xpyd_operator.local.instance import LocalInstance
from xpyd_operator.local.observe import Observer, Picture, Work
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.procs import Identity, identify
from xpyd_operator.local.router import LocalRouter
from xpyd_operator.local.store import InstanceRecord, Settings
from xpyd_operator.local.units import Ends
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_operator.render.process import Process
from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role, ServiceName
from xpyd_sidecar.contract.launch import AGENT_SOCKET, AgentConfig, RouterConfig, SidecarConfig

NAME = InstanceName("qwen-e0")
RECORD = InstanceRecord(NAME, 0, Role.DECODE, Revision("r1"), Process(("x",), {}), 20001)
AGENT = SidecarConfig(
    ServiceName("qwen"), NAME, "/k", "/r", AgentConfig(Role.DECODE, HostPort("h:1"), (HostPort("h:2"),), "h", 1)
)


class Host:
    """One instance whose engine is this test's process, an agent that says what it is told, and a router."""

    def __init__(self, folder: Path) -> None:
        self.service = ServiceFolder("qwen", folder / "home")
        self.service.make()
        self.settings: Settings = store.settings_for(self.service, "127.0.0.1")
        self.settings = msgspec.structs.replace(self.settings, run_dir=str(folder / "r"))
        self.instance = LocalInstance(self.service, self.settings, NAME)
        self.instance.run_dir.mkdir(parents=True)
        self.instance.write(RECORD, [AGENT])
        self.router = LocalRouter(self.service, self.settings)
        self.observer = Observer(self.settings, store.service_key(self.service), self.router)
        self.says: dict[str, object] = {"state": "starting", "role": "decode"}
        self.fleet: dict[str, object] = {}
        self.drains: list[str] = []
        self.roles: list[Assignment] = []
        self.port = free_port()
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        async def status(_: web.Request) -> web.Response:
            return web.json_response(self.says)

        async def drain(request: web.Request) -> web.Response:
            self.drains.append(request.path)
            return web.json_response(self.says, status=202)

        async def role(request: web.Request) -> web.Response:
            self.roles.append(assignment.decode(await request.read()))
            return web.json_response(self.says)

        async def fleet(request: web.Request) -> web.Response:
            assert request.headers["Authorization"].startswith("Bearer ")
            return web.json_response(self.fleet, status=200 if self.fleet else 503)

        agent, router = web.Application(), web.Application()
        agent.add_routes([web.get("/status", status), web.post("/drain", drain), web.post("/undrain", drain),
                          web.post("/role", role)])
        router.add_routes([web.get("/fleet", fleet)])
        for app in (agent, router):
            runner = web.AppRunner(app)
            await runner.setup()
            self._runners.append(runner)
        await web.UnixSite(self._runners[0], str(self.instance.run_dir / AGENT_SOCKET)).start()
        await web.TCPSite(self._runners[1], "127.0.0.1", self.port).start()

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    def runs(self, *names: str) -> None:
        """Say that these units are this process."""
        me = identify(os.getpid())
        assert me is not None
        for name in names:
            folder = self.service.router if name == "router" else self.instance.folder
            (folder / f"{name}.pid").write_bytes(msgspec.json.encode(me))

    def ended(self, name: str, ends: Ends) -> None:
        gone = Identity(os.getpid(), 1, "another boot")
        (self.instance.folder / f"{name}.pid").write_bytes(msgspec.json.encode(gone))
        (self.instance.folder / f"{name}.ends").write_bytes(msgspec.json.encode(ends))

    def route(self) -> None:
        router = RouterConfig(admin_port=self.port)
        config = SidecarConfig(ServiceName("qwen"), InstanceName("r"), "/k", "/r", router=router)
        store.save(self.router.file, config)
        self.runs("router")

    async def look(self, now: float, work: dict[str, Work] | None = None, wanted: SidecarConfig = AGENT) -> Picture:
        return await self.observer.observe({NAME: self.instance}, work or {}, {NAME: (wanted,)}, now)

    async def see(self, now: float, work: dict[str, Work] | None = None) -> Instance:
        return (await self.look(now, work)).observed.instances[0]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    one = Host(tmp_path)
    await one.start()
    yield one
    await one.close()


@pytest.mark.parametrize(
    ("says", "phase"),
    [
        ({"state": "starting", "role": "decode"}, Phase.STARTING),
        ({"state": "ready", "role": "decode"}, Phase.READY),
        ({"state": "draining", "role": "decode", "drained": False}, Phase.DRAINING),
        ({"state": "draining", "role": "decode", "drained": True}, Phase.DRAINED),
        ({"state": "a newer state"}, Phase.STARTING),
    ],
)
async def test_a_living_engine_is_in_the_phase_that_its_agent_tells(host: Host, says: dict, phase: Phase) -> None:
    host.runs("engine", "agent")
    host.says = says
    assert (await host.see(time.time())).phase is phase


async def test_a_dead_engine_has_crashed_whatever_the_agent_says(host: Host) -> None:
    host.runs("agent")
    host.ended("engine", Ends(crashes=2, ended=100.0, exit="exit code 3", total=2))
    host.says = {"state": "ready", "role": "decode"}
    seen = await host.see(time.time())
    assert seen.phase is Phase.CRASHED
    assert (seen.units[0].crashes, seen.units[0].exit, seen.crashes) == (2, "exit code 3", 2)


async def test_what_was_never_started_is_starting_and_has_dead_units(host: Host) -> None:
    seen = await host.see(time.time())
    assert seen.phase is Phase.STARTING
    assert [unit.alive for unit in seen.units] == [False, False]


async def test_work_under_way_hides_units_from_the_planner(host: Host) -> None:
    assert (await host.see(1.0, {NAME: Work.REMOVING})).phase is Phase.STOPPING
    seen = await host.see(2.0, {NAME: Work.STARTING})
    assert (seen.phase, seen.units) == (Phase.STARTING, ())


async def test_since_counts_from_the_change_and_a_hang_is_told_from_a_start(host: Host) -> None:
    host.runs("engine", "agent")
    now = time.time()
    started = await host.see(now)
    assert started.since <= now
    assert not started.was_ready
    host.says = {"state": "ready", "role": "decode", "load": {"running": 2, "waiting": 1, "transfers": 4}}
    ready = await host.see(now + 5)
    assert (ready.since, ready.load) == (now + 5, 7)
    assert (await host.see(now + 9)).since == now + 5
    host.says = {"state": "starting", "role": "decode"}
    hangs = await host.see(now + 20)
    assert (hangs.phase, hangs.since, hangs.was_ready) == (Phase.STARTING, now + 20, True)


async def test_an_agent_with_other_settings_is_outdated(host: Host) -> None:
    host.runs("engine", "agent")
    assert AGENT.agent is not None
    other = msgspec.structs.replace(AGENT, agent=msgspec.structs.replace(AGENT.agent, heartbeat_s=9.0))
    (seen,) = (await host.look(1.0, wanted=other)).observed.instances
    assert [unit.outdated for unit in seen.units] == [False, True]
    (seen,) = (await host.look(1.0)).observed.instances
    assert [unit.outdated for unit in seen.units] == [False, False]


async def test_the_router_is_ready_when_it_is_settled_and_knows_all_that_is(host: Host) -> None:
    assert (await host.look(1.0)).observed.router is None
    host.runs("engine", "agent")
    host.route()
    host.says = {"state": "ready", "role": "decode"}
    picture = await host.look(1.0)
    assert picture.observed.router is not None
    assert (picture.observed.router.ready, picture.observed.fleet_known) == (False, False)
    host.fleet = {"service": "qwen", "router": "r", "uptime_s": 1, "settled": True, "instances": []}
    picture = await host.look(2.0)
    assert picture.observed.fleet_known
    assert picture.observed.router is not None
    assert not picture.observed.router.ready, "it has not heard of the instance"
    host.fleet["instances"] = [
        {
            "instance": NAME, "role": "decode", "epoch": 1, "state": "ready", "incarnation": "", "fingerprint": "",
            "http": [], "control": [], "model": "", "load": {}, "drained": False, "in_flight": 0, "beat_age_s": 0.1,
        }
    ]
    picture = await host.look(3.0)
    assert picture.observed.router is not None
    assert picture.observed.router.ready
    host.fleet["settled"] = False
    assert not (await host.look(4.0)).observed.fleet_known


async def test_a_damaged_record_is_left_out(host: Host) -> None:
    (host.instance.folder / "instance.json").write_text("{")
    assert (await host.look(1.0)).observed.instances == ()


async def test_drains_are_asked_for_and_taken_back(host: Host) -> None:
    await agents.drain(host.instance.run_dir)
    await agents.undrain(host.instance.run_dir)
    assert host.drains == ["/drain", "/undrain"]
    with pytest.raises(agents.LocalError, match="no agent answers"):
        await agents.drain(host.instance.run_dir / "nowhere")
    assert await agents.agent_status(host.instance.run_dir / "nowhere") is None


async def test_a_router_of_a_release_without_an_admin_port_is_asked_where_clients_come(host: Host) -> None:
    host.runs("engine", "agent")
    host.route()
    saved = json.loads(host.router.file.read_bytes())
    saved["router"]["port"] = saved["router"].pop("admin_port")
    host.router.file.write_text(json.dumps(saved))
    host.fleet = {"service": "qwen", "router": "r", "uptime_s": 1, "settled": True, "instances": []}
    assert (await host.look(1.0)).observed.fleet_known


async def test_a_switch_lasts_until_agent_and_router_know_and_whoever_looks_sees_it(host: Host) -> None:
    """All that a supervisor needs to go on in the middle stands in the record and comes from agent and router."""
    record = msgspec.structs.replace(RECORD, role=Role.PREFILL, epoch=2, assigned=50.0)
    host.instance.write(record, [AGENT])
    host.runs("engine", "agent")
    host.route()
    known: dict[str, object] = {
        "instance": NAME, "role": "decode", "epoch": 1, "state": "ready", "incarnation": "", "fingerprint": "f7",
        "http": [], "control": [], "model": "", "load": {}, "drained": False, "in_flight": 0, "beat_age_s": 0.1,
        "cached": 7, "refused": [{"instance": "qwen-e9", "incarnation": "1", "reason": "why"}], "links": ["over tcp"],
    }
    host.fleet = {"service": "qwen", "router": "r", "uptime_s": 9.0, "settled": True, "instances": [known]}
    host.says = {"state": "ready", "role": "decode", "epoch": 1}
    seen = await host.see(60.0)
    assert (seen.role, seen.epoch, seen.switching, seen.assigned, seen.cached) == (Role.PREFILL, 2, True, 50.0, 7)
    assert seen.fingerprint == "f7", "by which Compatible is told"
    assert (seen.refuses, seen.links) == ((("qwen-e9", "why"),), ("over tcp",)), "and what it is told with"
    assert host.instance.written_assignment() == Assignment(Role.PREFILL, 2, 50.0)
    await agents.assign(host.instance.run_dir, Assignment(Role.PREFILL, 2, 50.0))
    assert host.roles == [Assignment(Role.PREFILL, 2, 50.0)]
    host.says = {"state": "ready", "role": "prefill", "epoch": 2}
    assert (await host.see(61.0)).switching, "the router has not heard"
    known |= {"role": "prefill", "epoch": 2}
    assert not (await host.see(62.0)).switching


async def test_an_instance_that_is_made_anew_forgets_the_role_of_the_former_one(host: Host) -> None:
    kept = host.instance.run_dir / assignment.KEPT
    assignment.keep(host.instance.run_dir, Assignment(Role.PREFILL, 5))
    host.instance.write(RECORD, [AGENT])
    assert kept.exists(), "it is the same one"
    (host.instance.folder / "instance.json").unlink()
    host.instance.write(RECORD, [AGENT])
    assert not kept.exists()
