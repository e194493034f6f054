"""A new revision takes over without a moment of less capacity, whatever its KV is, and a revert in the middle too."""

from __future__ import annotations

import pytest
from kube_client import Object
from kube_team import Team
from kube_watchdog import Watchdog
from kube_watched import label
from node_agent import REVISION, ROLE, Script, by_image, image_of

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
OLD, NEW, BAD = ({"image": f"engine:{tag}"} for tag in ("1", "2", "bad"))


def uids(team: Team, role: str = "") -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.pods(role=role)}


def images(team: Team) -> set[str]:
    return {image_of(pod) for pod in team.pods()}


async def test_the_same_kv_rolls_pod_by_pod(team: Team) -> None:
    await team.apply(team.document(decode=3, engine=OLD))
    await team.wait_settled("1P3D")
    before = uids(team)
    dog = Watchdog(team, floors={"prefill": 1, "decode": 3}, most={"prefill": 2, "decode": 4})
    await team.apply(team.document(decode=3, engine=NEW))
    await team.wait(lambda: dog.made, "the first new pod is made")
    await team.wait_settled("1P3D")
    assert images(team) == {"engine:2"}
    assert not before & uids(team)
    assert len(dog.made) == 4, dog.made
    assert not dog.pairless
    assert len(team.status()["revisions"]) == 1
    await dog.end()


async def test_another_kv_comes_up_beside_the_old_one_in_balance(team: Team) -> None:
    team.agent.fingerprint = by_image
    await team.apply(team.document(prefill=2, decode=2, engine=OLD))
    await team.wait_settled("2P2D")
    old = team.status()["fingerprints"]
    dog = Watchdog(team, floors={"prefill": 2, "decode": 2}, most={"prefill": 3, "decode": 3})
    told: list[int] = []
    heard = team.mirrors["DisaggService"].listeners
    heard.append(lambda _was, _now: told.append(len(team.status().get("fingerprints", ()))))
    await team.apply(team.document(prefill=2, decode=2, engine=NEW))
    await team.wait(lambda: 2 in told, "both fingerprints are told")
    await team.wait_settled("2P2D")
    assert images(team) == {"engine:2"}
    assert len(team.status()["fingerprints"]) == 1
    assert team.status()["fingerprints"] != old
    assert not dog.pairless, "at each moment some prefill and decode of one KV serve"
    await dog.end()


async def test_a_change_to_one_role_leaves_the_other_alone(team: Team) -> None:
    await team.apply(team.document(prefill=2, decode=2))
    await team.wait_settled("2P2D")
    prefill, decode = uids(team, "prefill"), uids(team, "decode")
    dog = Watchdog(team, floors={"prefill": 2, "decode": 2}, most={"prefill": 2, "decode": 3})
    await team.apply(team.document(prefill=2, decode={"replicas": 2, "args": ["--max-num-seqs=8"]}))
    await team.wait(lambda: dog.made, "a new pod is made")
    await team.wait_settled("2P2D")
    assert uids(team, "prefill") == prefill
    assert not uids(team, "decode") & decode
    await dog.end()


async def test_without_surge_no_more_devices_are_used(quiet_team: Team) -> None:
    team = quiet_team
    team.agent.devices = 4
    await team.operator.start()
    rollout = {"maxSurge": 0, "maxUnavailable": 1}
    await team.apply(team.document(prefill=2, decode=2, rollout=rollout, engine=OLD))
    await team.wait_settled("2P2D")
    dog = Watchdog(team, floors={"prefill": 1, "decode": 1}, most={"prefill": 2, "decode": 2})
    await team.apply(team.document(prefill=2, decode=2, rollout=rollout, engine=NEW))
    await team.wait(lambda: dog.made, "a new pod is made")
    await team.wait_settled("2P2D")
    assert images(team) == {"engine:2"}
    await dog.end()


async def test_a_surge_that_no_node_takes_is_told_and_costs_nothing(quiet_team: Team) -> None:
    team = quiet_team
    team.agent.devices = 2
    await team.operator.start()
    await team.apply(team.document(engine=OLD))
    await team.wait_settled("1P1D")
    dog = Watchdog(team, floors={"prefill": 1, "decode": 1})
    team.agent.script = lambda _: Script(ago_s=300)
    await team.apply(team.document(engine=NEW))
    await team.wait_condition("Progressing", words=("without a node", "Insufficient nvidia.com/gpu"))
    dog.check()
    team.agent.devices = 4
    await team.wait_settled("1P1D")
    assert images(team) == {"engine:2"}
    await dog.end()


@pytest.mark.parametrize("same", [True, False])
async def test_a_revert_in_mid_rollout_keeps_capacity(team: Team, same: bool) -> None:
    """Of the new revision one pod of each role finds a place, however late it is seen that it serves."""
    first: dict[str, str] = {}

    def script(pod: Object) -> Script:
        uid = pod["metadata"]["uid"]
        taken = image_of(pod) == "engine:1" or first.setdefault(label(pod, ROLE), uid) == uid
        return Script(trouble="" if taken else "unschedulable")

    team.agent.script = script
    if not same:
        team.agent.fingerprint = by_image
    await team.apply(team.document(prefill=2, decode=3, engine=OLD))
    await team.wait_settled("2P3D")
    before = uids(team)
    dog = Watchdog(team, floors={"prefill": 2, "decode": 3}, most={"prefill": 3, "decode": 4})
    await team.apply(team.document(prefill=2, decode=3, engine=NEW))
    await team.wait(lambda: any(image_of(pod) == "engine:2" and pod["metadata"]["name"] in team.ready()
                                for pod in team.pods(role="decode")), "a new decode pod serves")
    await team.apply(team.document(prefill=2, decode=3, engine=OLD))
    await team.wait_settled("2P3D")
    assert images(team) == {"engine:1"}
    assert len(before & uids(team)) >= 3, "what still ran of the old revision stays"
    assert not dog.pairless
    await dog.end()


async def test_a_revision_that_crashes_takes_nothing_down(team: Team) -> None:
    def script(pod: Object) -> Script:
        bad = image_of(pod) == "engine:bad"
        return Script(start_s=0.1, restart_s=0.1, trouble="crash", words="ImportError: no kernel") if bad else Script()

    team.agent.script = script
    await team.apply(team.document(prefill=1, decode=2, engine=OLD))
    await team.wait_settled("1P2D")
    before = uids(team)
    dog = Watchdog(team, floors={"prefill": 1, "decode": 2}, most={"prefill": 2, "decode": 3})
    await team.apply(team.document(prefill=1, decode=2, engine=BAD))
    await team.wait_condition("Degraded", words=("CrashLoop", "ImportError: no kernel"))
    assert before <= uids(team)
    assert team.condition("Ready")["status"] == "True", "the old revision serves"
    await team.apply(team.document(prefill=1, decode=2, engine=OLD))
    await team.wait_settled("1P2D")
    assert uids(team) == before
    await dog.end()


async def test_a_new_revision_and_a_new_shape_at_once(team: Team) -> None:
    await team.apply(team.document(prefill=1, decode=3, engine=OLD))
    await team.wait_settled("1P3D")
    dog = Watchdog(team, floors={"prefill": 1, "decode": 2})
    await team.apply(team.document(prefill=2, decode=2, engine=NEW))
    await team.wait_settled("2P2D")
    assert images(team) == {"engine:2"}
    assert len({label(pod, REVISION) for pod in team.pods()}) <= 2
    await dog.end()
