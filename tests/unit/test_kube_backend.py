"""One service over a store in memory: what is written, what is not, and how long a round takes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from kube_documents import pod
from memory_world import MemoryWorld

from xpyd_operator.errors import ServiceGone
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND
from xpyd_operator.kube.objects.blueprint import DocumentRefused
from xpyd_operator.kube.service.backend import KubeBackend
from xpyd_operator.loop import converge
from xpyd_operator.plan.actions import Drain, Label, Remove, Restart
from xpyd_operator.plan.observed import Phase
from xpyd_operator.plan.round import think
from xpyd_operator.render import labels
from xpyd_sidecar.contract.ids import InstanceName

NAME = InstanceName("qwen-e0")


@pytest.fixture
async def world() -> AsyncIterator[MemoryWorld]:
    async with aiohttp.ClientSession() as session:
        yield MemoryWorld(session)


async def settle(world: MemoryWorld) -> None:
    for _ in range(4):
        await world.round()
        world.run_pods()
        world.now += 6


async def test_everything_is_made_once_and_then_nothing_is_asked(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    assert world.named("Pod") == {"qwen-e0", "qwen-e1", "qwen-e2"}
    assert world.named("DisaggPool") == {"qwen-prefill", "qwen-decode"}
    assert [each for each in world.api.asked if each[0] == "dry-run"] == [
        ("dry-run", "Pod", "qwen-check-prefill"), ("dry-run", "Pod", "qwen-check-decode"),
        ("dry-run", "NetworkPolicy", "qwen-check"), ("dry-run", "NetworkPolicy", "qwen-clients-check")]
    world.api.asked.clear()
    done = await world.round()
    assert (world.api.asked, done.failures, done.plan.actions) == ([], (), ())


async def test_a_new_backend_over_what_is_there_only_sees_to_it_that_the_key_is_there(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    await world.round()
    world.restart()
    world.api.asked.clear()
    done = await world.round()
    name, = (at[2] for at in world.api.objects if at[0] == "Secret" and at[2] != "xpyd-master")
    assert world.api.asked == [("create", "Secret", name)]
    assert done.plan.actions == ()


async def test_drain_and_remove_delete_the_very_pod(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    world.api.asked.clear()
    await world.backend.apply(Drain(NAME, "why"))
    assert world.api.asked == [("delete", "Pod", "qwen-e0")]
    seen = await world.backend.observe(world.now)
    assert seen.instances[0].phase is Phase.STOPPING
    await world.backend.apply(Remove(NAME, "again"))
    assert len(world.api.asked) == 1


@pytest.mark.parametrize("owner", ["", "0", "~", "uid-of-another"])
async def test_a_pod_of_somebody_else_that_has_the_name_is_left_as_it_is(world: MemoryWorld, owner: str) -> None:
    """The watch does not show it: it has no label of ours."""
    references = [{"kind": "ReplicaSet", "name": "other", "uid": owner, "controller": True}] if owner else []
    theirs = world.api.put("Pod", {"metadata": {"name": "qwen-e0", "namespace": "team-a", "ownerReferences": references},
                                   "status": {"phase": "Running"}})
    world.write()
    await settle(world)
    assert world.api.objects["Pod", "team-a", "qwen-e0"] == theirs
    assert not [each for each in world.api.asked if each[0] in ("patch", "delete") and each[2] == "qwen-e0"]
    assert "qwen-e0 belongs to somebody else" in world.condition("Degraded")["message"]


async def test_a_pod_of_ours_that_has_lost_its_label_gets_it_back(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    body = world.api.objects["Pod", "team-a", "qwen-e0"]
    del body["metadata"]["labels"][labels.SERVICE]
    world.cache.on_deleted("Pod", body)
    await settle(world)
    assert world.api.objects["Pod", "team-a", "qwen-e0"]["metadata"]["labels"][labels.SERVICE] == "qwen"


@pytest.mark.parametrize("error", [ApiError(404, "NotFound", "gone"), ApiError(409, "Conflict", "other uid"),
                                   ApiError(422, "Invalid", "metadata.uid: Invalid value: it is immutable")])
async def test_what_has_gone_meanwhile_is_no_error(world: MemoryWorld, error: ApiError) -> None:
    world.write()
    await settle(world)
    world.api.fault = lambda verb, kind, name: error if kind == "Pod" else None
    await world.backend.apply(Label(NAME, roster=True, router=False))
    await world.backend.apply(Remove(NAME, "why"))


async def test_labels_come_and_go(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    await world.backend.apply(Label(NAME, roster=True, router=True))
    there = world.api.objects["Pod", "team-a", NAME]["metadata"]["labels"]
    assert (there[labels.ROSTER], there[labels.ROUTER]) == ("true", "true")
    await world.backend.apply(Label(NAME, roster=False, router=False))
    there = world.api.objects["Pod", "team-a", NAME]["metadata"]["labels"]
    assert labels.ROSTER not in there
    assert labels.ROUTER not in there


async def test_an_invalid_document_leaves_the_last_good_one_in_force(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    world.write(decode={"replicas": -1, "resources": {}})
    done = await world.round()
    assert (done.desired.shape, done.plan.actions) == ("1P2D", ())
    assert (world.condition("Valid")["status"], world.condition("Valid")["reason"]) == ("False", "Invalid")
    assert "spec.decode.replicas" in world.condition("Valid")["message"]
    world.write(decode={"replicas": 1, "resources": {}})
    await settle(world)
    assert world.condition("Valid")["status"] == "True"


async def test_nothing_is_made_of_a_document_that_never_was_good(world: MemoryWorld) -> None:
    world.write(decode={"replicas": -1, "resources": {}})
    with pytest.raises(DocumentRefused, match=r"spec\.decode\.replicas"):
        await world.round()
    await world.backend.close()
    assert (world.condition("Valid")["status"], world.condition("Ready")["status"]) == ("False", "False")
    assert {at[0] for at in world.api.objects} == {OWNER_KIND}


async def test_fields_of_a_newer_version_are_named_and_ignored(world: MemoryWorld) -> None:
    world.write(futureSection={"on": True})
    await settle(world)
    assert (world.condition("Valid")["status"], world.condition("Valid")["reason"]) == ("True", "UnknownFields")
    assert "spec.futureSection" in world.condition("Valid")["message"]
    assert world.named("Pod") == {"qwen-e0", "qwen-e1", "qwen-e2"}


async def test_a_status_is_about_the_document_that_was_acted_on(world: MemoryWorld) -> None:
    """A change in the middle of a round does not make it ready."""
    world.write()
    await settle(world)
    desired = await world.backend.desired_service()
    observed = await world.backend.observe(world.now)
    world.write(decode={"replicas": 3, "resources": {}})
    world.backend.report(think(desired, observed, world.now))
    await world.backend.close()
    status = world.api.objects[OWNER_KIND, "team-a", "qwen"]["status"]
    assert (status["observedGeneration"], status["wanted"]) == (1, "1P2D")
    await world.round()
    status = world.api.objects[OWNER_KIND, "team-a", "qwen"]["status"]
    assert (status["observedGeneration"], status["wanted"]) == (2, "1P3D")


async def test_a_status_that_cannot_be_read_does_not_make_the_document_wrong(world: MemoryWorld) -> None:
    world.write()
    body = world.api.objects[OWNER_KIND, "team-a", "qwen"]
    world.cache.on_seen(OWNER_KIND, world.api.put(OWNER_KIND, body | {"status": {"conditions": "newer", "wanted": 7}}))
    await settle(world)
    assert world.condition("Valid")["status"] == "True"


async def test_a_rejected_template_keeps_the_old_revision(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    refusal = ApiError(422, "Invalid", "Pod is invalid: spec.nodeName")
    world.api.fault = lambda verb, kind, name: refusal if verb == "dry-run" else None
    world.write(decode={"replicas": 2, "resources": {}, "template": {"metadata": {"annotations": {"a": "b"}}}})
    done = await world.round()
    assert done.plan.actions == ()
    assert world.condition("Valid")["reason"] == "TemplateRejected"
    assert "spec.nodeName" in world.condition("Valid")["message"]


UNKNOWN = ApiError(400, "BadRequest", 'strict decoding error: unknown field "spec.egress[3].port"')


async def test_policies_that_the_api_server_refuses_leave_the_last_good_document_in_force(world: MemoryWorld) -> None:
    world.api.fault = lambda verb, kind, name: UNKNOWN if (verb, kind) == ("dry-run", "NetworkPolicy") else None
    world.write(networkPolicy={"egress": [{"ports": [{"port": 8443}]}]})
    with pytest.raises(DocumentRefused, match=r"spec\.egress\[3\]\.port"):
        await world.round()
    await world.backend.close()
    assert world.condition("Valid")["reason"] == "TemplateRejected"
    assert "a NetworkPolicy of spec.networkPolicy: strict decoding error" in world.condition("Valid")["message"]
    assert {at[0] for at in world.api.objects} & {"Pod", "NetworkPolicy"} == set()
    world.api.fault = lambda verb, kind, name: None
    world.write()
    await settle(world)
    world.api.fault = lambda verb, kind, name: UNKNOWN if (verb, kind) == ("dry-run", "NetworkPolicy") else None
    world.write(decode={"replicas": 3, "resources": {}}, networkPolicy={"egress": [{"ports": [{"port": 8443}]}]})
    done = await world.round()
    assert (done.desired.shape, done.failures, done.postponed) == ("1P2D", (), ())
    assert world.condition("Valid")["reason"] == "TemplateRejected"


async def test_what_a_pod_waits_for_is_said_and_nothing_is_said_once_it_is_there(world: MemoryWorld) -> None:
    denied = ApiError(403, "Forbidden", "this team writes no policies")
    world.api.fault = lambda verb, kind, name: denied if (verb, name) == ("apply", "qwen-clients") else None
    world.write()
    done = await world.round()
    assert (world.named("Pod"), world.named("NetworkPolicy")) == (set(), {"qwen"})
    assert done.postponed == ("making instances waits: NetworkPolicy qwen-clients is not there yet",)
    assert world.condition("Progressing")["reason"] == "Waiting"
    assert done.postponed[0] in world.condition("Progressing")["message"]
    assert "this team writes no policies" in world.condition("Degraded")["message"]
    world.api.fault = lambda verb, kind, name: None
    await settle(world)
    assert world.named("Pod") == {"qwen-e0", "qwen-e1", "qwen-e2"}
    assert "NetworkPolicy" not in str([world.condition(kind) for kind in ("Progressing", "Degraded")])


async def test_a_policy_that_somebody_else_has_by_name_lets_no_pod_be_made(world: MemoryWorld) -> None:
    policy = {"metadata": {"name": "qwen", "namespace": "team-a"}, "spec": {"ingress": [{}]}}
    theirs = world.api.put("NetworkPolicy", policy)
    world.write()
    await settle(world)
    assert world.api.objects["NetworkPolicy", "team-a", "qwen"] == theirs
    assert world.named("Pod") == set()
    assert "NetworkPolicy qwen is somebody else's" in world.condition("Degraded")["message"]


APART = {"placement": "deployment"}


async def test_a_routers_template_that_is_rejected_keeps_the_old_routers(world: MemoryWorld) -> None:
    world.write(router=APART)
    await settle(world)
    before = world.api.objects["Deployment", "team-a", "qwen-router"]
    refusal = ApiError(403, "Forbidden", 'violates PodSecurity "restricted:latest"')
    world.api.fault = lambda verb, kind, name: refusal if (verb, name) == ("dry-run", "qwen-check-router") else None
    world.write(router=APART | {"template": {"spec": {"hostPID": True}}})
    await settle(world)
    assert world.condition("Valid")["reason"] == "TemplateRejected"
    assert "a pod of a router: violates PodSecurity" in world.condition("Valid")["message"]
    assert world.api.objects["Deployment", "team-a", "qwen-router"] == before


async def test_a_routers_template_is_tried_once_and_not_at_all_where_routers_have_it(world: MemoryWorld) -> None:
    world.write(router=APART | {"template": {"spec": {"priorityClassName": "high"}}})
    await settle(world)
    await settle(world)
    assert world.condition("Valid")["status"] == "True"
    assert [name for verb, _, name in world.api.asked if verb == "dry-run"].count("qwen-check-router") == 1
    spec = world.api.objects["Deployment", "team-a", "qwen-router"]["spec"]["template"]["spec"]
    assert spec["priorityClassName"] == "high"
    world.api.asked.clear()
    world.restart()
    await settle(world)
    assert [name for verb, _, name in world.api.asked if verb == "dry-run"] == []


async def test_routers_whose_image_cannot_be_pulled_are_in_the_conditions(world: MemoryWorld) -> None:
    world.write(router=APART)
    await settle(world)
    labels = world.api.objects["Deployment", "team-a", "qwen-router"]["spec"]["template"]["metadata"]["labels"]
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "pull access denied"}}
    container = {"name": "router", "image": "sidecar:1", "ready": False, "restartCount": 0, "state": waiting}
    world.cache.on_seen("Pod", world.api.put("Pod", {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "qwen-router-x", "namespace": "team-a", "uid": "router-x", "labels": labels},
        "status": {"phase": "Pending", "podIP": "10.0.0.9", "containerStatuses": [container]},
    }))
    await world.round()
    degraded, ready = world.condition("Degraded"), world.condition("Ready")
    assert (degraded["status"], degraded["reason"]) == ("True", "ImagePull")
    assert "pull access denied" in degraded["message"]
    assert "spec.router.template.spec.imagePullSecrets" in degraded["message"]
    assert (ready["status"], ready["reason"]) == ("False", "RouterNotReady")
    assert "pull access denied" in ready["message"]


async def test_what_the_routers_deployment_may_not_make_is_in_the_conditions(world: MemoryWorld) -> None:
    world.write(router=APART)
    await settle(world)
    body = world.api.objects["Deployment", "team-a", "qwen-router"]
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: small"}
    world.cache.on_seen("Deployment", world.api.put("Deployment", body | {"status": {"conditions": [failure]}}))
    await world.round()
    assert world.condition("Degraded")["reason"] == "RouterPodsRefused"
    assert world.condition("Ready")["reason"] == "NoRouter"
    assert all("exceeded quota: small" in world.condition(kind)["message"] for kind in ("Degraded", "Ready"))


async def test_a_quota_is_waited_for_without_a_storm(world: MemoryWorld) -> None:
    full = ApiError(403, "Forbidden", "exceeded quota: small")
    world.api.fault = lambda verb, kind, name: full if (verb, kind) == ("create", "Pod") else None
    world.write()
    done = await world.round()
    assert done.failures == ()
    assert "exceeded quota" in world.condition("Progressing")["message"]
    tries = len([each for each in world.api.asked if each[:2] == ("create", "Pod")])
    world.now += 1
    await world.round()
    assert len([each for each in world.api.asked if each[:2] == ("create", "Pod")]) == tries
    world.api.fault = lambda verb, kind, name: None
    world.now += 120
    await settle(world)
    assert world.named("Pod") == {"qwen-e0", "qwen-e1", "qwen-e2"}
    assert "quota" not in str(world.condition("Progressing"))


async def test_other_refusals_are_failures_that_the_status_names(world: MemoryWorld) -> None:
    denied = ApiError(403, "Forbidden", "webhook says no")
    world.api.fault = lambda verb, kind, name: denied if (verb, kind) == ("create", "Pod") else None
    world.write()
    done = await world.round()
    assert len(done.failures) == 3
    assert "webhook says no" in world.condition("Degraded")["message"]


async def test_somebody_elses_objects_are_left_alone(world: MemoryWorld) -> None:
    theirs = {"metadata": {"name": "qwen", "namespace": "team-a"}, "spec": {"ports": []}}
    world.api.put("Service", theirs)
    world.api.put("Pod", {"metadata": {"name": "qwen-e0", "namespace": "team-a"}})
    world.cache.on_seen("Pod", world.api.put("Pod", pod(1, owner="another")))
    world.write()
    await settle(world)
    await world.round()
    assert world.api.objects["Service", "team-a", "qwen"]["spec"] == {"ports": []}
    assert "Service qwen" in world.condition("Degraded")["message"]
    assert {"qwen-e2", "qwen-e3", "qwen-e4"} <= world.named("Pod")
    assert not any(verb in ("apply", "patch", "delete") and name in ("qwen", "qwen-e0", "qwen-e1")
                   for verb, kind, name in world.api.asked if kind in ("Service", "Pod"))


async def test_a_service_that_ends_gets_no_writes(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    body = world.api.objects[OWNER_KIND, "team-a", "qwen"]
    body["metadata"] = body["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "999999"}
    world.cache.on_seen(OWNER_KIND, body)
    world.api.asked.clear()
    with pytest.raises(ServiceGone):
        await world.backend.desired_service()
    for action in (Remove(NAME, "x"), Label(NAME, roster=True, router=True)):
        with pytest.raises(ServiceGone):
            await world.backend.apply(action)
    assert world.api.asked == []


async def test_pods_are_not_restarted_in_parts(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    with pytest.raises(Exception, match="pods know no such thing"):
        await world.backend.apply(Restart(NAME, "engine", "x"))


async def test_a_round_over_a_thousand_pods_is_fast(world: MemoryWorld) -> None:
    world.write(prefill={"replicas": 300, "resources": {}}, decode={"replicas": 700, "resources": {}})
    await world.round()
    world.run_pods()
    for _ in range(3):
        world.now += 6
        await world.round()
    assert len(world.named("Pod")) == 1000
    world.api.asked.clear()
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        done = await converge(world.backend, world.now, last=None)
        best = min(best, time.process_time() - started)
    assert (world.api.asked, done.plan.actions, len(done.observed.instances)) == ([], (), 1000)
    print(f"a round over 1,000 pods: {best * 1000:.1f} ms")
    assert best < 0.2


CORES: dict[str, Any] = {"requests": {"cpu": 2, "memory": "4Gi"}}


def gpus(world: MemoryWorld) -> dict[str, Any]:
    """What the containers of the engines ask for."""
    pods = {at[2]: body for at, body in world.api.objects.items() if at[0] == "Pod"}
    return {name: body["spec"]["containers"][0]["resources"].get("limits", {}).get("nvidia.com/gpu")
            for name, body in sorted(pods.items())}


def upgraded(world: MemoryWorld, **spec: Any) -> None:
    """The service, written anew, under another operator."""
    world.write(**spec)
    entry = world.cache.get(OWNER_KIND, "team-a", "qwen")
    assert entry is not None
    world.backend = KubeBackend(world.shared, entry)
    world.api.asked.clear()


async def test_a_service_with_devices_is_upgraded_without_a_restart(world: MemoryWorld) -> None:
    spec = {"prefill": {"replicas": 1}, "decode": {"replicas": 1, "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 4}}}}
    world.write(**spec)
    await settle(world)
    upgraded(world, **spec)
    done = await world.round()
    assert (done.plan.actions, gpus(world)) == ((), {"qwen-e0": 1, "qwen-e1": 1})
    assert world.condition("Valid")["reason"] == "Valid"


async def test_a_new_service_and_a_changed_one_get_the_device_beside_their_resources(world: MemoryWorld) -> None:
    made = {"resources": CORES, "parallelism": {"device": "none"}}
    world.write(prefill={"replicas": 1}, decode={"replicas": 1, **made})
    await settle(world)
    before = gpus(world)
    upgraded(world, prefill={"replicas": 1}, decode={"replicas": 1, "resources": {"requests": {"cpu": 3}}})
    await world.round()
    assert {name: count for name, count in gpus(world).items() if name not in before} == {"qwen-e2": 1}
    assert world.condition("Valid")["reason"] == "Valid"


def newly_refused(*found: tuple[str, str]) -> Any:
    """What a later version has against documents that this one takes."""
    return lambda service: iter(found)


async def test_a_service_that_runs_is_followed_on_whatever_a_later_operator_has_against_it(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    world.write(**spec)
    await settle(world)
    upgraded(world, **spec)
    await settle(world)  # of the generation that this operator knows
    entry = world.cache.get(OWNER_KIND, "team-a", "qwen")
    assert entry is not None
    monkeypatch.setattr("xpyd_operator.render.judge.kube_refusals", newly_refused(("spec.decode", "not any more")))
    world.backend = KubeBackend(world.shared, entry)
    done = await world.round()
    assert (done.plan.actions, done.failures) == ((), ())
    valid = world.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("True", "AcceptedBefore")
    assert valid["message"].endswith("new ones like it are refused: spec.decode: not any more")
    world.backend = KubeBackend(world.shared, world.cache.get(OWNER_KIND, "team-a", "qwen"))  # type: ignore[arg-type]
    for kind, namespace, name in [at for at in world.api.objects if at == ("Pod", "team-a", "qwen-e1")]:
        world.cache.on_deleted(kind, world.api.objects.pop((kind, namespace, name)))
    await settle(world)
    assert world.named("Pod") == {"qwen-e0", "qwen-e1"}, "and it is cared for, after another start, too"
    world.write(**spec, rollout={"maxSurge": 2})
    await world.round()
    valid = world.condition("Valid")
    assert (valid["status"], valid["reason"], valid["message"]) == ("False", "Unsupported", "spec.decode: not any more")
    assert world.named("Pod") == {"qwen-e0", "qwen-e1"}, "the one before goes on"


async def test_counts_that_do_not_fit_any_more_stop_no_service(world: MemoryWorld) -> None:
    """A rule of the API that came later; the operator that accepted the document knew nothing of it."""
    four = {"parallelism": {"tensor": 4}, "resources": {"limits": {"amd.com/gpu": 2}}}
    world.write(prefill={"replicas": 1}, decode={"replicas": 1, **four})
    with pytest.raises(DocumentRefused, match="must be 4, not 2"):
        await world.round()
    await world.backend.close()
    assert (world.condition("Valid")["reason"], world.named("Pod")) == ("Invalid", set())
    body = world.api.objects[OWNER_KIND, "team-a", "qwen"]
    for condition in body["status"]["conditions"]:
        condition["status"] = "True" if condition["type"] == "Valid" else condition["status"]
    world.cache.on_seen(OWNER_KIND, world.api.put(OWNER_KIND, body))
    world.backend = KubeBackend(world.shared, world.cache.get(OWNER_KIND, "team-a", "qwen"))  # type: ignore[arg-type]
    await settle(world)
    assert world.named("Pod") == {"qwen-e0", "qwen-e1"}
    valid = world.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("True", "AcceptedBefore")
    assert 'spec.decode.resources.limits["amd.com/gpu"]: must be 4, not 2' in valid["message"]


async def test_an_address_that_its_own_policy_cuts_off_is_an_event_of_its_own_kind(world: MemoryWorld) -> None:
    world.write(engine={"env": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}]})
    await settle(world)
    await world.events.flush()
    told = {body["reason"]: body["message"] for at, body in world.api.objects.items()
            if at[0] == "Event" and body["reason"] in ("AddressCutOff", "EngineWouldRefuse")}
    assert told.keys() == {"AddressCutOff"}
    assert told["AddressCutOff"].startswith("spec.engine.env[0].value: HTTPS_PROXY goes to port 3128 of proxy.example")


async def test_what_engines_would_not_start_with_is_an_event_once(world: MemoryWorld) -> None:
    def told() -> list[str]:
        return [body["message"] for at, body in world.api.objects.items()
                if at[0] == "Event" and body["reason"] == "EngineWouldRefuse"]

    world.write(decode={"replicas": 1, "args": ["--tokens-only"]})
    await settle(world)
    await world.events.flush()
    (words,) = told()
    assert words.startswith("spec.decode.args[0]: --tokens-only: an engine with it has no tokenizer")
    assert words.endswith("(vLLM 0.32)")
    assert world.condition("Valid")["status"] == "True"
    assert len(world.named("Pod")) == 2, "it is followed all the same"
    world.write(decode={"replicas": 1})
    await settle(world)
    await world.events.flush()
    assert told() == [words]
