"""Keys of services on a real API server: made without being read, rotated, lost, and taken over from before."""

from __future__ import annotations

import asyncio
import base64
import secrets

import pytest
from kube_client import Object
from kube_routers import key_secret_of
from kube_team import Team
from kube_watchdog import Watchdog
from kube_watched import is_ready

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.render.keys import made_before
from xpyd_operator.render.objects import key_secret
from xpyd_operator.render.pod import engine_pod, pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.keys import ServiceKey

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
MASTER = "xpyd-master"
SLOW_S = 300.0


def uids(team: Team, name: str = "qwen") -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.pods(name)}


def used(team: Team, name: str = "qwen") -> set[str]:
    return {key_secret_of(pod) for pod in team.pods(name)}


async def add_generation(team: Team, number: int) -> None:
    value = base64.b64encode(secrets.token_hex(32).encode()).decode()
    await team.kube.merge("Secret", team.namespace, MASTER, {"data": {str(number): value}})


async def test_a_new_generation_rolls_services_one_after_the_other(team: Team) -> None:
    for name in ("one", "two"):
        await team.apply(team.document(name=name, decode=2))
    for name in ("one", "two"):
        await team.wait_settled("1P2D", name)
    first = {name: (used(team, name), uids(team, name)) for name in ("one", "two")}
    assert len(first["one"][0] | first["two"][0]) == 2, "each has a key of its own"
    dogs = [Watchdog(team, name=name, floors={"prefill": 1, "decode": 2}, most={"prefill": 2, "decode": 3})
            for name in ("one", "two")]
    together: set[int] = set()

    def through() -> bool:
        together.add(sum(len(used(team, name)) > 1 for name in ("one", "two")))
        return not any(uids(team, name) & first[name][1] for name in ("one", "two"))

    await add_generation(team, 2)
    await team.operator.kill()  # so that it need not be waited for: the master is read once a minute
    await team.operator.start()
    await team.wait(through, "no pod has a key of before", SLOW_S)
    for name in ("one", "two"):
        await team.wait_settled("1P2D", name, deadline_s=SLOW_S)
        assert not used(team, name) & first[name][0]
    assert together <= {0, 1}
    for dog in dogs:
        await dog.end()


async def test_a_lost_master_replaces_nothing_and_what_comes_back_goes_on(team: Team) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    before, saved = uids(team), await team.kube.get("Secret", team.namespace, MASTER)
    await team.operator.kill()
    await team.kube.delete("Secret", team.namespace, MASTER)
    await team.operator.start()
    said = await team.wait_condition("Degraded", words=("MasterLost", MASTER))
    assert said["status"] == "True"
    assert team.condition("Ready")["status"] == "True", "it goes on serving"
    await asyncio.sleep(3)
    assert uids(team) == before
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": MASTER}, "data": saved["data"]}
    await team.kube.create("Secret", body, team.namespace)
    await team.wait_settled("1P2D", deadline_s=SLOW_S)
    assert uids(team) == before


async def test_a_service_of_before_keeps_its_pods_until_its_next_rollout(team: Team) -> None:
    await team.operator.kill()
    stored = await team.apply(team.document(decode=2))
    made = decode_service({part: stored[part] for part in ("apiVersion", "kind", "metadata", "spec")}, strict=False,
                          target=Target.KUBERNETES).service
    key = ServiceKey(secrets.token_bytes(32))
    await team.kube.create("Secret", key_secret(made, key.hex()), team.namespace)
    for ordinal, role in enumerate((Role.PREFILL, Role.DECODE, Role.DECODE)):
        revision = pod_revision(made, role, made_before("qwen", key).id)
        name = InstanceName(f"qwen-e{ordinal}")
        pod = engine_pod(made, role, name, revision, KubeSettings(sidecar_image=team.operator.image))
        await team.kube.create("Pod", pod, team.namespace)
    await team.wait(lambda: len(team.pods()) == 3 and all(is_ready(pod) for pod in team.pods()), "its pods run")
    before = uids(team)
    await team.operator.start()
    await team.wait_settled("1P2D", deadline_s=SLOW_S)
    assert (uids(team), used(team)) == (before, {"qwen-key"})
    dog = Watchdog(team, floors={"prefill": 1, "decode": 2}, most={"prefill": 2, "decode": 3})
    changed: Object = team.document(decode=2)
    changed["spec"]["engine"]["args"] = ["--max-model-len=128"]
    await team.apply(changed)
    await team.wait(lambda: not uids(team) & before, "all pods are replaced", SLOW_S)
    await team.wait_settled("1P2D", deadline_s=SLOW_S)
    assert "qwen-key" not in used(team)
    await dog.end()
