"""An upgrade of xpyd itself on a real API server: the operator first, which replaces no pod, then the pods by a rollout."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import releases
from kube_client import Object
from kube_team import LASTING, ROUNDS, Team
from kube_watchdog import Watchdog
from node_agent import Script, package_of
from planner_traffic import Flow

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
BEFORE, NOW, WRONG = (f"registry.example/xpyd-sidecar:{tag}" for tag in ("before", "now", "wrong"))
CALM = 4.0
"""Requests a second."""
STEADY = (2, 2)
"""Least and most prefill instances of a planner that measures, and has no choice."""
DECISIONS = "xpyd_operator_planner_decisions_total"


@pytest.fixture
def old() -> releases.Release:
    try:
        return releases.before()
    except releases.Missing as error:
        pytest.skip(str(error))


def by_package(pod: Object) -> str:
    """A fingerprint for each release of xpyd."""
    return hashlib.sha256(package_of(pod).encode()).hexdigest()[:32]


def document(team: Team, round_: str, prefill: tuple[int, int] = (1, 3)) -> Object:
    """With the planner at work; ``round_`` is what a person changes to have all pods made anew.

    ``prefill``: least and most. What the planner adds first is the most that it may: on a busy machine it measures more
    load than there is, and would add again.
    """
    template = {"metadata": {"annotations": {"example.com/round": round_}}}
    roles = [{"scaling": {"min": least, "max": most}, "template": template} for least, most in (prefill, (1, 1))]
    goals = {"ttftP95": "3s", "tpotP95": "60ms"}
    return team.document(prefill=roles[0], decode=roles[1], planner={"mode": "auto", "slo": goals, "interval": "2s"})


def uids(team: Team) -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.pods()}


async def become(team: Team, release: releases.Release | None, image: str) -> None:
    """Another operator takes over from one that was killed, and has looked at everything a few times."""
    await team.operator.kill()
    team.operator.release, team.operator.image = release, image
    await team.operator.start()
    for turn in range(400):
        if await team.operator.metric(ROUNDS) >= 5:
            return
        nudge = {"metadata": {"annotations": {"example.com/turn": str(turn)}}}
        await team.kube.merge("DisaggService", team.namespace, "qwen", nudge)
        await asyncio.sleep(0.3)
    raise AssertionError(f"the operator has not looked five times\n{team.describe()}")


async def give_back(team: Team) -> None:
    """As docs/operations.md has it for an operator that knows no Services and policies without an owner."""
    for kind in LASTING:
        for name, each in team.of(kind).items():
            marks = each["metadata"].get("labels") or {}
            if uid := marks.get("xpyd.dev/service-uid"):
                owner = {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "name": marks["xpyd.dev/service"],
                         "uid": uid, "controller": True, "blockOwnerDeletion": False}
                await team.kube.merge(kind, team.namespace, name, {"metadata": {"ownerReferences": [owner]}})


async def calm(team: Team) -> str:
    """The shape that the planner has stayed at for three intervals."""
    for _ in range(10):
        shape = str(team.status()["wanted"])
        decided = await team.operator.metric(DECISIONS)
        for _ in range(100):
            if await team.operator.metric(DECISIONS) >= decided + 3:
                break
            await asyncio.sleep(0.2)
        if team.status()["wanted"] == shape and team.settled(shape):
            return shape
    raise AssertionError(f"the planner does not settle\n{team.describe()}")


async def test_from_the_release_before_to_this_one_and_back_with_the_planner_at_work(
        quiet_team: Team, old: releases.Release) -> None:
    """The KV of the two is made to differ, which is the harder way."""
    team = quiet_team
    team.agent.fingerprint = by_package
    flow = Flow(team.agent)
    flow.set(CALM)
    team.operator.release, team.operator.image = old, BEFORE
    await team.operator.start()
    await team.apply(document(team, "1", STEADY))
    await team.wait(lambda: f"{CALM:.1f} requests/s" in team.status().get("plan", ""), "the planner knows the load")
    shape = await calm(team)
    counts = {role: len(team.ready(role=role)) for role in ("prefill", "decode")}
    first, secrets, decided = uids(team), {*team.of("Secret")}, len(team.events("Planned"))
    dog = Watchdog(team, floors=counts, most={role: count + 1 for role, count in counts.items()})

    await become(team, None, NOW)
    assert uids(team) == first, "a new operator replaces nothing"

    for round_, release, image, interrupted in (("2", None, NOW, True), ("3", old, BEFORE, False)):
        if release is not None:
            before = uids(team)
            await become(team, release, image)
            await give_back(team)
            assert uids(team) == before, "nor does one of before"
        made = len(dog.made)
        await team.apply(document(team, round_, STEADY))
        await team.wait(lambda made=made: len(dog.made) > made, "a pod of the new revision is made")  # type: ignore[misc]
        if interrupted:
            await team.operator.kill()
            await team.operator.start()
        await team.wait(lambda image=image: {package_of(pod) for pod in team.pods()} == {image}, "all are made anew")  # type: ignore[misc]
        await team.wait_settled(shape)
    assert not dog.pairless, "at each moment some prefill and decode of one release serve"
    assert {*team.of("Secret")} == secrets, "the key is the same"
    assert len(team.events("Planned")) == decided, team.events("Planned")
    assert team.status()["wanted"] == shape
    await dog.end()


@pytest.mark.test_all
async def test_an_image_that_cannot_be_pulled_costs_nothing_and_is_made_good_by_the_operators_image(
        quiet_team: Team) -> None:
    """The pod that was made with it is of the wanted revision: nothing but its image tells that it is to be made anew."""
    team = quiet_team
    team.agent.script = lambda pod: Script(
        trouble="package" if package_of(pod) == WRONG else "", words="manifest unknown")
    team.operator.image = BEFORE
    await team.operator.start()
    await team.apply(document(team, "1"))
    await team.wait_settled("1P1D")
    first = uids(team)
    dog = Watchdog(team, floors={"prefill": 1, "decode": 1}, most={"prefill": 2, "decode": 2})
    await become(team, None, WRONG)
    await team.apply(document(team, "2"))
    await team.wait_condition("Degraded", words=("ImagePull", WRONG, "manifest unknown"))
    assert first <= uids(team)
    assert team.condition("Ready")["status"] == "True"
    await become(team, None, NOW)
    await team.wait(lambda: {package_of(pod) for pod in team.pods()} == {NOW}, "all are made anew")
    await team.wait_settled("1P1D")
    await dog.end()


async def test_one_pod_that_is_made_anew_brings_the_others_along_where_the_releases_do_not_pair(quiet_team: Team) -> None:
    """An upgrade alone replaces nothing; but a prefill of the new release would have no decode to pair with."""
    team = quiet_team
    team.agent.fingerprint = by_package
    team.operator.image = BEFORE
    await team.operator.start()
    await team.apply(document(team, "1"))
    await team.wait_settled("1P1D")
    first = uids(team)
    await become(team, None, NOW)
    assert uids(team) == first
    dog = Watchdog(team, floors={"decode": 1}, most={"prefill": 2, "decode": 2})
    await team.kube.delete("Pod", team.namespace, team.ready(role="prefill")[0])
    await team.wait(lambda: [package_of(pod) for pod in team.pods()] == [NOW, NOW], "decode is made anew, too")
    await team.wait_settled("1P1D")
    assert not uids(team) & first
    assert len(team.status()["fingerprints"]) == 1
    await dog.end()
