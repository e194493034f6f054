"""What a pod's status says is wrong with it: one word, and a sentence that names the pod and what to do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from xpyd_operator.kube.problems import problem, unix

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


def unplaced(age_s: float, reason: str = "Unschedulable") -> Body:
    conditions = [{"type": "PodScheduled", "status": "False", "reason": reason, "lastTransitionTime": text(age_s),
                   "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]
    return pod(phase="Pending", conditions=conditions, age_s=age_s)


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
CASES: dict[str, tuple[Body, str | None, bool | None, tuple[str, ...]]] = {
    "ready": (pod(container(ready=True, started=True), ready="True"), None, None, ()),
    "starting": (pod(container()), None, None, ()),
    "just made": ({"metadata": {"name": "qwen-e1", "creationTimestamp": text(1)}}, None, None, ()),
    "being made": (stuck("ContainerCreating"), None, None, ()),
    "made for long": (
        stuck("PodInitializing", age_s=400), "NotStarted", False, ("describe pod qwen-e1",)),
    "not made at all": (
        stuck("ContainerCreating", age_s=1000), "NotStarted", True, ("describe pod qwen-e1",)),
    "unschedulable": (unplaced(70), "Unschedulable", True, ("3 Insufficient nvidia.com/gpu", "add nodes")),
    "unschedulable for a moment": (unplaced(5), "Unschedulable", False, ("qwen-e1",)),
    "gated": (gated(5, "kueue.x-k8s.io/admission", queue="team-a"), "Queued", False,
              ("qwen-e1 waits to be admitted", "gate kueue.x-k8s.io/admission, queue team-a")),
    "just admitted": (gated(3600), None, None, ()),
    "gated for a day": (gated(86_400, "example.com/quota", "example.com/licence"), "Queued", False,
                        ("(gate example.com/quota, example.com/licence)",)),
    "image pull": (stuck("ImagePullBackOff", 'Back-off pulling image "vllm:1": not found'), "ImagePull",
                   True, ("vllm:1", "not found", "imagePullSecrets")),
    "image pull, first try": (stuck("ErrImagePull", "timeout"), "ImagePull", False, ("timeout",)),
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
    "hangs": (pod(container(started=True), unready_s=90), "EngineNotReady", True, ("health check",)),
    "hangs for a moment": (pod(container(started=True), unready_s=5), "EngineNotReady", False, ()),
    "sidecar not ready": (pod(container(ready=True, started=True), unready_s=90, init=(
        INSTALLED, container("sidecar", started=True))), "SidecarNotReady", True, ("roster", "-c sidecar")),
    "not told why": (pod(container(ready=True, started=True), unready_s=90), None, None, ()),
    "evicted": (pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."), "Evicted", True,
                ("low on resource", "replaced")),
    "failed": (pod(phase="Failed"), "Failed", True, ("qwen-e1",)),
    "completed": (pod(phase="Succeeded"), "Failed", True, ("Succeeded",)),
    "node shut down": (pod(phase="Failed", reason="Terminated", message="node shutdown"), "Failed", True,
                       ("Terminated: node shutdown",)),
    "not admitted": (pod(phase="Failed", reason="UnexpectedAdmissionError", message="no device"), "Failed", True,
                     ("no device",)),
    "node away": (said_ready(""), "NodeLost", True, ("kubectl get nodes",)),
    "a gate": (said_ready("ReadinessGatesNotReady", gate="False"), "GateNotReady", False, ("waits for example.com/gate",)),
}


@pytest.mark.parametrize("case", CASES)
def test_cause(case: str) -> None:
    body, reason, lasting, words = CASES[case]
    found = problem(body, NOW)
    assert (found.reason if found else None) == reason
    if found is not None:
        assert lasting is None or found.lasting is lasting
        assert "qwen-e1" in found.message
        for word in words:
            assert word in found.message, found.message


@pytest.mark.parametrize("case", CASES)
def test_the_words_do_not_change_by_themselves(case: str) -> None:
    """Else the status would be written again and again."""
    body = CASES[case][0]
    at, later = problem(body, NOW + 400), problem(body, NOW + 405)
    assert at == later


def test_readiness_gates_are_named() -> None:
    body = pod(container(ready=True, started=True), unready_s=90)
    body["status"]["conditions"].append({"type": "example.com/ready", "status": "False"})
    found = problem(body, NOW)
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
    ("not made at all", "NotStarted", "describe pod qwen-router-x"),
    ("hangs", None, ""),
    ("ready", None, ""),
])
def test_a_router_in_a_pod_of_its_own_has_words_of_its_own(case: str, reason: str | None, words: str) -> None:
    found = problem(of_router(CASES[case][0]), NOW)
    assert (found.reason if found else None) == reason
    if found is not None:
        assert words in found.message
        assert "engine" not in found.message


@pytest.mark.parametrize(("ports", "words"), [([{"name": "http"}], "spec.router.resources.limits.memory"),
                                              ([], "template.spec.initContainers, sidecar: resources.limits.memory")])
def test_a_sidecar_that_is_killed_for_memory_is_a_router_or_an_agent_alone(ports: list[Body], words: str) -> None:
    body = pod(container(), init=(INSTALLED, loops(3, ended(137, "OOMKilled"), "sidecar")))
    body["spec"]["initContainers"] = [{"name": "xpyd-install"}, {"name": "sidecar", "ports": ports}]
    found = problem(body, NOW)
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
    found = problem(body, NOW)
    assert found is not None
    assert found.reason == "Unschedulable"
    assert ("placement.topology is example.com/rack: kubectl get nodes -L example.com/rack" in found.message) == told
    body["spec"]["affinity"] = {"podAffinity": {}}
    assert "placement" not in getattr(problem(body, NOW), "message", "")
