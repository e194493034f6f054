"""Images and weights ahead of instances, with Kubernetes' own controllers of DaemonSets and Jobs."""

from __future__ import annotations

import pytest
from kube_client import Object
from kube_pods import now_text
from kube_team import Team
from kube_watched import label
from node_agent import COMPONENT, FETCHES, SERVICE

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes


def zero(team: Team, **spec: object) -> Object:
    scaled = {"scaling": {"min": 0, "max": 4}}
    pool = {"spec": {"nodeSelector": {"pool": team.namespace}}}
    model = {"source": "org/tiny", "cache": {"claim": "hub"}, "prefetch": True}
    return team.document(prefill=scaled | {"template": pool}, decode=scaled | {"template": pool}, model=model,
                         router={"placement": "deployment", "replicas": 1, "hold": "10m"}, **spec)


def fetchers(team: Team) -> dict[str, Object]:
    """Pods that fetch: ``images`` and ``weights``, by the kind of who made them."""
    found = [pod for pod in team.of("Pod").values() if label(pod, COMPONENT) == FETCHES]
    return {pod["metadata"]["ownerReferences"][0]["kind"]: pod for pod in found}


async def tell(team: Team, pod: Object, phase: str) -> None:
    """As the kubelet of its node would."""
    conditions = [{"type": "Ready", "status": "True" if phase == "Running" else "False", "lastTransitionTime": now_text()}]
    since = {"startedAt": now_text()}
    state = {"running": since} if phase == "Running" else {"terminated": since | {"exitCode": 0, "finishedAt": now_text()}}
    spec, = pod["spec"]["containers"]
    one = {"name": spec["name"], "image": spec["image"], "imageID": "", "ready": phase == "Running", "restartCount": 0,
           "state": state}
    await team.kube.merge("Pod", team.namespace, pod["metadata"]["name"],
                          {"status": {"phase": phase, "conditions": conditions, "containerStatuses": [one]}}, "status")


async def test_nodes_have_the_images_and_the_volume_the_weights_before_anybody_asks(team: Team) -> None:
    await team.apply(zero(team))
    await team.wait_condition("Prefetched", "False", words=("Fetching", "images on 0 of 0 nodes"))
    await team.wait(lambda: set(fetchers(team)) == {"Job"}, "the Job has a pod; no node is meant yet")
    await team.kube.merge("Node", "", team.agent.node, {"metadata": {"labels": {"pool": team.namespace}}})
    await team.wait(lambda: set(fetchers(team)) == {"Job", "DaemonSet"}, "the node that is meant has its pod")
    await team.wait_condition("Prefetched", "False", words=("images on 0 of 1 nodes", "weights are being fetched"))
    assert all(not label(pod, SERVICE) for pod in fetchers(team).values())
    assert team.pods() == []

    await tell(team, fetchers(team)["DaemonSet"], "Running")
    await tell(team, fetchers(team)["Job"], "Succeeded")
    said = await team.wait_condition("Prefetched", words=("Fetched",))
    assert said["message"] == "images on 1 of 1 nodes; weights are fetched"
    await team.wait_condition("Ready", words=("AtZero",))


async def test_instances_that_are_wanted_get_the_volume_and_suspended_ones_leave_nothing(team: Team) -> None:
    await team.apply(zero(team))
    await team.wait(lambda: "Job" in fetchers(team), "the Job has a pod")
    team.agent.held, team.agent.idle_s = 3, 0.0
    await team.wait_settled("1P1D")
    await team.wait(lambda: "Job" not in fetchers(team), "an unfinished fetch has gone")
    assert (list(team.of("Job")), list(team.of("DaemonSet"))) == ([], ["qwen-decode-images"])
    team.agent.held = 0
    await team.apply(zero(team, suspend=True))
    await team.wait_condition("Suspended")
    await team.wait(lambda: not team.of("DaemonSet") and not fetchers(team), "nothing fetches for who is suspended")


async def test_a_service_that_is_deleted_takes_along_what_fetches_for_it(team: Team) -> None:
    await team.apply(zero(team))
    await team.wait(lambda: "Job" in fetchers(team), "the Job has a pod")
    await team.delete()
    await team.wait_nothing_left()
    await team.wait(lambda: not fetchers(team), "nor their pods")
