"""The planner on a real API server: in Auto it sets the pools, says why, and Git sees no difference."""

from __future__ import annotations

import asyncio

import pytest
import yaml
from gitops_judge import Judge
from kube_team import Team
from kube_watchdog import Watchdog
from planner_traffic import PROMPT, Flow

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
DECISIONS = "xpyd_operator_planner_decisions_total"
CALM, BUSY = 4.0, 20.0
"""Requests a second."""


async def test_a_step_of_the_load_is_answered_in_one_interval_with_a_reason_and_git_sees_no_difference(team: Team) -> None:
    flow = Flow(team.agent)
    document = team.document(
        prefill={"scaling": {"min": 1, "max": 6}}, decode={"scaling": {"min": 1, "max": 3}},
        planner={"mode": "auto", "slo": {"ttftP95": "3s", "tpotP95": "60ms"}, "interval": "5s"})
    document["metadata"]["namespace"] = team.namespace
    text = yaml.safe_dump(document)
    judge = Judge.found()

    async def untouched() -> None:
        assert await team.kubectl("diff", "-f", "-", stdin=text) == ""
        if judge is not None:
            said = judge.of(await team.kube.get("DisaggService", team.namespace, "qwen"), document)
            assert said.synced, said

    def wanted() -> int:
        return int(team.of("DisaggPool")["qwen-prefill"]["spec"]["replicas"])

    flow.set(CALM)
    await team.kubectl("apply", "-f", "-", stdin=text)
    await team.wait_settled("1P1D")
    dog = Watchdog(team, floors={"prefill": 1, "decode": 1})
    await team.wait(lambda: "planner (auto): " in team.status().get("plan", ""), "it says what it thinks")
    await team.wait(lambda: f"{CALM:.1f} requests/s of {PROMPT} prompt" in team.status()["plan"], "it knows the load")
    calm = wanted()
    await untouched()

    flow.set(BUSY)
    begun = before = await team.operator.metric(DECISIONS)
    while wanted() <= calm:  # what was decided until then, however late it is that we see it
        before = max(before, await team.operator.metric(DECISIONS))
        assert before - begun <= 3, "the interval in which the load rose, the first that shows nothing else, one to see it"
        await asyncio.sleep(0.1)
        await team.catch_up()

    def told() -> list[str]:
        return [each["message"] for each in team.events("Planned") if f"to {wanted()}P" in each["message"]]

    await team.wait(told, "an Event says so")
    assert "(add " in told()[-1]
    assert "prompt tokens/s at" in told()[-1], "with its figures"
    await team.wait(lambda: team.status()["wanted"].startswith(f"{wanted()}P"), "the loop follows")
    await team.wait(lambda: len(team.ready(role="prefill")) == wanted() > calm, "instances follow")
    await untouched()
    await dog.end()
