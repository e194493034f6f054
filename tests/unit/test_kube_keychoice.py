"""Keys of services while clusters live: rotated, restored, lost; several services, real planning, scripted pods.

Routers tell what they would: one with an older key hears of everybody, one with the newest of those with its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

import aiohttp
import pytest
from kube_documents import document, pod
from kube_keys import MASTERS, encoded, key, master, secret_name, store_master, turns
from memory_api import MemoryApi

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND, WatchCache
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.gangs.gangs import Gangs
from xpyd_operator.kube.gangs.topology import Topology
from xpyd_operator.kube.keys.master import KeyTrouble, Master
from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.kube.routers.fleet import KeyOf
from xpyd_operator.kube.routers.observe import RouterAnswers
from xpyd_operator.kube.routes.gateways import Gateways
from xpyd_operator.kube.service.backend import KubeBackend
from xpyd_operator.kube.service.shared import SharedParts
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.loop import converge
from xpyd_operator.plan.round import Round
from xpyd_operator.render import labels
from xpyd_operator.render.keys import secret_of
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.keys import file_name
from xpyd_sidecar.contract.membership import Load

SETTINGS = OperatorSettings(sidecar_image="sidecar:1", fleet_timeout_s=0.2)
NOBODY = ApiError(403, "Forbidden", "cannot get resource secrets")


class Cluster:
    """Several services by one operator; ``restart`` makes a new one over what is there."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.api, self.cache, self.now, self.session = MemoryApi(), WatchCache(), time.time(), session
        self.backends: dict[str, KubeBackend] = {}
        self.floor: dict[str, dict[Role, int]] = {}
        self.mixed: list[set[str]] = []
        """Which services had pods with several keys, round by round."""
        """What every agent says."""
        self.restart()

    def restart(self, of: Master | None = None) -> None:
        events = Events(self.api, Metrics())  # type: ignore[arg-type]
        found = of or Master(self.api, "xpyd-system", "xpyd-master", self.in_use)  # type: ignore[arg-type]
        self.shared = SharedParts(
            self.api, self.cache, SETTINGS, events, self.session, lambda: self.now, found,  # type: ignore[arg-type]
            turns(self.cache), Gangs(self.api, SETTINGS), Topology(self.api),  # type: ignore[arg-type]
            Gateways(self.api, self.cache, (), lambda *_: None))  # type: ignore[arg-type]
        for name in self.backends:
            self.adopt(name)

    def in_use(self) -> bool:
        return any("-key-" in secret_of(body) for at, body in self.api.objects.items() if at[0] == "Pod")

    def write(self, name: str = "qwen", uid: str = "", **spec: Any) -> None:
        before = self.api.objects.get((OWNER_KIND, "team-a", name))
        body = document(name, generation=before["metadata"]["generation"] + 1 if before else 1, **spec)
        body["metadata"]["uid"] = uid or (before["metadata"]["uid"] if before else f"uid-of-{name}")
        status = {"status": before["status"]} if before and "status" in before else {}
        self.cache.on_seen(OWNER_KIND, self.api.put(OWNER_KIND, body | status))
        if name not in self.backends or uid:
            self.adopt(name)

    def adopt(self, name: str) -> None:
        entry = self.cache.get(OWNER_KIND, "team-a", name)
        assert entry is not None
        self.backends[name] = KubeBackend(self.shared, entry)
        self.backends[name]._fleets = Routers(self, name)  # type: ignore[assignment]

    async def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            for name, backend in self.backends.items():
                done = await converge(backend, self.now, last=backend.last.desired if backend.last else None)
                await backend.close()
                assert done.failures == (), (name, done.failures)
                self.check(name, done)
            self.mixed.append({name for name in self.backends if len(self.secrets(name)) > 1})
            self.kubelets()
            self.now += 6

    def check(self, name: str, done: Round) -> None:
        """Nothing that serves is missing, and what serves can pair within one key."""
        ready = [fact for fact in self.engines(name) if fact.ready]
        for role, least in self.floor.get(name, {}).items():
            assert sum(fact.role is role for fact in ready) >= least, f"{name} has too few of {role}"
        if self.floor.get(name):
            both = [{fact.key for fact in ready if fact.role is role} for role in Role]
            assert both[0] & both[1], f"no pair of {name} within one key"

    def kubelets(self) -> None:
        def starts(body: dict[str, Any]) -> bool:  # without its Secret a kubelet starts nothing
            return ("Secret", body["metadata"]["namespace"], secret_of(body)) in self.api.objects

        self.api.run_pods(self.cache, pod(0)["status"], starts)

    def engines(self, name: str) -> list[Facts]:
        seen = (each.derive(facts) for each in self.cache.of_service("Pod", "team-a", name))
        return [each for each in seen if each.owner == self.backends[name].uid]

    def secrets(self, name: str = "qwen") -> Counter[str]:
        return Counter(fact.key for fact in self.engines(name) if not fact.ends_by)

    def uids(self, name: str = "qwen") -> set[str]:
        return {fact.uid for fact in self.engines(name)}

    def condition(self, kind: str, name: str = "qwen") -> dict[str, Any]:
        status = self.api.objects[OWNER_KIND, "team-a", name].get("status") or {}
        return next((each for each in status.get("conditions", ()) if each["type"] == kind), {})


