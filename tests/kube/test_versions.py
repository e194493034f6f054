"""v1beta1 beside v1alpha1 on a real API server: services of before run on, whoever writes which version."""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from gitops_judge import Judge
from kube_client import KubeError, Object, path_of
from kube_cluster import Request, apply_crds, requests, wait_established
from kube_operator import OperatorProcess
from kube_team import CHILDREN, OPERATOR, OPERATOR_NAMESPACE, USER, Team, make_team
from kube_watchdog import Watchdog
from kube_watched import label
from node_agent import SERVICE
from testcluster.control_plane import CONTROLLERS, ETCD
from testcluster.light import LightCluster

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
ROOT = Path(__file__).resolve().parents[2]
BEFORE = ROOT / "tests/data/crds/265319e.yaml"
NEW, OLD = "v1beta1", "v1alpha1"
PLURALS = {"DisaggService": "disaggservices", "DisaggPool": "disaggpools"}
STORED_S = 240.0
GOAL = {"ttftP95": "2s"}
WORDS: dict[str, dict[str, Any]] = {
    "beside": {"router": {"placement": "Sidecar", "policy": "least_loaded"}, "planner": {"mode": "Off"}, "decode": 2},
    "apart": {"router": {"placement": "Deployment", "replicas": 2}, "planner": {"mode": "Observe", "slo": GOAL}},
    "ranks": {"engine": {"image": "engine:1", "dpStepSync": "off"},
              "planner": {"mode": "Auto", "slo": GOAL, "interval": "5h"},
              "decode": {"scaling": {"min": 1, "max": 3}, "parallelism": {"data": 2},
                         "resources": {"limits": {"nvidia.com/gpu": 2}}}},
}
"""All words that were renamed, as documents of before have them."""
SHAPES = {"beside": "1P2D", "apart": "1P1D", "ranks": "1P1D"}


@pytest.fixture
def of_before(tmp_path: Path) -> Iterator[LightCluster]:
    """A cluster with the CRDs of before v1beta1, and the rights of now."""
    with LightCluster(tmp_path / "cluster") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", str(BEFORE))
        wait_established(cluster, BEFORE)
        cluster.stop(CONTROLLERS)  # the garbage collector looks for new CRDs at its start, and then only every 30 s
        cluster.start(CONTROLLERS)
        installed = yaml.safe_load_all((ROOT / "manifests/install.yaml").read_text())
        rights = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
        cluster.kubectl.apply(*(each for each in installed if each["kind"] in rights))
        yield cluster


class Operators:
    """One at a time, as the shipped ServiceAccount."""

    def __init__(self, cluster: LightCluster, log: Path) -> None:
        self.login = cluster.kubeconfig_for(OPERATOR, OPERATOR_NAMESPACE)
        self._log = log
        self.running: OperatorProcess | None = None

    async def start(self, *, older: bool = False) -> OperatorProcess:
        """``older``: one that watches and writes the version before alone."""
        await self.end()
        self.running = OperatorProcess(self.login, self._log, "--no-leader-election")
        self.running.module = "older_operator" if older else self.running.module
        await self.running.start()
        return self.running

    async def end(self) -> None:
        if self.running is not None:
            await self.running.stop()
            self.running = None


@pytest.fixture
async def operators(of_before: LightCluster, tmp_path: Path) -> AsyncIterator[Operators]:
    found = Operators(of_before, tmp_path / "operator.log")
    try:
        yield found
    finally:
        await found.end()


def uids(team: Team, name: str) -> dict[str, str]:
    pods = [pod["metadata"] for pod in team.of("Pod").values() if label(pod, SERVICE) == name]
    return {pod["name"]: pod["uid"] for pod in pods}


def everything(team: Team) -> dict[str, dict[str, str]]:
    return {name: uids(team, name) for name in WORDS}


async def settled(team: Team) -> None:
    for name, shape in SHAPES.items():
        await team.wait_settled(shape, name)


def of_version(team: Team, name: str, version: str = OLD, **more: Any) -> Object:
    return team.document(name, **WORDS[name] | more) | {"apiVersion": f"xpyd.dev/{version}"}


