"""Why a pod is not ready: one value that says whether it waits or is broken, names the container, and says what to do."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from xpyd_operator.kube.podstate.absent import absent
from xpyd_operator.kube.podstate.podstatus import unix
from xpyd_operator.plan.absent import Breakage, Waiting

NOW = 1_800_000_000.0
Body = dict[str, Any]


def text(ago_s: float) -> str:
    return datetime.fromtimestamp(NOW - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def container(name: str = "main", *, ready: bool = False, started: bool = False, restarts: int = 0,
              state: Body | None = None, last: Body | None = None) -> Body:
    found: Body = {"name": name, "image": "vllm:1", "ready": ready, "started": started, "restartCount": restarts,
                   "state": state or {"running": {"startedAt": text(30)}}}
    if last is not None:
        found["lastState"] = {"terminated": last}
    return found


def waiting(reason: str, message: str = "") -> Body:
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def ended(code: int = 1, reason: str = "Error", message: str = "", ran_s: float = 20) -> Body:
    return {"exitCode": code, "reason": reason, "message": message, "startedAt": text(ran_s + 10), "finishedAt": text(10)}


SIDECAR_UP = container("sidecar", ready=True, started=True)
INSTALLED = container("xpyd-install", ready=True, state={"terminated": {"exitCode": 0, "reason": "Completed"}})


def pod(*containers: Body, init: tuple[Body, ...] = (INSTALLED, SIDECAR_UP), phase: str = "Running", age_s: float = 100,
        ready: str = "False", unready_s: float = 10, **status: Any) -> Body:
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": text(age_s)},
                  {"type": "Ready", "status": ready, "lastTransitionTime": text(unready_s)}]
    probe = {"periodSeconds": 10, "failureThreshold": 60}
    return {
        "metadata": {"name": "qwen-e1", "creationTimestamp": text(age_s)},
        "spec": {"containers": [{"name": "main", "startupProbe": probe}]},
        "status": {"phase": phase, "conditions": conditions, "containerStatuses": list(containers),
                   "initContainerStatuses": list(init)} | status,
    }


def said_ready(reason: str, **gates: str) -> Body:
    """The kubelet called its containers ready, and the pod is not."""
    why = {"reason": reason} if reason else {}
    conditions = [{"type": "ContainersReady", "status": "True", "lastTransitionTime": text(90)},
                  {"type": "Ready", "status": "False", "lastTransitionTime": text(10), **why},
                  *({"type": f"example.com/{name}", "status": each} for name, each in gates.items())]
    return pod(container(started=True, ready=True), conditions=conditions)


def stuck(reason: str, message: str = "", **more: Any) -> Body:
    return pod(container(state=waiting(reason, message)), **more)


def loops(restarts: int, last: Body, name: str = "main") -> Body:
    return container(name, restarts=restarts, state=waiting("CrashLoopBackOff"), last=last)


def unplaced(age_s: float, reason: str = "Unschedulable", message: str = "") -> Body:
    conditions = [{"type": "PodScheduled", "status": "False", "reason": reason, "lastTransitionTime": text(age_s),
                   "message": message or "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]
    return pod(phase="Pending", conditions=conditions, age_s=age_s, init=())


TOLD = """Traceback (most recent call last):
  File "api_server.py", line 59, in <module>
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked
  warnings.warn('resource_tracker: There appear to be %d '
"""
def gated(age_s: float, *gates: str, queue: str = "") -> Body:
    made = unplaced(age_s, "SchedulingGated")
    made["spec"]["schedulingGates"] = [{"name": gate} for gate in gates]
    made["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    return made


LOG = "Traceback (most recent call last):\n  File x\nRuntimeError: CUDA out of luck\n\n"
UP = container(ready=True, started=True)
STARTS_LATE = container(started=True, state={"running": {"startedAt": text(600)}})
CASES: dict[str, tuple[Body, str | None, bool | None, tuple[str, ...]]] = {
    "ready": (pod(container(ready=True, started=True), ready="True"), None, None, ()),
    "starting": (pod(container()), "Starting", False, ("container main", "600 s")),
    "starting for too long": (pod(container(state={"running": {"startedAt": text(661)}})), "Starting", True, ()),
    "just made": ({"metadata": {"name": "qwen-e1", "creationTimestamp": text(1)}}, "Scheduling", False, ()),
    "being made": (stuck("ContainerCreating"), "Creating", False, ("container main", "describe pod qwen-e1")),
    "made for long": (
        stuck("ContainerCreating", age_s=1799), "Creating", False, ("describe pod qwen-e1",)),
    "not made at all": (
        stuck("ContainerCreating", age_s=1801), "Creating", True, ("describe pod qwen-e1",)),
    "fetches for an hour": (stuck("PodInitializing", age_s=3700, init=(
        container("fetch", started=True, state={"running": {"startedAt": text(1700)}}),)),
        "Initializing", False, ("init container fetch", "runs since", "logs qwen-e1 -c fetch")),
    "fetches for too long": (stuck("PodInitializing", init=(
        container("fetch", started=True, state={"running": {"startedAt": text(1801)}}),)), "Initializing", True, ()),
    "an extra container crashes": (
        pod(UP, loops(14, ended(1, message="no fluent.conf"), "fluentbit")), "CrashLoop", True,
        ("container fluentbit", "14 times", "no fluent.conf", "-c fluentbit")),
    "an extra container is not ready": (
        pod(UP, container("proxy", started=True, state={"running": {"startedAt": text(600)}}),
            unready_s=600), "ContainerNotReady", False, ("container proxy", "-c proxy")),
    "an extra container is never ready": (
        pod(UP, container("proxy", started=True, state={"running": {"startedAt": text(1801)}}),
            unready_s=1801), "ContainerNotReady", True, ("container proxy",)),
    "unschedulable": (unplaced(360), "Unschedulable", False, ("3 Insufficient nvidia.com/gpu", "add nodes")),
    "unschedulable for too long": (unplaced(1801), "Unschedulable", True, ("qwen-e1",)),
    "claim missing": (unplaced(5, message='0/3 nodes are available: persistentvolumeclaim "w" not found.'),
                      "VolumeMissing", True, ('persistentvolumeclaim "w" not found', "create it")),
    "gated": (gated(5, "kueue.x-k8s.io/admission", queue="team-a"), "Queued", False,
              ("qwen-e1 waits to be admitted", "gate kueue.x-k8s.io/admission, queue team-a")),
    "just admitted": (gated(3600), "Scheduling", True, ()),
    "admitted a moment ago": (gated(36), "Scheduling", False, ()),
    "gated for a day": (gated(86_400, "example.com/quota", "example.com/licence"), "Queued", False,
                        ("(gate example.com/quota, example.com/licence)",)),
    "image pull": (stuck("ImagePullBackOff", 'Back-off pulling image "vllm:1": not found'), "ImagePull",
                   True, ("vllm:1", "not found", "imagePullSecrets")),
    "image pull, first try": (stuck("ErrImagePull", "timeout", age_s=30), "ImagePull", False, ("timeout",)),
    "image pull, tried again": (stuck("ErrImagePull", "timeout", age_s=400), "ImagePull", True, ("timeout",)),
    "image name": (stuck("InvalidImageName"), "ImagePull", True, ("correct the image",)),
    "image of the installer": (stuck("PodInitializing", phase="Pending",
                                   init=(container("xpyd-install", state=waiting("ImagePullBackOff")),)),
                               "ImagePull", True, ("container xpyd-install",)),
    "secret missing": (
        stuck("CreateContainerConfigError", 'secret "hub" not found'), "SecretMissing", True,
                       ('secret "hub" not found', "create what is missing")),
    "secret key missing": (stuck("CreateContainerConfigError",
                                                       "couldn't find key token in Secret default/hub"),
                           "SecretMissing", True, ("token",)),
    "config": (stuck("CreateContainerConfigError", 'configmap "c" not found'), "ConfigError", True, ()),
    "cannot start": (stuck("RunContainerError", "no such device"), "ContainerError", True,
                     ("no such device",)),
    "init fails": (stuck("PodInitializing", init=(
        loops(4, ended(2, message="no space left\n"), "copy"),)),
        "InitFailed", True, ("init container copy", "exit code 2", "no space left", "logs qwen-e1 -c copy")),
    "init fails once": (stuck("PodInitializing", init=(
        container("copy", state={"terminated": ended(2)}),)), "InitFailed", False, ()),
    "crash loop": (pod(loops(5, ended(1, message=LOG))), "CrashLoop", True,
                   ("5 times", "exit code 1", "RuntimeError: CUDA out of luck", "--previous")),
    "first crash": (pod(container(state={"terminated": ended(1, message=LOG)})), "CrashLoop", False, ("once",)),
    "starts again": (pod(container(restarts=1, last=ended(1, message=LOG))), "CrashLoop", False, ("CUDA out of luck",)),
    "told of by another process": (
        pod(container(restarts=1, last=ended(1, message=f"    raise e\nValueError: no such cache\n{TOLD}"))),
        "CrashLoop", False, ("exit code 1: ValueError: no such cache;",)),
    "what the engine left": (
        pod(container(restarts=1, last=ended(1, message="torch.OutOfMemoryError: CUDA out of memory"))), "CrashLoop", False,
        ("exit code 1: torch.OutOfMemoryError: CUDA out of memory;",)),
    "signal": (pod(loops(3, ended(139) | {"signal": 11})), "CrashLoop", True,
               ("signal 11",)),
    "out of memory": (pod(loops(3, ended(137, "OOMKilled"))), "OutOfMemory",
                      True, ("killed for memory 3 times", "resources.limits.memory")),
    "startup": (
        pod(container(restarts=1, last=ended(137, ran_s=605))), "StartupTimeout", True, ("600 s", "startupTimeout")),
    "killed early": (pod(container(restarts=1, last=ended(137, ran_s=100))), "CrashLoop", False, ()),
    "sidecar crashes": (pod(container(), init=(INSTALLED, loops(3, ended(1, message="bad config"), "sidecar"))),
                        "SidecarCrash", True, ("container sidecar", "bad config")),
    "hangs": (pod(STARTS_LATE, unready_s=90), "EngineNotReady", True, ("health check",)),
    "hangs for a moment": (pod(STARTS_LATE, unready_s=5), "EngineNotReady", False, ()),
    "sidecar not ready": (pod(container(ready=True, started=True), unready_s=90, init=(
        INSTALLED, container("sidecar", started=True, state={"running": {"startedAt": text(600)}}))),
        "SidecarNotReady", True, ("roster", "-c sidecar")),
    "not told why": (pod(container(ready=True, started=True), unready_s=90), "PodNotReady", True, ("containers of pod",)),
    "evicted": (pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."), "Evicted", False,
                ("low on resource", "replaced")),
    "failed": (pod(phase="Failed"), "Failed", False, ("qwen-e1",)),
    "completed": (pod(phase="Succeeded"), "Failed", False, ("Succeeded",)),
    "node shut down": (pod(phase="Failed", reason="Terminated", message="node shutdown"), "Failed", False,
                       ("Terminated: node shutdown",)),
    "not admitted": (pod(phase="Failed", reason="UnexpectedAdmissionError", message="no device"), "Failed", False,
                     ("no device",)),
    "node away": (said_ready(""), "NodeLost", True, ("kubectl get nodes",)),
    "a gate": (said_ready("ReadinessGatesNotReady", gate="False"), "GateNotReady", False, ("waits for example.com/gate",)),
}


@pytest.mark.parametrize("case", CASES)
def test_cause(case: str) -> None:
    body, reason, person, words = CASES[case]
    found = absent(body, NOW)
    assert (found.reason if found else None) == reason
    if found is not None:
        assert person is None or found.person is person
        assert "qwen-e1" in found.message
        for word in words:
            assert word in found.message, found.message


@pytest.mark.parametrize("case", CASES)
def test_the_words_do_not_change_by_themselves(case: str) -> None:
    """Else the status would be written again and again."""
    body = CASES[case][0]
    at, later = absent(body, NOW + 402), absent(body, NOW + 407)
    assert at == later


def test_readiness_gates_are_named() -> None:
    body = pod(container(ready=True, started=True), unready_s=90)
    body["status"]["conditions"].append({"type": "example.com/ready", "status": "False"})
    found = absent(body, NOW)
    assert found is not None
    assert (found.reason, "example.com/ready" in found.message) == ("GateNotReady", True)


@pytest.mark.parametrize(("written", "expected"), [
    (None, 0.0), ("", 0.0), ("yesterday", 0.0), ("1970-01-01T00:01:00Z", 60.0), ("1970-01-01T00:01:00.5Z", 60.5)])
def test_times(written: str | None, expected: float) -> None:
    assert unix(written) == expected


def of_router(body: Body) -> Body:
    """The same pod, as one of a router: one container, by that name, and the label."""
    metadata = body["metadata"] | {"name": "qwen-router-x", "labels": {"app.kubernetes.io/component": "router"}}
    status = body["status"] | {"initContainerStatuses": []}
    status["containerStatuses"] = [each | {"name": "router"} for each in status["containerStatuses"]]
    probe = {"periodSeconds": 1, "failureThreshold": 60}
    return {"metadata": metadata, "spec": {"containers": [{"name": "router", "startupProbe": probe}]}, "status": status}


@pytest.mark.parametrize(("case", "reason", "words"), [
    ("image pull", "ImagePull", "spec.router.template.spec.imagePullSecrets"),
    ("unschedulable", "Unschedulable", "spec.router.template"),
    ("crash loop", "CrashLoop", "kubectl logs qwen-router-x -c router --previous"),
    ("out of memory", "OutOfMemory", "spec.router.resources.limits.memory"),
    ("startup", "StartupTimeout", "the router of pod qwen-router-x was not up within 60 s"),
    ("secret missing", "SecretMissing", "create what is missing"),
    ("not made at all", "Creating", "describe pod qwen-router-x"),
    ("hangs", "RouterNotReady", "once it knows the roster"),
    ("ready", None, ""),
])
def test_a_router_in_a_pod_of_its_own_has_words_of_its_own(case: str, reason: str | None, words: str) -> None:
    found = absent(of_router(CASES[case][0]), NOW)
    assert (found.reason if found else None) == reason
    if found is not None:
        assert words in found.message
        assert "engine" not in found.message
    if case == "hangs":
        assert isinstance(found, Waiting)
        assert found.until == 0.0, "nobody decodes, perhaps for long"


@pytest.mark.parametrize(("ports", "words"), [([{"name": "http"}], "spec.router.resources.limits.memory"),
                                              ([], "template.spec.initContainers, sidecar: resources.limits.memory")])
def test_a_sidecar_that_is_killed_for_memory_is_a_router_or_an_agent_alone(ports: list[Body], words: str) -> None:
    body = pod(container(), init=(INSTALLED, loops(3, ended(137, "OOMKilled"), "sidecar")))
    body["spec"]["initContainers"] = [{"name": "xpyd-install"}, {"name": "sidecar", "ports": ports}]
    found = absent(body, NOW)
    assert found is not None
    assert (found.reason, words in found.message) == ("OutOfMemory", True)


@pytest.mark.parametrize(("message", "told"), [
    ("0/3 nodes are available: 3 node(s) didn't match pod affinity rules.", True),
    ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", False),
])
def test_a_topology_that_no_node_has_is_named_where_the_scheduler_speaks_of_affinity(message: str, told: bool) -> None:
    body = unplaced(70)
    body["status"]["conditions"][0]["message"] = message
    term = {"labelSelector": {"matchExpressions": [{"key": "xpyd.dev/instance", "operator": "In", "values": ["qwen-e1"]}]},
            "topologyKey": "example.com/rack"}
    body["spec"]["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    found = absent(body, NOW)
    assert found is not None
    assert found.reason == "Unschedulable"
    assert ("engine.topology is example.com/rack: kubectl get nodes -L example.com/rack" in found.message) == told
    body["spec"]["affinity"] = {"podAffinity": {}}
    assert "topology" not in getattr(absent(body, NOW), "message", "")


STATES: dict[str, Body] = {
    "made": waiting("ContainerCreating"), "after": waiting("PodInitializing"),
    "pulled": waiting("ImagePullBackOff", "not found"),
    "config": waiting("CreateContainerConfigError", 'secret "s" not found'), "odd": waiting("SomethingNew"), "none": {},
    "loops": waiting("CrashLoopBackOff"), "runs": {"running": {"startedAt": text(50)}},
    "long": {"running": {"startedAt": text(5000)}}, "ended": {"terminated": ended(1)}, "well": {"terminated": ended(0)},
    "odd times": {"running": {}},
}


def generated(random: Random) -> Body:
    """A pod that some kubelet, scheduler or admission could leave behind: any container in any state."""
    chosen = random.sample(["copy", "warm", "proxy"], random.randint(0, 2))
    inits = [(name, random.choice(["Always", None])) for name in chosen]
    inits += [("sidecar", "Always")] if random.random() < 0.8 else []
    names = ["main", *random.sample(["fluentbit", "vault"], random.randint(0, 2))]

    def one(name: str) -> Body:
        last = random.choice([None, None, ended(1), ended(137, "OOMKilled"), ended(143, ran_s=700), {}])
        made = container(name, ready=random.random() < 0.5, started=random.random() < 0.6,
                         restarts=random.choice([0, 1, 14]), state=random.choice(list(STATES.values())), last=last)
        return {key: each for key, each in made.items() if key in ("name", "image") or random.random() < 0.95}

    conditions = [{"type": kind, "status": random.choice(["True", "False", "Unknown"]),
                   "reason": random.choice(["", "Because"]), "lastTransitionTime": text(random.choice([5, 100, 9000]))}
                  for kind in ("Ready", "ContainersReady", "PodScheduled", "example.com/gate") if random.random() < 0.8]
    status: Body = {"conditions": conditions, "phase": random.choice(["Pending", "Running", "Running", "Failed"])}
    for field, those in (("initContainerStatuses", [name for name, _ in inits]), ("containerStatuses", names)):
        if random.random() < 0.9:
            status[field] = [one(name) for name in those if random.random() < 0.95]
    native = [{"name": name, **({"restartPolicy": again} if again else {})} for name, again in inits]
    spec: Body = {"containers": [{"name": name} for name in names], "initContainers": native}
    if random.random() < 0.05:
        spec["schedulingGates"] = [{"name": "example.com/gate"}]
    labels = {"app.kubernetes.io/component": "router"} if random.random() < 0.2 else {}
    created = {"creationTimestamp": text(9000)} if random.random() < 0.9 else {}
    made = {"metadata": {"name": random.choice(["qwen-e1", "qwen-e1-2"]), "labels": labels, **created}, "spec": spec}
    return made | ({"status": status} if random.random() < 0.97 else {})


SHORT = text(30)
"""When what ran for 20 s began."""


def again_and_again(told: Body) -> bool:
    """It crashed 14 times, each time soon, and waits for the next."""
    waits = (told.get("state") or {}).get("waiting") or {}
    last = (told.get("lastState") or {}).get("terminated") or {}
    return told.get("restartCount") == 14 and waits.get("reason") == "CrashLoopBackOff" and last.get("startedAt") == SHORT


def up(body: Body, name: str) -> bool:
    """As the kubelet's words mean it, written anew here."""
    status = body.get("status") or {}
    spec = {each["name"]: each for each in body["spec"]["initContainers"]}
    init = name in spec and name != "sidecar" and spec[name].get("restartPolicy") != "Always"
    statuses = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    said = next((each for each in statuses if each["name"] == name), {})
    state = said.get("state") or {}
    if init:
        return state.get("terminated", {"exitCode": 1}).get("exitCode") == 0
    return "running" in state and bool(said.get("ready"))


@pytest.mark.parametrize("seed", range(20))
def test_a_pod_that_is_not_ready_always_has_a_reason_that_names_a_container_which_is_not_up(seed: int) -> None:
    random = Random(seed)
    named = 0
    for _ in range(500):
        body = generated(random)
        status = body.get("status") or {}
        said = {each["type"]: each["status"] for each in status.get("conditions", ())}
        found = absent(body, NOW)
        if status.get("phase") != "Failed" and said.get("Ready") == "True":
            assert found is None
            continue
        assert isinstance(found, Waiting | Breakage), body
        assert body["metadata"]["name"] in found.message
        assert found.reason.isidentifier()
        names = [each["name"] for each in (*body["spec"]["initContainers"], *body["spec"]["containers"])]
        down = [name for name in names if not up(body, name)]
        if found.of:
            named += 1
            assert found.of in down, body
            assert found.of in found.message
        elif down:
            whole = {"Evicted", "Failed", "Queued", "Unschedulable", "Scheduling", "NodeLost"}
            assert found.reason in whole, (found, body)
            nowhere = status.get("phase") == "Failed" or said.get("PodScheduled") != "True"
            assert nowhere or found.reason in ("NodeLost", "Queued")
        if found.of and any(map(again_and_again, status.get("containerStatuses", ()))):
            assert isinstance(found, Breakage), "who crashes again and again is not passed over"
    assert named > 100
