"""Instances of several pods on a real API server: made, killed in the middle, and what becomes of a group when one goes.

    XPYD_GROUPS=96P144D …      another size of the fleet (480 pods)
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time

import pytest
from kube_client import NO_NIC, WITH_NIC, Object
from kube_faults import FaultProxy
from kube_team import Team
from kube_watched import label
from node_agent import INSTANCE, MEMBER, MEMBERS, ROLE, Script

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
LAYOUT = "xpyd.dev/layout"
DECODE = {"replicas": 2, "parallelism": {"tensor": 2, "pods": 2, "device": "none"}}
FLEET = os.environ.get("XPYD_GROUPS", "4P6D")
PREFILL = {"replicas": 1, "parallelism": {"tensor": 2, "device": "none"}}


class GroupWatch:
    """Keeps what should never have been: a leader without the others, a group of two lives, or of two layouts."""

    def __init__(self, team: Team) -> None:
        self.faults: list[str] = []
        self._team = team
        team.mirrors["Pod"].listeners.append(self._on_pod)

    def _on_pod(self, was: Object | None, now: Object | None) -> None:
        if was is not None or now is None or label(now, MEMBER) != "0":
            return
        members = [each for each in self._team.of("Pod").values() if label(each, INSTANCE) == label(now, INSTANCE)]
        notes = [each["metadata"]["annotations"] for each in [*(one for one in members if one is not now), now]]
        if len({note[LAYOUT] for note in notes}) != 1:
            self.faults.append(f"{now['metadata']['name']}: of several layouts")
        names = {each["metadata"]["name"] for each in members} | {now["metadata"]["name"]}
        if len(names) != int(notes[-1][MEMBERS]):
            self.faults.append(f"{now['metadata']['name']} was made with {sorted(names)}")

    def check(self) -> None:
        """Fails with everything that was wrong."""
        for instance, lives in self._team.agent.rounds.items():
            for before, after in itertools.pairwise(lives):
                if before & after:
                    self.faults.append(f"{instance}: a pod served in two lives")
        assert not self.faults, "\n".join([*self.faults[:20], self._team.describe()])


def document(team: Team, name: str = "qwen", **spec: object) -> Object:
    return team.document(name, PREFILL, DECODE, **spec)


def groups(team: Team, name: str = "qwen") -> dict[str, set[str]]:
    """The uids of each group's pods that stay."""
    found: dict[str, set[str]] = {}
    for pod in team.pods(name):
        if label(pod, INSTANCE) and not pod["metadata"].get("deletionTimestamp"):
            found.setdefault(label(pod, INSTANCE), set()).add(pod["metadata"]["uid"])
    return found


async def test_an_operator_killed_between_any_two_writes_makes_whole_groups(proxied: tuple[Team, FaultProxy]) -> None:
    team, proxy = proxied
    watch = GroupWatch(team)
    for made in range(5):
        name = f"q{made}"
        proxy.pods_left = made
        await team.apply(document(team, name))
        await team.wait(lambda proxy=proxy: proxy.closed, "the operator is cut off")
        await team.operator.kill()
        assert len(team.pods(name)) <= made
        proxy.pods_left = None
        proxy.open()
        team.operator.spawn()
        await team.wait_settled("1P4D", name)
        assert {len(uids) for uids in groups(team, name).values()} == {2}
    watch.check()