class Routers:
    """In place of ``Fleets``: the router with the oldest key tells."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self.hurried = False

    async def ask(
        self, routers: Sequence[Facts], learners: Sequence[Facts], key_of: KeyOf, now: float, *, limit: int,
        tls: bool = False, picture: Hashable = None, prefill: bool = True,
    ) -> RouterAnswers:
        engines = [fact for fact in self._cluster.engines(self._name) if fact.ready]
        asked = [each for each in (*routers, *learners) if key_of(each) is not None]
        if not asked:
            return RouterAnswers()
        newest = self._cluster.backends[self._name]._keys.newest.pod.secret
        old = any(each.key != newest for each in asked)
        known = tuple(_heard(each) for each in engines if old or each.key == newest)
        fleet = Fleet(ServiceName(self._name), "r", 1.0, settled=True, instances=known)
        return RouterAnswers(fleet, frozenset(each.name for each in asked))

    def close(self) -> None:
        """Nothing is open."""


def _heard(fact: Facts) -> FleetInstance:
    return FleetInstance(
        instance=InstanceName(fact.name), incarnation=Incarnation("a"), role=fact.role or Role.DECODE, epoch=1,
        state=State.READY, fingerprint=Fingerprint(f"f-{fact.key}"), http=(HostPort("h:1"),), control=(), model="m",
        load=Load(), drained=False, in_flight=0, beat_age_s=1.0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with aiohttp.ClientSession() as session:
        yield Cluster(session)


async def made(cluster: Cluster, *names: str, **spec: Any) -> None:
    for name in names or ("qwen",):
        cluster.write(name, **spec)
    await cluster.rounds(8)
    for name in names or ("qwen",):
        cluster.floor[name] = {Role.PREFILL: 1, Role.DECODE: 2}


async def test_a_new_generation_rolls_services_one_after_the_other(cluster: Cluster) -> None:
    store_master(cluster.api, 1)
    names = ("one", "two", "three")
    await made(cluster, *names)
    first = {name: cluster.uids(name) for name in names}
    store_master(cluster.api, 1, 2)
    cluster.now += 60
    cluster.mixed.clear()
    await cluster.rounds(120)
    for name in names:
        assert set(cluster.secrets(name)) == {secret_name(2, f"uid-of-{name}", name)}, cluster.secrets(name)
        assert not cluster.uids(name) & first[name]
    assert {len(each) for each in cluster.mixed} == {0, 1}, "never two at once"
    again = {name: cluster.uids(name) for name in names}
    await cluster.rounds(10)
    assert {name: cluster.uids(name) for name in names} == again


async def test_an_operator_that_begins_in_the_middle_goes_on(cluster: Cluster) -> None:
    store_master(cluster.api, 1)
    await made(cluster, "one", "two")
    store_master(cluster.api, 1, 2)
    cluster.now += 60
    cluster.mixed.clear()
    for _ in range(60):
        await cluster.rounds(2)
        cluster.restart()
    for name in ("one", "two"):
        assert set(cluster.secrets(name)) == {secret_name(2, f"uid-of-{name}", name)}
    assert max(len(each) for each in cluster.mixed) == 1


async def test_one_that_is_not_ready_is_not_rolled(cluster: Cluster) -> None:
    store_master(cluster.api, 1)
    await made(cluster)
    body = cluster.api.objects["Pod", "team-a", "qwen-e1"]
    broken = dict(pod(0)["status"], conditions=[{"type": "Ready", "status": "False"}])
    cluster.cache.on_seen("Pod", cluster.api.put("Pod", body | {"status": broken}))
    cluster.floor.clear()
    await cluster.rounds()
    store_master(cluster.api, 1, 2)
    cluster.now += 60
    await cluster.rounds(10)
    assert set(cluster.secrets()) == {secret_name(1, "uid-of-qwen")}


async def test_routers_in_pods_of_their_own_follow_when_no_engine_has_the_old_key(cluster: Cluster) -> None:
    store_master(cluster.api, 1)
    spec: dict[str, Any] = {"router": {"placement": "deployment"}}
    await made(cluster, **spec)
    at = ("Deployment", "team-a", "qwen-router")

    def of_routers() -> str:
        body = cluster.api.objects[at]
        cluster.cache.on_seen("Deployment", body)
        return secret_of(body["spec"]["template"])

    old, new = (secret_name(number, "uid-of-qwen") for number in (1, 2))
    router = pod(7, role="", labelled={labels.COMPONENT: labels.ROUTERS, labels.ROUTER: "true"})
    router["metadata"] |= {"name": "qwen-router-x", "uid": "router"}
    router["spec"]["volumes"] = [{"name": "key", "secret": {"secretName": old}}]
    cluster.cache.on_seen("Pod", router)
    assert of_routers() == old
    store_master(cluster.api, 1, 2)
    cluster.now += 60
    for _ in range(60):
        others = cluster.secrets().keys() - {new}
        await cluster.rounds()
        assert of_routers() == old or not others, "their agents would reach no router"
    assert (of_routers(), set(cluster.secrets())) == (new, {new})


async def test_a_lost_master_is_named_and_nothing_is_replaced(cluster: Cluster) -> None:
    store_master(cluster.api, 1)
    await made(cluster)
    before = cluster.uids()
    saved = cluster.api.objects.pop(("Secret", "xpyd-system", "xpyd-master"))
    cluster.restart()
    cluster.write("other")
    for _ in range(3):
        with pytest.raises(KeyTrouble, match="xpyd-master is not there"):
            await cluster.rounds()
        cluster.now += 6
    await cluster.backends["qwen"].close()
    assert cluster.uids() == before
    assert cluster.condition("Degraded")["reason"] == cluster.condition("Stalled")["reason"] == "MasterLost"
    assert cluster.condition("Ready")["status"] == "True", "it goes on serving"
    assert cluster.condition("Valid")["observedGeneration"] == 1
    assert ("Secret", "xpyd-system", "xpyd-master") not in cluster.api.objects
    cluster.api.put("Secret", saved)
    await cluster.rounds(4)
    assert (cluster.uids(), cluster.condition("Stalled")) == (before, {})
    assert set(cluster.secrets("other")) == {secret_name(1, "uid-of-other", "other")}


async def test_another_master_in_its_place_replaces_nothing_either(cluster: Cluster) -> None:
    store_master(cluster.api, 1)
    await made(cluster)
    before = cluster.uids()
    cluster.api.put("Secret", {"metadata": {"name": "xpyd-master", "namespace": "xpyd-system"},
                               "data": encoded({"1": MASTERS[3].hex()})})
    cluster.restart()
    with pytest.raises(KeyTrouble, match="is of no generation of the master"):
        await cluster.rounds()
    await cluster.backends["qwen"].close()
    assert (cluster.uids(), cluster.condition("Degraded")["reason"]) == (before, "KeyUnknown")


async def test_two_operators_at_once_make_one_secret_and_the_same_pods(cluster: Cluster) -> None:
    """As while a Lease goes over: both act on the same cluster, and neither knows of the other."""
    store_master(cluster.api, 1)
    cluster.write()
    others = Cluster(cluster.session)
    others.api, others.cache = cluster.api, WatchCache()
    others.restart(master(cluster.api))
    cluster.api.show(others.cache)
    others.adopt("qwen")
    for _ in range(6):
        for each in (cluster, others):
            await converge(each.backends["qwen"], each.now, last=None)
            await each.backends["qwen"].close()
            cluster.api.show(others.cache)
            cluster.api.show(cluster.cache)
            each.now += 6
        cluster.kubelets()
        cluster.api.show(others.cache)
    assert {at[2] for at in cluster.api.objects if at[0] == "Secret"} == {"xpyd-master", secret_name(1, "uid-of-qwen")}
    assert cluster.secrets() == Counter({secret_name(1, "uid-of-qwen"): 3})


async def test_a_cluster_restored_with_new_uids_mounts_nothing_of_before(cluster: Cluster) -> None:
    """Secrets and pods came back beside the service, with an owner that is not there any more."""
    store_master(cluster.api, 1)
    await made(cluster)
    cluster.floor.clear()
    cluster.write(uid="restored")
    await cluster.rounds(8)
    mine = [fact for fact in cluster.engines("qwen") if not fact.ends_by]
    assert {fact.key for fact in mine} == {secret_name(1, "restored")}
    assert len(mine) == 3


async def test_a_secret_of_that_name_that_is_somebody_elses_is_mounted_under_the_name_of_our_key(cluster: Cluster) -> None:
    """So that no process takes what is in it (``contract.keys.read``)."""
    store_master(cluster.api, 1)
    name = secret_name(1, "uid-of-qwen")
    cluster.api.put("Secret", {"metadata": {"name": name, "namespace": "team-a"}, "data": encoded({"key": "ab" * 32})})
    cluster.write()
    await cluster.rounds(2)
    assert cluster.api.objects["Secret", "team-a", name]["data"] == encoded({"key": "ab" * 32})
    body = cluster.api.objects["Pod", "team-a", "qwen-e0"]
    volume, = (each["secret"] for each in body["spec"]["volumes"] if each["name"] == "key")
    assert volume["items"][0]["path"] == file_name(key(1, "uid-of-qwen"))
