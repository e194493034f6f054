"""A scripted kubelet and scheduler for a cluster without nodes: what the pods of one namespace do is written in a test.

    async with NodeAgent(kube, "team-a") as agent:
        agent.script = lambda pod: Script(start_s=0.3, trouble="pull" if image_of(pod) == "wrong" else "")
        agent.crash("qwen-e1", "CUDA error: out of luck")

           bind              start_s                    crash()
    Pending ───▶ (pulling) ───▶ Running ───▶ Ready ───────────────▶ CrashLoopBackOff ─▶ Running …
       └ Unschedulable while the devices are taken       any ── deletionTimestamp, drain_s ──▶ gone (DELETE, grace 0)

Members of an instance of several pods are ready while all of them run; they run in lives, one after the other (``rounds``).

Each pod has a loopback address of its own. A router beside or without an engine answers there (``kube_routers``); it is
settled ``settle_s`` after the pod has the roster label and runs, and tells the fleet from the state of all pods of its
service.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import itertools
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Literal, Protocol, Self

import aiohttp
from kube_client import Kube, KubeError, Mirror, Object
from kube_pods import INSTALL, MAIN, Exit, Facts, now_text, status_of
from kube_routers import Keys, ScriptedRouter, read_keys, router_of, router_port

from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.assignment import FIRST_EPOCH
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.totals import Totals

SERVICE, ROLE, REVISION = "xpyd.dev/service", "xpyd.dev/role", "xpyd.dev/revision"
ASSIGNMENT = "xpyd.dev/assignment"
COMPONENT, FETCHES = "app.kubernetes.io/component", "prefetch"
"""Of pods that fetch something ahead of instances."""
INSTANCE, MEMBER, MEMBERS = "xpyd.dev/instance", "xpyd.dev/member", "xpyd.dev/members"
ROSTER, ROUTER = "xpyd.dev/roster", "xpyd.dev/router"
LEASE_S = 10.0
AGAIN_S = 0.2
PROBE_S = 0.1
NETWORKS = range(1, 251)
"""Second bytes of the loopback networks that agents take for their pods."""
CLAIM = 10000


@dataclass(frozen=True)
class Script:
    """What happens to one pod. Times in seconds."""

    start_s: float = 0.2
    settle_s: float = 0.2
    drain_s: float = 0.2
    restart_s: float = 0.5
    """From a crash to the next start."""
    trouble: Literal["", "unschedulable", "pull", "package", "crash", "oom"] = ""
    """``package``: xpyd's own image cannot be pulled."""
    words: str = ""
    """What the trouble says: the event's message, or the last log lines."""
    ago_s: float = 0.0
    """So long ago the trouble with a place began."""


def image_of(pod: Object) -> str:
    """Image of the container ``main``."""
    return next((str(each["image"]) for each in pod["spec"]["containers"] if each["name"] == MAIN), "")


def package_of(pod: Object) -> str:
    """Image that brings xpyd's package to an engine."""
    return next((str(each["image"]) for each in pod["spec"].get("initContainers", ()) if each["name"] == INSTALL), "")


def same_for_all(_: Object) -> str:
    """A fingerprint that every engine shares."""
    return hashlib.sha256(b"kv").hexdigest()[:32]


def by_image(pod: Object) -> str:
    """A fingerprint for each image."""
    return hashlib.sha256(image_of(pod).encode()).hexdigest()[:32]


def claim_network() -> tuple[socket.socket, int]:
    """A loopback network that no other agent of this machine has, and the socket that holds it until it is closed.

    Agents of several test processes would otherwise meet on one address. The kernel gives an address and port to one socket
    alone, and takes it back however its process ends. Raises OSError when every network is taken.
    """
    first = Random().randrange(len(NETWORKS))
    for network in (*NETWORKS[first:], *NETWORKS[:first]):
        claim = socket.socket()
        try:
            claim.bind((f"127.{network}.255.254", CLAIM))
            claim.listen()
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return claim, network
    raise OSError(errno.EADDRINUSE, "every loopback network is taken by another agent")


