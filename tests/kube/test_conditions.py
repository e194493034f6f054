"""The status explains itself: conditions name the pod and the cause, and Ready is true only when a client is served."""

from __future__ import annotations

import pytest
from kube_client import Object
from kube_team import Team
from kube_watchdog import Watchdog
from node_agent import ROLE, Script, image_of

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
LOG = "INFO loading weights\nTraceback (most recent call last):\nValueError: no tokenizer in org/tiny"


def only(image: str, script: Script) -> object:
    """A script for pods of one image; all others come up."""
    return lambda pod: script if image_of(pod) == image else Script()


async def test_an_image_that_cannot_be_pulled(team: Team) -> None:
    words = 'Back-off pulling image "engine:typo"'
    team.agent.script = only("engine:typo", Script(trouble="pull", words=words))  # type: ignore[assignment]
    await team.apply(team.document(engine={"image": "engine:typo"}))
    said = await team.wait_condition("Degraded", words=("ImagePull", "qwen-e0", "engine:typo", "main"))
    assert said["reason"] == "ImagePull"
    assert team.condition("Ready")["status"] == "False"
    await team.apply(team.document(engine={"image": "engine:1"}))
    await team.wait_settled("1P1D")
    assert team.condition("Degraded")["status"] == "False"


async def test_an_engine_that_is_killed_for_memory(team: Team) -> None:
    def script(pod: Object) -> Script:
        decode = pod["metadata"]["labels"][ROLE] == "decode"
        return Script(start_s=0.05, restart_s=0.05, trouble="oom" if decode else "")

    team.agent.script = script
    await team.apply(team.document())
    await team.wait_condition("Degraded", words=("OutOfMemory", "qwen-e1", "main", "resources.limits.memory"))
    assert team.condition("Ready")["status"] == "False"


async def test_a_crash_loop_with_its_last_log_line(team: Team) -> None:
    team.agent.script = only("engine:bad", Script(start_s=0.05, restart_s=0.05, trouble="crash", words=LOG))  # type: ignore[assignment]
    await team.apply(team.document(engine={"image": "engine:bad"}))
    said = await team.wait_condition("Degraded", words=("CrashLoop", "qwen-e0", "ValueError: no tokenizer in org/tiny"))
    assert "Traceback" not in said["message"], "the last line is enough"
    assert team.condition("Ready")["status"] == "False"


async def test_pods_that_wait_to_be_admitted_are_queued(team: Team) -> None:
    """As with Kueue: a gate in each pod, which somebody takes away. The API server itself says that it is gated."""
    gate = {"template": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}},
                         "spec": {"schedulingGates": [{"name": "example.com/quota"}]}}}
    await team.apply(team.document(prefill={"replicas": 1, **gate}, decode={"replicas": 1, **gate}))
    said = await team.wait_condition("Ready", "False", words=("Queued", "queued: qwen-e0, qwen-e1"))
    assert said["reason"] == "Queued"
    await team.wait_condition("Progressing", words=("Queued: queued: qwen-e0, qwen-e1",))
    assert team.condition("Degraded")["status"] == "False"
    told = "pod qwen-e0 waits to be admitted (gate example.com/quota, queue team-a)"
    await team.wait(lambda: [each for each in team.events("Queued") if told in each["message"]], "an Event names the gate")
    assert {each["type"] for each in team.events("Queued")} == {"Normal"}
    for pod in team.pods():
        patch = {"spec": {"schedulingGates": []}}
        await team.kube.merge("Pod", team.namespace, pod["metadata"]["name"], patch)
    await team.wait_settled("1P1D")


async def test_a_pod_that_no_node_takes(team: Team) -> None:
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    team.agent.script = lambda _: Script(trouble="unschedulable", words=words)
    await team.apply(team.document())
    await team.wait(lambda: "qwen-e0" in team.condition("Ready")["message"] + team.condition("Progressing")["message"],
                    "a condition names the pod")
    assert team.condition("Degraded")["status"] == "False", "a node may be on its way"
    await team.delete()
    await team.wait_nothing_left()
    team.agent.script = lambda _: Script(trouble="unschedulable", words=words, ago_s=300)
    await team.apply(team.document())
    await team.wait_condition("Progressing", words=("WaitingForNode", "qwen-e0", "Insufficient nvidia.com/gpu"))
    assert team.condition("Degraded")["status"] == "False", "within startupTimeout"
    await team.delete()
    await team.wait_nothing_left()
    team.agent.script = lambda _: Script(trouble="unschedulable", words=words, ago_s=2000)
    await team.apply(team.document())
    await team.wait_condition("Degraded", words=("Unschedulable", "qwen-e0", "Insufficient nvidia.com/gpu"))
    team.agent.script = lambda _: Script()
    team.agent.again()
    await team.wait_settled("1P1D")


async def test_a_template_that_the_api_server_refuses(team: Team) -> None:
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    before = {pod["metadata"]["uid"] for pod in team.pods()}
    template = {"spec": {"tolerations": [{"key": "a", "operator": "Never"}]}}
    await team.apply(team.document(decode={"replicas": 2, "template": template}))
    said = await team.wait_condition("Valid", "False", words=("TemplateRejected", "decode"))
    assert "operator" in said["message"], "the API server's own words"
    assert {pod["metadata"]["uid"] for pod in team.pods()} == before, "the last good document is in force"
    assert team.condition("Ready")["status"] == "True"
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    assert team.condition("Valid")["status"] == "True"


async def test_ready_turns_with_what_clients_get(team: Team) -> None:
    dog = Watchdog(team)
    team.agent.beats = False
    await team.apply(team.document())
    await team.wait(lambda: team.shape() == "1P1D", "both are ready")
    assert team.condition("Ready")["status"] != "True", "the router does not know the roster yet"
    team.agent.beats = True
    await team.wait_settled("1P1D")
    words = "CUDA error: an illegal memory access was encountered"
    team.agent.script = lambda _: Script(trouble="crash", words=words)  # again and again, until it has been seen
    team.agent.crash("qwen-e1", words)
    said = await team.wait_condition("Ready", "False", words=("qwen-e1",))
    assert said["reason"]
    team.agent.script = lambda _: Script()
    await team.wait_settled("1P1D")
    await dog.end()


async def test_a_name_that_somebody_else_has(team: Team) -> None:
    body = {"metadata": {"name": "qwen"}, "spec": {"ports": [{"port": 80}], "selector": {"app": "other"}}}
    await team.kube.create("Service", body, team.namespace)
    await team.apply(team.document())
    await team.wait_condition("Degraded", words=("NameTaken", "Service qwen"))
    await team.wait_condition("Ready", "False", words=("NameTaken",))
    assert team.of("Service")["qwen"]["spec"]["selector"] == {"app": "other"}, "nothing of others is touched"
    await team.delete()
    await team.wait_nothing_left()
    assert "qwen" in team.of("Service")
