"""The real HorizontalPodAutoscaler changes a DisaggPool: instances follow, limits hold, Git sees no difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from external_metrics import ExternalMetrics
from gitops_judge import Judge
from kube_team import Team
from kube_watchdog import Watchdog

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/kubernetes/autoscaling.yaml"
pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
AT_ONCE = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 20, "periodSeconds": 1}]}
FOLLOWS_S = 240.0
"""The autoscaler looks every second; a busy machine makes that longer."""


def autoscaler() -> dict[str, Any]:
    """The one of the example, without its patience."""
    found: dict[str, Any]
    _, found = yaml.safe_load_all(EXAMPLE.read_text())
    assert found["kind"] == "HorizontalPodAutoscaler"
    return found | {"spec": found["spec"] | {"behavior": {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}}}


async def test_an_autoscaler_moves_the_count_and_git_sees_no_difference(team: Team) -> None:
    document = team.document(decode={"scaling": {"min": 1, "max": 6}}, limits={"maxInstances": 6})
    document["metadata"]["namespace"] = team.namespace
    text = yaml.safe_dump(document)
    judge = Judge.found()

    async def untouched() -> None:
        assert await team.kubectl("diff", "-f", "-", stdin=text) == ""
        if judge is not None:
            live = await team.kube.get("DisaggService", team.namespace, "qwen")
            said = judge.of(live, document)
            assert said.synced, said
            assert said.flux == "Current"

    def pool(replicas: int) -> Callable[[], bool]:
        return lambda: bool(team.of("DisaggPool")["qwen-decode"]["spec"]["replicas"] == replicas)

    await team.kubectl("apply", "-f", "-", stdin=text)
    await team.wait_settled("1P1D")
    await untouched()
    dog = Watchdog(team, floors={"prefill": 1, "decode": 1})
    async with ExternalMetrics(team.cluster, team.namespace) as metrics:
        metrics.value = "10"
        await team.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(autoscaler()))
        await team.wait(lambda: metrics.asked > 1, "the autoscaler asks for the metric", FOLLOWS_S)
        assert pool(1)()

        metrics.value = "100"  # 32 for each
        await team.wait(pool(4), "the autoscaler wants 4", FOLLOWS_S)
        await team.wait_settled("1P4D", deadline_s=FOLLOWS_S)
        await untouched()

        metrics.value = "190"
        await team.wait(pool(6), "the autoscaler wants 6", FOLLOWS_S)
        await team.wait_settled("1P5D", deadline_s=FOLLOWS_S)

        def limited() -> str:
            status = team.of("DisaggPool")["qwen-decode"].get("status") or {}
            return "".join(each["message"] for each in status.get("conditions", ())
                           if (each["type"], each["status"]) == ("Limited", "True"))

        await team.wait(lambda: "maxInstances" in limited(), "it says which limit holds")  # written after the service
        await untouched()

        metrics.value = "20"
        await team.wait(pool(1), "the autoscaler wants 1", FOLLOWS_S)
        await team.wait_settled("1P1D", deadline_s=FOLLOWS_S)
        await untouched()
        await team.kubectl("delete", "hpa", "qwen-decode")
    await dog.end()
