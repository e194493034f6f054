"""A changed engine revision: sequences, balance between the roles, and broken revisions."""

from __future__ import annotations

import pytest
from plan_world import World, desired

from xpyd_operator.plan.canary import view
from xpyd_operator.plan.observed import Phase
from xpyd_operator.plan.rollout import missing, retire
from xpyd_sidecar.contract.ids import Role


def test_surge_then_drain_one_at_a_time() -> None:
    world = World()
    world.run(desired(1, 2))
    assert world.run(desired(1, 2, revision="r2")) == [
        "create qwen-e3 as prefill",
        "create qwen-e4 as decode",
        "drain qwen-e0: of an old revision, replaced",
        "drain qwen-e2: of an old revision, replaced",
        "remove qwen-e0: drained",
        "remove qwen-e2: drained",
        "create qwen-e0 as decode",
        "drain qwen-e1: of an old revision, replaced",
        "remove qwen-e1: drained",
    ]


def test_without_surge_one_leaves_before_one_comes() -> None:
    world = World()
    world.run(desired(1, 2))
    want = desired(1, 2, revision="r2", max_surge=0, max_unavailable=1)
    log = world.run(want)
    assert log[:2] == ["drain qwen-e0: of an old revision, replaced", "drain qwen-e2: of an old revision, replaced"]
    assert log.index("remove qwen-e2: drained") < log.index("create qwen-e2 as decode")


def test_old_instances_wait_for_both_roles_of_the_new_revision() -> None:
    world = World()
    world.run(desired(1, 1))
    world.tick(desired(1, 1, revision="r2"))
    world.enter(world.engines["qwen-e2"], Phase.READY)
    plan = world.tick(desired(1, 1, revision="r2"))
    assert [str(wait) for wait in plan.waits] == [
        "draining qwen-e0 waits: no decode instance of the new revision is ready",
    ]
    assert world.ready(Role.PREFILL) == 2


def test_a_revision_that_crashes_leaves_the_old_one_serving() -> None:
    world = World(broken={"r2"})
    world.run(desired(1, 2))
    want = desired(1, 2, revision="r2")
    for _ in range(300):
        world.tick(want)
        assert world.ready(Role.PREFILL) >= 1
        assert world.ready(Role.DECODE) >= 2
    assert world.run(desired(1, 2)) == [
        "remove qwen-e3: of an old revision and not serving",
        "remove qwen-e4: of an old revision and not serving",
    ]


def test_beside_a_broken_revision_a_crashed_old_instance_comes_back() -> None:
    world = World(broken={"r2"})
    world.run(desired(1, 1))
    want = desired(1, 1, revision="r2")
    for _ in range(30):
        world.tick(want)
    world.crash("qwen-e1")
    for _ in range(30):
        world.tick(want)
    assert world.engines["qwen-e1"].phase is Phase.READY


def test_a_crashed_instance_of_an_old_revision_is_replaced_rather_than_restarted() -> None:
    world = World()
    world.run(desired(1, 1))
    world.crash("qwen-e1")
    world.log.clear()
    world.tick(desired(1, 1, revision="r2"))
    assert "remove qwen-e1: of an old revision and not serving" in world.log


def test_fewer_instances_and_a_new_revision_at_once() -> None:
    """More old instances than replicas + surge in both roles: the surplus goes without waiting for the new revision."""
    world = World()
    world.run(desired(3, 3))
    world.run(desired(1, 1, revision="r2"))
    assert world.ready(Role.PREFILL) == world.ready(Role.DECODE) == 1


@pytest.mark.parametrize(("replicas", "surge", "made"), [(0, 1, 0), (1, 0, 1), (3, 1, 3), (3, 0, 3)])
def test_missing_from_nothing(replicas: int, surge: int, made: int) -> None:
    want = desired(replicas, 1, max_surge=surge)
    assert missing(view(Role.PREFILL, want.prefill, ()), 0) == made


def test_a_drain_is_taken_back_when_the_instance_is_wanted_again() -> None:
    world = World(drain_s=100)
    world.run(desired(1, 3))
    for _ in range(3):
        world.tick(desired(1, 1))
    assert world.count(Role.DECODE, Phase.DRAINING) == 2
    assert world.run(desired(1, 2)) == ["undrain qwen-e2: asked for again", "remove qwen-e3: drained"]


def test_an_instance_whose_drain_is_taken_back_is_not_made_a_second_time() -> None:
    world = World(drain_s=100)
    world.run(desired(1, 2))
    for _ in range(3):
        world.tick(desired(1, 1))
    assert world.run(desired(1, 2)) == ["undrain qwen-e2: asked for again"]


def test_leaving_instances_of_an_old_revision_count_against_the_surge() -> None:
    world = World(drain_s=100)
    world.run(desired(1, 3))
    for _ in range(3):
        world.tick(desired(1, 1))
    plan = world.tick(desired(1, 3, revision="r2"))
    assert [str(action) for action in plan.actions] == ["create qwen-e4 as prefill", "create qwen-e5 as decode"]
    assert [str(wait) for wait in plan.waits] == ["creating 2 more of decode waits: 3 exist, surge is 1"]


def test_retire_says_who_is_held_and_why() -> None:
    world = World()
    world.run(desired(1, 2))
    want = desired(1, 1)
    instances = world.observe().instances
    prefill, decode = (view(role, want.target(role), instances) for role in (Role.PREFILL, Role.DECODE))
    out = retire(decode, prefill, fleet_known=False)
    assert out.drain == ()
    assert [(instance.name, why) for instance, why in out.held] == [
        ("qwen-e2", "no router tells the load of the instances")
    ]