def text_of(team: Team, name: str, version: str = OLD) -> str:
    document = of_version(team, name, version)
    document["metadata"]["namespace"] = team.namespace
    return yaml.safe_dump(document)


async def show(team: Team, name: str, version: str, kind: str = "DisaggService") -> Object:
    found: Object = await team.kube.request("GET", path_of(kind, team.namespace, name, version=version))
    return found


async def held(team: Team, kind: str) -> list[str]:
    crd = await team.kube.get("CustomResourceDefinition", "", f"{PLURALS[kind]}.xpyd.dev")
    return list(crd["status"]["storedVersions"])


async def in_store(cluster: LightCluster, kind: str) -> dict[str, str]:
    """Name → version, as etcd has the objects of a kind."""
    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    record = cluster.folder.load()
    assert record is not None
    first = f"/registry/xpyd.dev/{PLURALS[kind]}/"
    url = f"http://127.0.0.1:{record.ports[ETCD]}/v3/kv/range"
    async with aiohttp.ClientSession() as session, session.post(
            url, json={"key": encoded(first), "range_end": encoded(f"{first[:-1]}0")}) as answer:
        found = msgspec.json.decode(await answer.read())
    bodies = [msgspec.json.decode(base64.b64decode(each["value"])) for each in found.get("kvs", ())]
    return {body["metadata"]["name"]: body["apiVersion"].partition("/")[2] for body in bodies}


async def eventually(condition: Callable[[], Awaitable[bool]], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not await condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        await asyncio.sleep(0.1)


async def test_services_of_before_run_on_through_the_upgrade(of_before: LightCluster, operators: Operators) -> None:
    operator = await operators.start(older=True)
    async with make_team(of_before, "upgrade", operator, version=OLD) as team:
        for name, flags in (("beside", ()), ("apart", ("--server-side",)), ("ranks", ())):
            await team.kubectl("apply", *flags, "-f", "-", stdin=text_of(team, name))
        await settled(team)
        before = everything(team)
        scaled = ("beside", "ranks")  # no pod of the other one ever changes
        dogs = [Watchdog(team, name, floors={"prefill": 1, "decode": int(SHAPES[name][2])}) for name in scaled]
        made = len(dogs[0].made)

        # The CRDs come first, as `kubectl apply` and Helm bring them; the operator of before goes on.
        await asyncio.to_thread(apply_crds, of_before)
        for kind in PLURALS:
            assert await held(team, kind) == [OLD, NEW]
        await team.kubectl("patch", "dsvc", "apart", "--type=merge", "-p", '{"spec": {"limits": {"maxInstances": 9}}}')
        await settled(team)
        assert everything(team) == before

        team.operator = await operators.start()
        await team.wait(lambda: owners(team) == {NEW}, "all that is applied, and the pools, name their owner anew")
        await settled(team)
        assert everything(team) == before
        assert pod_owners(team) == {OLD}, "which the garbage collector follows as well"
        await untouched_by_the_documents_of_before(team)
        await words_are_shown_as_they_are_written(team)
        await settled(team)
        assert everything(team) == before, "nothing restarts for a word"

        # Back to the operator of before: what it cannot read it leaves alone, and nothing that runs ends.
        await team.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text_of(team, "apart"))
        team.operator = await operators.start(older=True)
        await team.wait_looked()
        await settled(team)
        team.operator = await operators.start()
        await team.wait_looked()
        await settled(team)
        assert everything(team) == before
        assert len(dogs[0].made) == made

        await counts_change_by_both_versions(team, before)
        for dog in dogs:
            await dog.end()
        for name in WORDS:
            await team.delete(name)
        await team.wait_nothing_left()


def owners(team: Team) -> set[str]:
    """Versions by which services are named as owners of what is not a pod."""
    return {owner["apiVersion"].partition("/")[2] for kind in CHILDREN if kind != "Secret"
            for each in team.of(kind).values() if label(each, SERVICE)
            for owner in each["metadata"]["ownerReferences"]}


