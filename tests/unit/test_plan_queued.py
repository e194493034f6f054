"""Pods that wait to be admitted (Kueue, scheduling gates): they are waited for, and nothing waits for them for ever."""

from __future__ import annotations

from pod_world import PodWorld, wish

from xpyd_operator.api.operation import Rollout
from xpyd_operator.plan.round import think
from xpyd_sidecar.contract.ids import Role

NO_SURGE = Rollout(max_surge=0, max_unavailable=1)


def test_it_serves_as_far_as_it_is_admitted_and_goes_on_by_itself() -> None:
    world = PodWorld(quota=2)
    want = wish(1, 3)
    world.run(want, quiet=30)
    assert (len(world.serving(Role.PREFILL)), len(world.serving(Role.DECODE))) == (1, 1)
    said = {each.type: each for each in think(want, world.observe(), world.now).status.conditions}
    assert (said["Ready"].reason, said["Progressing"].reason, said["Degraded"].reason) == ("Serving", "Queued", "Healthy")
    world.quota = 4
    assert world.run(want, quiet=30) == []
    assert len(world.serving(Role.DECODE)) == 3


def test_fewer_of_one_role_make_room_for_the_other_that_is_queued() -> None:
    """The quota is used up, so what is queued comes only when the surplus has gone: that must not wait for it."""
    world = PodWorld(quota=4)
    world.run(wish(1, 3))
    world.run(wish(2, 2))
    assert (len(world.serving(Role.PREFILL)), len(world.serving(Role.DECODE))) == (2, 2)


def test_a_rollout_without_surge_stays_within_the_quota() -> None:
    world = PodWorld(quota=5)
    world.run(wish(2, 3, rollout=NO_SURGE))
    world.run(wish(2, 3, "r2", rollout=NO_SURGE))
    assert {pod.revision for pod in world.pods.values()} == {"r2"}
    assert (len(world.serving(Role.PREFILL)), len(world.serving(Role.DECODE))) == (2, 3)


def test_a_canary_that_is_queued_costs_nothing() -> None:
    world = PodWorld(quota=4)
    world.run(wish(1, 3))
    want = wish(1, 3, "r2")
    world.run(want)
    assert {pod.revision for pod in world.serving(Role.DECODE)} == {"r1"}
    assert len(world.serving(Role.DECODE)) == 3
    said = {each.type: each for each in think(want, world.observe(), world.now).status.conditions}
    assert (said["Progressing"].reason, said["Degraded"].status) == ("Queued", "False")
    world.quota = 6
    world.run(want)
    assert {pod.revision for pod in world.pods.values()} == {"r2"}


def test_queued_ones_of_an_old_revision_are_replaced_at_once() -> None:
    """They began nothing, and would only stand in the queue before those that are wanted."""
    world = PodWorld(quota=0)
    world.run(wish(1, 2), quiet=10)
    world.run(wish(1, 2, "r2"), quiet=10)
    assert {pod.revision for pod in world.pods.values()} == {"r2"}
    assert len(world.pods) == 3


def test_an_instance_that_can_switch_is_not_left_idle_beside_one_that_is_queued() -> None:
    world = PodWorld(quota=4)
    settings = {"switches": True, "switch_window_s": 30.0}
    world.run(wish(1, 3, **settings))
    world.run(wish(2, 3, **settings), quiet=60)
    assert len(world.existing(Role.PREFILL)) == 2
    assert world.run(wish(2, 2, **settings)) == [
        "switch qwen-e3 to prefill: decode has 3 of 2, prefill 1 of 2",
        "remove qwen-e4: more than asked for, and not serving",
    ]
    assert (len(world.serving(Role.PREFILL)), len(world.serving(Role.DECODE))) == (2, 2)
