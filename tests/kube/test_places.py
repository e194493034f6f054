"""Fewer places than instances, on a real API server: what has a place is a pair that can serve, whoever had it before."""

from __future__ import annotations

import time

import pytest
from kube_client import Object
from kube_team import Team
from kube_watched import label
from node_agent import ROLE, Script

pytestmark = pytest.mark.timeout(1800)  # the first run on a machine builds Kubernetes
TRIES = 20
PAIR_S = 120.0


@pytest.mark.test_all
async def test_2p2d_with_room_for_two_is_a_pair_each_time(team: Team) -> None:
    team.agent.devices = 2
    for number in range(TRIES):
        began = time.monotonic()
        await team.apply(team.document(prefill=2, decode=2))
        await team.wait(lambda: team.shape() == "1P1D", f"a pair serves in try {number}", PAIR_S)
        await team.wait_condition("Ready", words=("Serving", "without a node"))
        assert time.monotonic() - began < PAIR_S
        assert team.condition("Degraded")["status"] == "False"
        await team.delete()
        await team.wait_nothing_left()


@pytest.mark.parametrize("window", ["0s", "30s"])
async def test_prefill_that_has_all_places_gives_one_up_without_a_router(team: Team, window: str) -> None:
    ago_s = 0.0

    def script(pod: Object) -> Script:
        return Script(trouble="unschedulable" if label(pod, ROLE) == "decode" else "", ago_s=ago_s)

    team.agent.devices, team.agent.script = 2, script
    rollout = {"switchWindow": window}
    await team.apply(team.document(prefill=2, decode=2, rollout=rollout))
    await team.wait(lambda: team.shape() == "2P0D", "prefill has all places")
    ago_s = 300.0
    for pod in team.pods(role="decode"):  # made anew, they wait for minutes
        await team.kube.delete("Pod", team.namespace, pod["metadata"]["name"])
    reason = "Switched" if window != "0s" else "Draining"
    await team.wait(lambda: [each for each in team.events(reason) if "finds no place" in each["message"]],
                    "prefill gives a place up, or takes the other role")
    team.agent.script = lambda _: Script()
    team.agent.again()
    await team.wait(lambda: team.shape() == "1P1D", "a pair serves", PAIR_S)
    team.agent.devices = 4
    team.agent.again()
    await team.wait_settled("2P2D")