def pod_owners(team: Team) -> set[str]:
    return {owner["apiVersion"].partition("/")[2] for each in team.pods("beside")
            for owner in each["metadata"]["ownerReferences"]}


async def untouched_by_the_documents_of_before(team: Team) -> None:
    """What Git holds of v1alpha1 makes no difference, by client-side and server-side apply."""
    for name, flags in (("beside", ()), ("ranks", ())):
        version = (await show(team, name, NEW))["metadata"]["resourceVersion"]
        assert await team.kubectl("diff", *flags, "-f", "-", stdin=text_of(team, name)) == ""
        said = await team.kubectl("apply", *flags, "-f", "-", stdin=text_of(team, name))
        assert "unchanged" in said
        spec = (await show(team, name, NEW))["spec"]
        assert version, spec
        assert spec == (await show(team, name, OLD))["spec"]
        for field, section in WORDS[name].items():
            if field in ("planner", "router", "engine"):
                assert section.items() <= spec[field].items(), "as it was written"


async def words_are_shown_as_they_are_written(team: Team) -> None:
    """By each version, with words of each; the operator follows."""
    for version, word in itertools.product((OLD, NEW), ("observe", "Observe", "disabled", "Off")):
        patch = {"spec": {"planner": {"mode": word}}}
        await team.kube.merge("DisaggService", team.namespace, "apart", patch, version=version)
        for seen in (OLD, NEW):
            assert (await show(team, "apart", seen))["spec"]["planner"]["mode"] == word
        await team.wait(lambda: team.current("apart"), "the operator has seen it")
        assert team.condition("Valid", "apart")["status"] == "True"
    unknown = (("planner", "AUTO"), ("planner", "off"), ("router", "Off"))
    for version, (path, word) in itertools.product((OLD, NEW), unknown):
        field = "mode" if path == "planner" else "placement"
        patch = {"spec": {path: {field: word}}}
        with pytest.raises(KubeError, match="Unsupported value") as caught:
            await team.kube.merge("DisaggService", team.namespace, "apart", patch, version=version)
        assert caught.value.status == 422
    for name, older, now in (("beside", "Sidecar", "sidecar"), ("apart", "Deployment", "deployment")):
        for version, word in ((NEW, now), (OLD, older), (OLD, now)):
            document = yaml.safe_load(text_of(team, name, version))
            document["spec"]["router"]["placement"] = word
            await team.apply(document)
            assert (await show(team, name, NEW))["spec"]["router"]["placement"] == word
        await team.wait(lambda: team.current(name), "the operator has seen it")  # noqa: B023 (awaited here)


async def counts_change_by_both_versions(team: Team, before: dict[str, dict[str, str]]) -> None:
    for version, count in ((OLD, 3), (NEW, 2)):
        await team.kube.merge("DisaggService", team.namespace, "beside", {"spec": {"decode": {"replicas": count}}},
                              version=version)
        await team.wait_settled(f"1P{count}D", "beside")
        assert before["beside"].items() <= uids(team, "beside").items(), "who ran goes on"
    for version, count in ((OLD, 2), (NEW, 3)):
        scale = path_of("DisaggPool", team.namespace, "ranks-decode", "scale", version=version)
        await team.kube.request("PATCH", scale, {"spec": {"replicas": count}}, content="application/merge-patch+json")
        await team.wait_settled(f"1P{count}D", "ranks")
    assert before["ranks"].items() <= uids(team, "ranks").items()


def right_of_the_overlay() -> list[Object]:
    return list(yaml.safe_load_all((ROOT / "manifests/overlays/migrate/rights.yaml").read_text()))


