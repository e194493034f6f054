"""Keys of services on a real API server: made without being read, rotated and lost."""

from __future__ import annotations

import asyncio
import base64
import secrets

import pytest
from kube_routers import key_secret_of
from kube_team import Team
from kube_watchdog import Watchdog

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


@pytest.mark.test_all
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