async def test_one_member_that_goes_takes_its_group_along_and_no_other(team: Team) -> None:
    watch = GroupWatch(team)
    await team.apply(document(team))
    await team.wait_settled("1P4D")
    budget = team.of("PodDisruptionBudget")["qwen-decode"]["spec"]
    assert budget["minAvailable"] == 2 * 2 - 1

    async def again(how: str) -> None:
        before = groups(team)
        first, second = sorted(before)
        victim = f"{first}-1"
        if how == "deleted":
            await team.kube.delete("Pod", team.namespace, victim)
        elif how == "gone":
            await team.kube.delete("Pod", team.namespace, victim, grace_s=0)
        elif how == "failed":
            patch = {"status": {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"}}
            await team.kube.merge("Pod", team.namespace, victim, patch, "status")
        else:
            team.agent.lives[victim].facts.away = True
            team.agent.lives[victim].dirty.set()
        await team.wait(lambda: not before[first] & {uid for uids in groups(team).values() for uid in uids},
                        f"{how}: all pods of {first} go")
        await team.wait(lambda: len(groups(team)) == 2 and len(team.ready(role="decode")) == 4, f"{how}: a new one serves")
        assert groups(team)[second] == before[second], "no other group is touched"
        if how == "away":
            team.agent.lives[victim].facts.away = False
            team.agent.lives[victim].kick.set()
        await team.wait_settled("1P4D")

    for how in ("deleted", "gone", "failed", "away"):
        await again(how)
    watch.check()


@pytest.mark.test_all
async def test_on_a_node_that_is_lost_a_group_that_serves_stays_and_one_that_does_not_is_made_anew(team: Team) -> None:
    """Kubernetes itself says that the node is lost, 50 s after it was heard last."""
    await team.apply(document(team))
    await team.wait_settled("1P4D")
    before = groups(team)
    first, second = sorted(before)
    team.agent.silent = True
    await team.wait(lambda: not team.ready(), "the node is lost")
    await asyncio.sleep(5)
    assert groups(team) == before, "both serve, so nothing is done to them"
    team.agent.lives[f"{first}-0"].facts.stage = "running"
    await team.wait(lambda: first not in groups(team), "all pods of the group are to go")
    await team.wait(lambda: len(groups(team)) == 2, "another one is made")
    assert groups(team)[second] == before[second]
    team.agent.speak()
    await team.wait_settled("1P4D")


@pytest.mark.test_all
async def test_an_eviction_makes_the_others_of_its_group_free_to_go_and_no_other_group(team: Team) -> None:
    team.agent.script = lambda _: Script(drain_s=15.0)
    await team.apply(document(team))
    await team.wait_settled("1P4D")
    first, second = sorted(groups(team))

    def allowed() -> object:
        return (team.of("PodDisruptionBudget")["qwen-decode"].get("status") or {}).get("disruptionsAllowed")

    async def evict(name: str, within_s: float = 60.0) -> bool:
        """Whether it may go; the client tries again what the budget refuses."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": team.namespace}}
        path = f"/api/v1/namespaces/{team.namespace}/pods/{name}/eviction"
        try:
            async with asyncio.timeout(within_s):
                await team.kube.request("POST", path, body)
        except TimeoutError:
            return False
        return True

    await team.wait(lambda: allowed() == 1, "the budget is counted")
    team.operator.pause()  # it would have another group in no time
    assert await evict(f"{first}-1")
    assert not await evict(f"{second}-0", 1.0), "of another group"
    await team.wait(lambda: f"{first}-0" not in team.ready(), "its group is not ready")
    assert await evict(f"{first}-0")
    assert not await evict(f"{second}-1", 1.0)
    team.operator.resume()
    await team.wait_settled("1P4D")
    assert set(groups(team)) > {second}


async def test_a_quota_in_the_middle_of_a_group_is_waited_for_without_a_leader(team: Team) -> None:
    watch = GroupWatch(team)
    hard = {"pods": "2"} | NO_NIC
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}}
    path = f"/api/v1/namespaces/{team.namespace}/resourcequotas"
    await team.kube.request("POST", path, quota)
    await team.kube.wait_refused(team.namespace, WITH_NIC, "exceeded quota: few")
    await team.apply(document(team))
    await team.wait_condition("Progressing", words=("exceeded quota: few",))
    assert not [pod for pod in team.pods() if label(pod, MEMBER) == "0"]
    await team.kubectl("patch", "resourcequota", "few", "--type=merge", "-p", '{"spec":{"hard":{"pods":"50"}}}')
    await team.wait_settled("1P4D", deadline_s=300)
    watch.check()


async def test_half_a_group_is_told_in_numbers_and_two_halves_do_not_wait_for_each_other(team: Team) -> None:
    """Four places: one of each of three groups, and none would ever serve."""
    watch = GroupWatch(team)
    team.agent.devices = 1 + 4
    await team.apply(document(team) | {"spec": document(team)["spec"] | {"decode": DECODE | {"replicas": 3}}})
    said = await team.wait_condition("Progressing", words=("without a node", "pods of qwen-e"), deadline_s=300)
    assert re.search(r"[12] of 2 pods of qwen-e\d find no node", said["message"])
    await team.wait(lambda: len(team.ready(role="decode")) == 4, "two groups serve")
    team.agent.devices = 1 + 6
    team.agent.again()
    await team.wait_settled("1P6D")
    watch.check()


async def test_a_group_changes_its_role_by_its_leader_and_all_labels_follow(team: Team) -> None:
    window = {"switchWindow": "30s"}
    await team.apply(team.document("qwen", DECODE | {"replicas": 1}, DECODE | {"replicas": 2}, rollout=window))
    await team.wait_settled("2P4D")
    before = {pod["metadata"]["uid"] for pod in team.pods()}
    await team.apply(team.document("qwen", DECODE | {"replicas": 2}, DECODE | {"replicas": 1}, rollout=window))
    await team.wait_settled("4P2D")
    assert {pod["metadata"]["uid"] for pod in team.pods()} == before, "no pod ended and none was made"
    roles: dict[str, set[str]] = {}
    for pod in team.pods():
        roles.setdefault(label(pod, INSTANCE), set()).add(label(pod, ROLE))
    assert sorted(map(sorted, roles.values())) == [["decode"], ["prefill"], ["prefill"]]


async def test_a_rollout_of_groups_goes_by_instances(team: Team) -> None:
    watch = GroupWatch(team)
    team.agent.script = lambda _: Script(start_s=1.0)
    await team.apply(document(team, engine={"image": "engine:1"}))
    await team.wait_settled("1P4D")
    most = 0

    def count(_was: Object | None, _now: Object | None) -> None:
        nonlocal most
        most = max(most, len([pod for pod in team.of("Pod").values() if label(pod, ROLE) == "decode"]))

    team.mirrors["Pod"].listeners.append(count)
    await team.apply(document(team, engine={"image": "engine:2"}))
    await team.wait(lambda: {pod["spec"]["containers"][0]["image"] for pod in team.pods()} == {"engine:2"}, "all are new")
    await team.wait_settled("1P4D")
    assert 4 < most <= 6, "one group above the two that are wanted"
    watch.check()


@pytest.mark.test_all
async def test_a_fleet_of_groups_is_made_at_once_where_all_fit(team: Team) -> None:
    """No group waits for another to serve: none does before all of them are made."""
    watch = GroupWatch(team)
    prefill, decode = map(int, re.findall(r"\d+", FLEET))
    team.agent.starts = False
    began, kept_s = time.monotonic(), team.operator.kept_waiting_s()
    await team.apply(team.document("qwen", DECODE | {"replicas": prefill}, DECODE | {"replicas": decode}))
    await team.wait(lambda: len(team.pods()) == 2 * (prefill + decode), "all are made")
    took_s = time.monotonic() - began - (team.operator.kept_waiting_s() - kept_s)
    print(f"{FLEET} of two pods each made in {took_s:.1f} s")
    assert not team.ready()
    team.agent.starts = True
    await team.wait_settled(f"{2 * prefill}P{2 * decode}D", deadline_s=240 + prefill + decode)
    watch.check()