async def test_the_store_is_brought_to_the_new_version_by_who_has_the_right(
    of_before: LightCluster, operators: Operators
) -> None:
    operator = await operators.start(older=True)
    async with make_team(of_before, "stored", operator, version=OLD) as team:
        await team.apply(of_version(team, "beside"))
        await team.wait_settled("1P2D", "beside")
        foreign = {"apiVersion": f"xpyd.dev/{OLD}", "kind": "DisaggPool", "metadata": {"name": "x-decode"},
                   "spec": {"service": "x", "role": "decode"}}
        await team.kube.create("DisaggPool", foreign, team.namespace)
        await operators.end()
        before = uids(team, "beside")
        await asyncio.to_thread(apply_crds, of_before)
        stored = {kind: await in_store(of_before, kind) for kind in PLURALS}
        assert stored == {"DisaggService": {"beside": OLD},
                          "DisaggPool": {"beside-prefill": OLD, "beside-decode": OLD, "x-decode": OLD}}

        # With the rights of the base it says what it may not, once, and leaves the rest.
        since = len(requests(of_before, USER))
        team.operator = await operators.start()
        await team.wait(lambda: "versions that the store holds" in team.operator.tail(), "it says so", STORED_S)
        await asyncio.sleep(2)

        def refusals() -> list[Request]:
            return [each for each in requests(of_before, USER)[since:] if each.answer.code == 403]

        await team.wait(refusals, "they stand in the log")  # a line may come after its answer
        refused = refusals()
        assert {(each.verb, each.object.resource, each.object.subresource) for each in refused} == {
            ("patch", "customresourcedefinitions", "status")}
        assert len(refused) <= 2
        assert await held(team, "DisaggService") == [OLD, NEW]
        assert (await in_store(of_before, "DisaggPool"))["x-decode"] == OLD

        # With the overlay's rights it does both, and uses nothing else for it.
        await asyncio.to_thread(of_before.kubectl.apply, *right_of_the_overlay())
        since = len(requests(of_before, USER))
        versions = {kind: {name: (await show(team, name, NEW, kind))["metadata"]["generation"] for name in names}
                    for kind, names in stored.items()}
        team.operator = await operators.start()
        for kind in PLURALS:
            async def done(kind: str = kind) -> bool:
                return await held(team, kind) == [NEW]

            await eventually(done, STORED_S, f"{kind} is held in one version")
            assert set((await in_store(of_before, kind)).values()) == {NEW}
        assert versions == {kind: {name: (await show(team, name, NEW, kind))["metadata"]["generation"] for name in names}
                            for kind, names in stored.items()}

        def used(asked: list[Request]) -> set[tuple[str, str]]:
            return {(each.verb, each.object.name) for each in asked if each.object.resource == "customresourcedefinitions"
                    and each.object.subresource == "status"}

        await team.wait(lambda: len(used(requests(of_before, USER)[since:])) >= 2, "both stand in the log")
        asked = requests(of_before, USER)[since:]
        assert [each.path for each in asked if each.answer.code in (401, 403)] == []
        assert used(asked) == {("patch", f"{plural}.xpyd.dev") for plural in PLURALS.values()}
        await team.wait_settled("1P2D", "beside")
        assert uids(team, "beside") == before

        # v1alpha1 may go from the CRD now, if somebody wants that one day; and its objects are there.
        assert (await show(team, "beside", OLD))["spec"]["router"]["placement"] == "Sidecar"
        await team.delete("beside")
        await team.wait(lambda: not [each for each in team.left() if "x-decode" not in each], "nothing is left")


async def test_an_operator_that_comes_before_its_crds_waits_for_them(
    of_before: LightCluster, operators: Operators, tmp_path: Path
) -> None:
    operator = await operators.start(older=True)
    async with make_team(of_before, "early", operator, version=OLD) as team:
        await team.apply(of_version(team, "beside"))
        await team.wait_settled("1P2D", "beside")
        before = uids(team, "beside")
        await operators.end()
        team.operator = operator = OperatorProcess(operators.login, tmp_path / "early.log", "--no-leader-election")
        operator.spawn()
        try:
            async def waits() -> bool:
                return "DisaggService" in await operator.said("/readyz")

            await eventually(waits, 120, "it says what it waits for")
            await asyncio.sleep(2)
            assert uids(team, "beside") == before
            await asyncio.to_thread(apply_crds, of_before)
            await operator.wait_ready()
            await team.apply(of_version(team, "beside", decode=3))
            await team.wait_settled("1P3D", "beside")
            assert before.items() <= uids(team, "beside").items()
        finally:
            await operator.stop()


