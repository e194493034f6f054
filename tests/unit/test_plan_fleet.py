"""Rollouts of large services, simulated with the times of real engines: how long they take and what serves meanwhile."""

from __future__ import annotations

import math

import pytest
from pod_world import ROLES, PodWorld, wish

from xpyd_operator.api.operation import Rollout
from xpyd_sidecar.contract.ids import Role

START_S, DRAIN_S = 60.0, 20.0
FLEET = (96, 144)
KV = {"same": {}, "other": {"r2": "b" * 32}}


def rolled(world: PodWorld, rollout: Rollout, *, round_s: float = 2.0, fleet: tuple[int, int] = FLEET) -> float:
    """Seconds that a new revision of both roles takes. At each moment enough serve, and some of them can pair."""
    world.run(wish(*fleet, rollout=rollout), limit=900, quiet=int(world.start_s) + 30)
    want, began = wish(*fleet, "r2", rollout=rollout), world.now
    floors = {role: count - rollout.unavailable(count) for role, count in zip(ROLES, fleet, strict=True)}
    tops = {role: count + rollout.surge(count) for role, count in zip(ROLES, fleet, strict=True)}
    while {(pod.revision, pod.ends) for pod in world.pods.values()} != {("r2", None)} or len(world.pods) != sum(fleet):
        world.tick(want, round_s)
        for role in ROLES:
            assert len(world.serving(role)) >= floors[role]
            assert len(world.existing(role)) <= tops[role]
        assert any(all(pair) for pair in world.groups().values())
        assert world.now - began < 100_000
    return world.now - began


def batches(rollout: Rollout, count: int) -> int:
    return math.ceil(count / (rollout.surge(count) + rollout.unavailable(count) * (not rollout.surge(count))))


def fleet_world(kv: str = "same") -> PodWorld:
    return PodWorld(start_s=START_S, drain_s=DRAIN_S, prints=KV[kv])


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("round_s", [2.0, 10.0])
@pytest.mark.parametrize(
    "rollout", [Rollout(max_surge="10%"), Rollout(max_surge="25%"), Rollout(max_surge=0, max_unavailable="10%")], ids=str
)
def test_96p144d_rolls_in_as_many_batches_as_the_surge_allows(kv: str, round_s: float, rollout: Rollout) -> None:
    """Rounds of the operator come every 2 s, or every 10 s where the API server is slow.

    A canary of each role at once, then batches of both roles at once: (instances / surge) x (start + drain). Asked for is
    (instances / surge) x (start + canary + drain) x 1.2, with a canary in each batch; a canary is waited for once.
    """
    took = rolled(fleet_world(kv), rollout, round_s=round_s)
    most = max(batches(rollout, count) for count in FLEET)
    assert took <= (START_S + most * (START_S + DRAIN_S + 2 * round_s)) * 1.2


def test_both_roles_roll_at_once() -> None:
    """Together they take no longer than the slower one alone."""
    rollout = Rollout(max_surge="10%")
    alone = fleet_world()
    alone.run(wish(*FLEET, rollout=rollout), limit=300)
    began, want = alone.now, wish(*FLEET, "r1", "r2", rollout=rollout)
    while {pod.revision for pod in alone.existing(Role.DECODE)} != {"r2"}:
        alone.tick(want, 2.0)
        assert alone.now - began < 50_000
    assert rolled(fleet_world(), rollout) <= (alone.now - began) * 1.1


def test_other_kv_stays_in_balance_within_a_batch() -> None:
    """The share of each role that is still old differs by no more than a batch, although both drain in the same round."""
    rollout, world, fleet = Rollout(max_surge="25%"), fleet_world("other"), (8, 16)
    world.run(wish(*fleet, rollout=rollout), limit=300)
    want, began, apart = wish(*fleet, "r2", rollout=rollout), world.now, 0.0
    while {pod.revision for pod in world.pods.values()} != {"r2"}:
        world.tick(want, 1.0)
        old = [sum(pod.revision == "r1" for pod in world.serving(role)) / count
               for role, count in zip(ROLES, fleet, strict=True)]
        apart = max(apart, abs(old[0] - old[1]))
        assert world.now - began < 10_000
    assert apart <= 1 / 8


def test_counts_that_differ_much_roll_at_once_too() -> None:
    """A number is a surge of each role: 4 of 4 and 4 of 64 at a time. The larger role sets the pace."""
    rollout = Rollout(max_surge=4)
    for kv in KV:
        took = rolled(fleet_world(kv), rollout, fleet=(4, 64))
        assert took <= (START_S + 16 * (START_S + DRAIN_S + 4)) * 1.2