@dataclass
class Life:
    """One pod, from the moment it is seen until it is gone."""

    pod: Object
    ip: str
    facts: Facts = field(default_factory=Facts)
    load: int = 0
    ending: bool = False
    heard_since: float | None = None
    """Since when agents beat to its router (monotonic seconds)."""
    router_since: float | None = None
    """Since when its router runs (monotonic seconds)."""
    router: PodServer | None = None
    keys: Keys | None = None
    """What the pod was started with."""
    written: Object | None = None
    dirty: asyncio.Event = field(default_factory=asyncio.Event)
    kick: asyncio.Event = field(default_factory=asyncio.Event)
    """The script may say something else now."""
    crash: str = ""
    up: bool = False
    """Of a member: its engine would serve, if those of all others do."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def labels(self) -> dict[str, str]:
        return self.pod["metadata"].get("labels") or {}

    @property
    def service(self) -> str:
        return self.labels.get(SERVICE, "")

    @property
    def engine(self) -> bool:
        return any(each["name"] == MAIN for each in self.pod["spec"]["containers"])

    @property
    def instance(self) -> str:
        """That it is, or is a member of."""
        return self.labels.get(INSTANCE, self.name)

    @property
    def leads(self) -> bool:
        """Who speaks for its instance."""
        return self.labels.get(MEMBER, "0") == "0"

    @property
    def gated(self) -> bool:
        """A scheduling gate keeps the scheduler away."""
        return bool(self.pod["spec"].get("schedulingGates")) and not self.ending

    @property
    def running(self) -> bool:
        return self.facts.stage in ("running", "ready", "crashed")


class PodServer(Protocol):
    """What answers in a pod, from its start to its end."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class NodeAgent:
    """Keeps the pods of one namespace."""

    def __init__(self, kube: Kube, namespace: str, *, devices: int | None = None) -> None:
        self.script: Callable[[Object], Script] = lambda _: Script()
        self.fingerprint: Callable[[Object], str] = same_for_all
        self.shows_roles = True
        """Agents and routers know what the annotation of a pod says of its role."""
        self.beats = True
        """Agents beat to the routers beside engines, which know the roster by that."""
        self.starts = True
        """Engines that have had their ``start_s`` serve."""
        self.ends = True
        """Pods that are to end do so when they have drained."""
        self.totals: Callable[[Life], Totals] = lambda _: Totals()
        """What the router of a pod has counted."""
        self.load: Callable[[Life], Load] = lambda life: Load(running=life.load)
        """What an engine has to do."""
        self.held = 0
        """Requests that wait in each router and may start instances."""
        self.idle_s: float | None = None
        """For how long no router had a request; None: routers do not tell."""
        self.serves: Callable[[Life], PodServer] = self._scripted
        """What answers in a pod."""
        self.drained: Callable[[Life], bool] = lambda _: True
        """Whether a pod that is to end, and has had its ``drain_s``, has nothing left to do."""
        self.devices = devices
        """Engine pods that fit on the node; None: all."""
        self.silent = False
        """The kubelet does not answer: pods live on, and nobody tells of them."""
        self.lives: dict[str, Life] = {}
        self.faults: list[str] = []
        """What went wrong in this agent itself; a test fails on it."""
        self._kube = kube
        self._namespace = namespace
        self.node = self._node = f"node-{namespace}"
        self._network = 0
        self._claim: socket.socket | None = None
        self._hosts = itertools.count(1)
        self._pods = Mirror(kube, "Pod", namespace)
        self.rounds: dict[str, list[frozenset[str]]] = {}
        """Of each instance of several pods: the uids of those that served together, one life after the other."""
        self._lease: asyncio.Task[None] | None = None
        self._ends: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._claim, self._network = claim_network()
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "scripted",
                 "lastHeartbeatTime": now_text(), "lastTransitionTime": now_text()}
        await self._kube.create("Node", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._node}})
        await self._kube.merge("Node", "", self._node, {"status": {"conditions": [ready]}}, "status")
        self._lease = asyncio.create_task(self._keep_lease())
        self._pods.listeners.append(self._on_pod)
        await self._pods.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self._pods.__aexit__(kind, error, trace)
        assert self._lease is not None
        tasks = [self._lease, *self._ends, *(task for life in self.lives.values() for task in life.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for life in self.lives.values():
            if life.router is not None:
                await life.router.stop()
        if self._claim is not None:
            self._claim.close()
        with contextlib.suppress(KubeError, aiohttp.ClientError, TimeoutError):
            await self._kube.delete("Node", "", self._node)
        if error is None:
            assert not self.faults, self.faults

    # What tests do.

    async def catch_up(self) -> None:
        """Until it has seen all pods as they were when this began. Raises TimeoutError."""
        await self._pods.catch_up()

    def crash(self, name: str, words: str = "the engine died") -> None:
        """The engine of a pod that runs ends once with exit code 1, and starts again."""
        life = self.lives[name]
        assert life.running, f"{name} is {life.facts.stage}"
        life.crash = words
        life.kick.set()

    def speak(self) -> None:
        """The kubelet is back, and says again what Kubernetes has changed meanwhile."""
        self.silent = False
        for life in self.lives.values():
            life.written = None

    def again(self) -> None:
        """Ask the script anew for every pod that does not run."""
        for life in self.lives.values():
            if not life.running:
                life.kick.set()

    def engines(self, service: str, role: str = "") -> list[Life]:
        """Engine pods of a service that speak for an instance, by name."""
        found = [life for life in self.lives.values() if life.engine and life.service == service and life.leads]
        return sorted((life for life in found if role in ("", life.labels.get(ROLE))), key=lambda life: life.name)

    def why_not(self, life: Life) -> str:
        """Why the router of a pod cannot answer a client; empty when it can."""
        if life.ending:
            return "it stops"
        if not self._settled(life):
            return "the roster is not settled"
        if not router_of(life.pod).get("wakes") and not any(
                each.facts.stage == "ready" and not each.ending for each in self.engines(life.service, "decode")):
            return "no decode instance is ready"
        return ""

    def can_answer(self, service: str) -> bool:
        """Some router that clients reach can answer one of them."""
        return any(life.labels.get(ROUTER) == "true" and life.running and not self.why_not(life)
                   for life in self.lives.values() if life.service == service)

    # Pods come, change and go.

    def _on_pod(self, was: Object | None, now: Object | None) -> None:
        if was is not None and (now is None or now["metadata"]["uid"] != was["metadata"]["uid"]):
            self._gone(was["metadata"]["name"])
        if now is None:
            return
        name = now["metadata"]["name"]
        life = self.lives.get(name)
        if life is None and now["metadata"].get("labels", {}).get(COMPONENT) == FETCHES:
            return  # it fetches something ahead: a test tells its state
        if life is None:
            host = next(self._hosts)
            life = self.lives[name] = Life(now, f"127.{self._network}.{host // 250}.{host % 250 + 1}")
            life.tasks = [asyncio.create_task(self._guarded(life, each)) for each in (self._live, self._write)]
        life.pod = now
        self._hear(life)
        if now["metadata"].get("deletionTimestamp") and not life.ending:
            life.ending = True
            life.tasks.append(asyncio.create_task(self._guarded(life, self._end)))

    def _gone(self, name: str) -> None:
        life = self.lives.pop(name, None)
        if life is None:
            return
        for task in life.tasks:
            task.cancel()
        if life.router is not None:
            end = asyncio.create_task(life.router.stop())
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def _guarded(self, life: Life, work: Callable[[Life], Awaitable[None]]) -> None:
        try:
            await work(life)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (told to the test at its end)
            if isinstance(error, KubeError) and "it is being terminated" in str(error):
                return  # the test has ended, and so does its namespace
            self.faults.append(f"{life.name}: {error!r}")

    async def _ask(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Until the API server answers; a pod that has gone, or is another one by now, ends it quietly."""
        while True:
            try:
                await ask()
            except KubeError as error:
                if error.status in (404, 409):
                    return
                if error.status < 429:
                    raise
                await asyncio.sleep(AGAIN_S)
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(AGAIN_S)  # the API server is away: tests do that on purpose
            else:
                return

    async def _live(self, life: Life) -> None:
        """From the scheduler to a serving engine, and again after every crash."""
        facts = life.facts
        while life.gated:
            await self._kicked(life, AGAIN_S)
        while True:
            script = self.script(life.pod)
            facts.unschedulable = self._no_place(life, script)
            facts.ago_s = script.ago_s if facts.unschedulable else 0.0
            if not facts.unschedulable:
                break
            life.dirty.set()
            await self._kicked(life, AGAIN_S)
        facts.ip, facts.started = life.ip, now_text()
        target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
        named = {"name": life.name, "uid": life.uid}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": named, "target": target}
        path = f"/api/v1/namespaces/{self._namespace}/pods/{life.name}/binding"
        await self._ask(lambda: self._kube.request("POST", path, binding))
        while True:
            script = self.script(life.pod)
            facts.stage = "pulling"
            facts.pull_error = script.words if script.trouble in ("pull", "package") else ""
            facts.pulls = INSTALL if script.trouble == "package" else MAIN
            if not facts.pull_error:
                break
            life.dirty.set()
            await self._kicked(life, None)
        await self._mount(life)
        life.router = self.serves(life)
        await life.router.start()
        life.router_since = time.monotonic()
        while True:
            facts.stage, facts.started = "running", now_text()
            self._hear(life)
            life.dirty.set()
            script = self.script(life.pod)
            await asyncio.sleep(script.start_s)
            while not self.starts:
                await self._kicked(life, AGAIN_S)
            if not (script.trouble in ("crash", "oom") and life.engine):
                life.up = True
                if MEMBER not in life.labels:
                    facts.stage = "ready"
                life.dirty.set()
                while not life.crash:
                    await self._kicked(life, None)
            oom = script.trouble == "oom"
            words = life.crash or script.words
            life.crash, life.up, facts.began = "", False, False
            facts.exit = Exit(137 if oom else 1, "OOMKilled" if oom else "Error", words, now_text())
            facts.stage, facts.restarts = "crashed", facts.restarts + 1
            life.dirty.set()
            await asyncio.sleep(script.restart_s)

    async def _kicked(self, life: Life, wait_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await life.kick.wait()
        life.kick.clear()

    def _scripted(self, life: Life) -> ScriptedRouter:
        assert life.keys is not None
        return ScriptedRouter(life.ip, router_port(life.pod), life.keys, name=life.instance,
                              fleet=lambda: self._fleet(life), why_not=lambda: self.why_not(life),
                              held=lambda: self.held)

    def _no_place(self, life: Life, script: Script) -> str:
        if script.trouble == "unschedulable":
            return script.words or "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
        taken = sum(1 for each in self.lives.values() if each.engine and each.facts.ip and each is not life)
        if life.engine and self.devices is not None and taken >= self.devices:
            return f"0/1 nodes are available: 1 Insufficient nvidia.com/gpu ({taken} of {self.devices} taken)."
        return ""

    async def _end(self, life: Life) -> None:
        """The preStop drains; then the pod is gone. With a grace period of 0 the API server takes it away by itself."""
        grace_s = life.pod["metadata"].get("deletionGracePeriodSeconds", 0)
        await asyncio.sleep(min(self.script(life.pod).drain_s, grace_s))
        while life.facts.away or self.silent or not self.ends or not self.drained(life):
            await self._kicked(life, AGAIN_S)
        await self._ask(lambda: self._kube.delete("Pod", self._namespace, life.name, grace_s=0, uid=life.uid))

    async def _write(self, life: Life) -> None:
        """Keep the status in the API server as the facts are; readiness is probed now and then, as the kubelet does it."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await life.dirty.wait()
            life.dirty.clear()
            if life.gated or self.silent:
                continue  # its status is the API server's
            life.facts.sidecar_ready = self._sidecar_ready(life)
            if MEMBER in life.labels and life.facts.stage in ("running", "ready"):
                life.facts.stage = "ready" if self._together(life) else "running"
                life.facts.began = life.facts.began or life.facts.stage == "ready"
            status = status_of(life.pod, life.facts, life.written)
            if status != life.written:
                patch = {"metadata": {"uid": life.uid}, "status": status}
                await self._ask(functools.partial(self._kube.merge, "Pod", self._namespace, life.name, patch, "status"))
                life.written = status

    def _together(self, life: Life) -> bool:
        """Whether all members of its instance serve, of which they make a life if they did not before."""
        size = (life.pod["metadata"].get("annotations") or {}).get(MEMBERS, "")
        members = [each for each in self.lives.values() if each.instance == life.instance and MEMBER in each.labels]
        if not size.isdecimal() or len(members) != int(size) or not all(
                each.up and not each.ending and not each.facts.away for each in members):
            return False
        lives = self.rounds.setdefault(life.instance, [])
        now = frozenset(each.uid for each in members)
        if not lives or lives[-1] != now:
            lives.append(now)
        return True

    async def _keep_lease(self) -> None:
        """Else the node is called dead after a minute, and its pods are evicted."""
        while True:
            await asyncio.sleep(LEASE_S)
            if self.silent:
                continue
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "scripted",
                     "lastHeartbeatTime": now_text(), "lastTransitionTime": now_text()}
            with contextlib.suppress(KubeError, aiohttp.ClientError, TimeoutError, OSError):
                await self._kube.merge("Node", "", self._node, {"status": {"conditions": [ready]}}, "status")

    # What routers know.

    def _hear(self, life: Life) -> None:
        hears = life.labels.get(ROSTER) == "true" and life.running
        if not hears:
            life.heard_since = None
        elif life.heard_since is None:
            life.heard_since = time.monotonic()

    def _settled(self, life: Life) -> bool:
        """Beside an engine agents are told of a router at some time; a router of its own they know from its start."""
        return (self.beats or not life.engine) and self._lasts(life, life.heard_since if life.engine else life.router_since)

    def _sidecar_ready(self, life: Life) -> bool:
        """What the router's ``/ready`` says to the kubelet: beside an engine only its own age counts."""
        return self._lasts(life, life.router_since) and (life.engine or not self.why_not(life))

    def _lasts(self, life: Life, since: float | None) -> bool:
        return since is not None and time.monotonic() - since >= self.script(life.pod).settle_s

    async def _mount(self, life: Life) -> None:
        """The key as it is when the pod starts; without its Secret a pod does not start."""
        async def read() -> None:
            life.keys = await read_keys(self._kube, self._namespace, life.pod)

        while life.keys is None:
            await self._ask(read)
            if life.keys is None:
                await asyncio.sleep(AGAIN_S)

    def _fleet(self, life: Life) -> Fleet:
        assert life.keys is not None
        known = [each for each in self.engines(life.service) if life.heard_since is not None and each.keys is not None
                 and life.keys.key in (each.keys.key, each.keys.before)]
        uptime_s = 0.0 if life.heard_since is None else time.monotonic() - life.heard_since
        return Fleet(service=ServiceName(life.service), router=life.name, uptime_s=uptime_s, settled=self._settled(life),
                     totals=self.totals(life), idle_s=self.idle_s,
                     instances=tuple(self._told(each) for each in known if each.running and each.facts.stage != "crashed"))

    def _told(self, life: Life) -> FleetInstance:
        ready = life.facts.stage == "ready"
        members = [each for each in self.lives.values() if each.instance == life.instance]
        state = State.DRAINING if any(each.ending for each in members) else State.READY if ready else State.STARTING
        incarnation = hashlib.sha256(f"{life.uid} {life.facts.restarts}".encode()).hexdigest()[:32]
        assert life.keys is not None
        mark = f"-{life.keys.mark}" if life.keys.mark else ""
        fingerprint = f"{self.fingerprint(life.pod)}{mark}" if ready else ""
        role, epoch = Role(life.labels[ROLE]), FIRST_EPOCH
        shown = (life.pod["metadata"].get("annotations") or {}).get(ASSIGNMENT)
        if shown and self.shows_roles:
            told = assignment.decode(shown)
            role, epoch = told.role, told.epoch
        return FleetInstance(
            instance=InstanceName(life.instance), role=role, epoch=epoch, state=state,
            incarnation=Incarnation(incarnation if ready else ""), fingerprint=Fingerprint(fingerprint),
            http=(HostPort(f"{life.ip}:8000"),), control=(HostPort(f"{life.ip}:7000"),), model="tiny",
            load=self.load(life), drained=life.ending and not life.load, in_flight=0, beat_age_s=0.5)