BLOCK = "for kind in disaggservices disaggpools"


async def test_the_documented_commands_do_the_same(of_before: LightCluster, tmp_path: Path) -> None:
    """For an operator that looks after some namespaces, or without that right; there is none here at all."""
    page = (ROOT / "docs/operations.md").read_text()
    block = next(block for block in page.split("```")[1::2] if BLOCK in block)
    nobody = OperatorProcess(of_before.kubeconfig, tmp_path / "log")
    async with make_team(of_before, "commands", nobody, version=OLD) as team:
        await team.apply(of_version(team, "beside"))
        await asyncio.to_thread(apply_crds, of_before)
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "kubectl").symlink_to(of_before.kubectl.program)
        process = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", block, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={"PATH": f"{folder}:/usr/bin:/bin", "KUBECONFIG": str(of_before.kubeconfig), "HOME": str(tmp_path)})
        said, _ = await asyncio.wait_for(process.communicate(), 240)
        assert process.returncode == 0, said.decode()
        assert await in_store(of_before, "DisaggService") == {"beside": NEW}
        for kind in PLURALS:
            assert await held(team, kind) == [NEW]


async def test_git_may_hold_either_version(team: Team) -> None:
    """On the CRDs of now: applied by one version and then the other, by each way, and back; nothing restarts, no loops."""
    judge = Judge.found()
    for name, flags in (("beside", ()), ("apart", ("--server-side",))):
        await team.kubectl("apply", *flags, "-f", "-", stdin=text_of(team, name, OLD))
        await team.wait_settled(SHAPES[name], name)
        before = uids(team, name)
        generation = (await show(team, name, NEW))["metadata"]["generation"]
        for version in (OLD, NEW, OLD, NEW):
            text = text_of(team, name, version)
            await team.kubectl("apply", *flags, "-f", "-", stdin=text)
            assert await team.kubectl("diff", *flags, "-f", "-", stdin=text) == ""
            live = await show(team, name, version)
            assert live["metadata"]["generation"] == generation, "a version is no change"
            if judge is not None:
                said = judge.of(live, yaml.safe_load(text))
                assert (said.synced, said.flux) == (True, "Current"), said
            again = await team.kubectl("apply", *flags, "-f", "-", stdin=text)
            assert ("unchanged" in again) or ("serverside-applied" in again)
            after = await show(team, name, version)
            if after["status"] == live["status"]:  # else the operator has said something meanwhile
                assert after["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"], "nor a second apply"
        await team.wait_settled(SHAPES[name], name)
        assert uids(team, name) == before
    fields = (await show(team, "apart", NEW))["metadata"]["managedFields"]
    managers = [(each["operation"], each["apiVersion"]) for each in fields if each["manager"] == "kubectl"]
    assert managers == [("Apply", f"xpyd.dev/{NEW}")], "one applier, whatever version it was"


async def test_defaults_are_those_of_the_version_that_was_written(team: Team) -> None:
    for version, placement, mode in ((OLD, "Sidecar", "Off"), (NEW, "sidecar", "disabled")):
        document = team.document(f"in-{version}") | {"apiVersion": f"xpyd.dev/{version}"}
        await team.apply(document)
        for seen in (OLD, NEW):
            spec = (await show(team, f"in-{version}", seen))["spec"]
            assert (spec["router"]["placement"], spec["planner"]["mode"]) == (placement, mode)
        await team.wait_settled("1P1D", f"in-{version}")
    rows = (await team.kubectl("get", "dsvc")).splitlines()
    older = (await team.kubectl("get", "disaggservices.v1alpha1.xpyd.dev")).splitlines()
    assert rows[0].split() == older[0].split() == ["NAME", "MODEL", "WANTED", "SERVING", "READY", "REASON", "URL", "AGE"]
    assert [row.split()[:6] for row in rows] == [row.split()[:6] for row in older]
    described = await team.kubectl("describe", "dsvc", "in-v1alpha1")
    assert "API Version:  xpyd.dev/v1beta1" in described
