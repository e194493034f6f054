"""Steps simulated to completion: exact sequences, and invariants over random walks."""

from __future__ import annotations

from random import Random

import pytest
from plan_world import World, desired

from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import Phase
from xpyd_operator.plan.step import step
from xpyd_sidecar.contract.ids import Role

ROLES = (Role.PREFILL, Role.DECODE)


def test_first_start_makes_router_and_instances_in_one_step() -> None:
    world = World()
    assert world.run(desired(1, 1)) == [
        "start the router: none runs",
        "create qwen-e0 as prefill",
        "create qwen-e1 as decode",
    ]


def test_1p1d_to_1p3d_to_2p1d() -> None:
    world = World()
    world.run(desired(1, 1))
    assert world.run(desired(1, 3)) == ["create qwen-e2 as decode", "create qwen-e3 as decode"]
    world.engines["qwen-e1"].load = 7
    world.engines["qwen-e2"].load = 2
    world.engines["qwen-e3"].load = 4
    assert world.run(desired(2, 1)) == [
        "create qwen-e4 as prefill",
        "drain qwen-e2: more than asked for",
        "drain qwen-e3: more than asked for",
        "remove qwen-e2: drained",
        "remove qwen-e3: drained",
    ]
    assert sorted(world.engines) == ["qwen-e0", "qwen-e1", "qwen-e4"]


def test_surplus_stays_until_the_other_role_is_ready() -> None:
    world = World()
    world.run(desired(1, 3))
    want = desired(2, 1)
    while world.ready(Role.PREFILL) < 2:
        plan = world.tick(want)
        assert world.ready(Role.DECODE) == 3
    assert "draining qwen-e3 waits: prefill has 1 of 2 ready" in [str(wait) for wait in plan.waits]


def test_surplus_goes_when_the_other_role_can_not_come() -> None:
    """A prefill that crashes again and again must not keep decode instances for ever: perhaps it lacks their memory."""
    world = World()
    world.run(desired(1, 3))
    world.broken.add("r1")
    for _ in range(60):
        world.tick(desired(2, 1))
    assert world.count(Role.DECODE) == 1


def test_freed_ordinals_are_used_again() -> None:
    world = World()
    world.run(desired(1, 3))
    world.run(desired(1, 1))
    assert world.run(desired(1, 2)) == ["create qwen-e2 as decode"]


def test_nothing_changed_nothing_done() -> None:
    world = World()
    world.run(desired(2, 2))
    for _ in range(50):
        plan = world.tick(desired(2, 2))
        assert plan.settled


def test_not_ready_instances_go_first_and_without_drain() -> None:
    world = World()
    world.run(desired(1, 1))
    world.tick(desired(1, 3))
    assert world.run(desired(1, 1)) == [
        "remove qwen-e3: more than asked for, and not serving",
        "remove qwen-e2: more than asked for, and not serving",
    ]


def test_nothing_that_serves_is_drained_while_no_router_tells_the_load() -> None:
    world = World()
    world.run(desired(1, 2))
    world.fleet_known = False
    plan = world.tick(desired(1, 1))
    assert plan.actions == ()
    assert [str(wait) for wait in plan.waits] == ["draining qwen-e2 waits: no router tells the load of the instances"]


def test_a_drain_ends_at_its_timeout() -> None:
    world = World(drain_s=10_000)
    world.run(desired(1, 2))
    assert world.run(desired(1, 1, drain_timeout_s=30.0))[-1] == "remove qwen-e2: not drained within 30 s"


def test_an_engine_that_does_not_get_ready_is_restarted() -> None:
    world = World(start_s=1e9)
    want = desired(1, 1, startup_timeout_s=20.0)
    for _ in range(25):
        world.tick(want)
    assert world.log[-2:] == [
        "restart engine of qwen-e0: not ready within 20 s",
        "restart engine of qwen-e1: not ready within 20 s",
    ]


def test_crashes_back_off_from_one_second_to_a_minute() -> None:
    world = World(broken={"r1"})
    want = desired(1, 1)
    ends, restarts = [], []
    for _ in range(4000):
        before = len(world.log)
        crashes = world.engines["qwen-e0"].crashes if world.engines else 0
        plan = step(want, world.observe(), world.now)
        for action in plan.actions:
            world.apply(action)
        if any("qwen-e0" in line and "restart" in line for line in world.log[before:]):
            restarts.append(round(world.now - ends[-1], 1))
        world.advance(0.1)
        if world.engines["qwen-e0"].crashes > crashes:
            ends.append(world.now)
    assert restarts[:8] == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60], abs=0.11)


def test_a_long_healthy_run_resets_the_back_off() -> None:
    world = World()
    world.run(desired(1, 1))
    for _ in range(5):
        world.crash("qwen-e1")
        world.run(desired(1, 1))
    assert world.engines["qwen-e1"].crashes == 5
    world.advance(400)
    world.crash("qwen-e1")
    assert world.engines["qwen-e1"].crashes == 1


def test_a_crashed_router_comes_back_after_its_back_off() -> None:
    world = World()
    world.run(desired(1, 1))
    world.crash_router()
    plan = world.tick(desired(1, 1), seconds=1.5)
    assert plan.actions == ()
    assert "restarting the router waits: signal 9, 1 in a row" in str(plan.waits[0])
    assert world.run(desired(1, 1)) == ["start the router: signal 9"]


def test_changed_router_settings_restart_the_router_alone() -> None:
    world = World()
    world.run(desired(1, 2))
    assert world.run(desired(1, 2, router="router2")) == ["start the router: its settings changed"]


def test_the_end_stops_the_router_first_and_drains_what_serves() -> None:
    world = World()
    world.run(desired(1, 1))
    world.tick(desired(1, 2))
    world.log.clear()
    for _ in range(40):
        world.tick(desired(1, 2, stopping=True))
    assert world.log == [
        "stop the router: the service ends",
        "drain qwen-e0: the service ends",
        "drain qwen-e1: the service ends",
        "remove qwen-e2: the service ends",
        "remove qwen-e0: drained",
        "remove qwen-e1: drained",
    ]
    assert world.engines == {}


def test_without_a_router_of_its_own_none_is_started() -> None:
    world = World()
    assert world.run(desired(0, 1, router=None)) == ["create qwen-e0 as decode"]


def check_step(world: World, want: DesiredService, before: dict[Role, tuple[int, int]]) -> None:
    assert len({engine.ordinal for engine in world.engines.values()}) == len(world.engines)
    for role in ROLES:
        existed, _ = before[role]
        limit = want.target(role).replicas + want.target(role).max_surge
        assert world.count(role) <= max(limit, existed), f"{role}: above surge"


@pytest.mark.parametrize("seed", range(60))
def test_random_walks_keep_the_laws_and_converge(seed: int) -> None:
    """Counts and revisions change, engines and router crash, drains hang; after each change of wishes:

    what exists never grows above replicas + surge, what the planner takes from service leaves what is asked for (less
    max_unavailable during a rollout), and once the faults end everything settles and stays still.
    """
    random = Random(seed)
    surge, unavailable = random.choice([(1, 0), (2, 0), (1, 1), (0, 1), (3, 1)])
    world = World(start_s=random.choice([1, 7, 20]), drain_s=random.choice([0, 5, 40]), stop_s=random.choice([0, 2, 6]))
    want = desired(1, 1)
    for _ in range(300):
        if random.random() < 0.05:
            want = desired(
                random.randrange(0, 4),
                random.randrange(1, 5),
                revision=random.choice(["r1", "r1", "r2", "r3"]),
                router=random.choice(["router1", "router1", "router2"]),
                max_surge=surge,
                max_unavailable=unavailable,
                drain_timeout_s=30.0,
            )
        if random.random() < 0.03 and world.engines:
            name = random.choice(sorted(world.engines))
            if world.engines[name].phase is not Phase.STOPPING:
                world.crash(name)
        if random.random() < 0.02 and world.router is not None:
            world.crash_router()
        world.fleet_known = random.random() > 0.1
        world.shuffle_load(random)
        before = {role: (world.count(role), world.ready(role)) for role in ROLES}
        plan = step(want, world.observe(), world.now)
        for action in plan.actions:
            world.apply(action)
        check_step(world, want, before)
        for role in ROLES:
            serving = before[role][1]
            floor = want.target(role).replicas - want.target(role).max_unavailable
            assert world.ready(role) >= min(serving, floor), f"{role}: taken from service: {plan.actions}"
        again = step(want, world.observe(), world.now)
        assert not [action for action in again.actions if action in plan.actions], "an action was repeated"
        world.advance(1.0)
    world.fleet_known = True
    world.run(want, limit=1500)
    for role in ROLES:
        target = want.target(role)
        assert world.ready(role) == target.replicas == world.count(role)
        assert all(engine.revision == target.revision for engine in world.engines.values() if engine.role is role)
    assert step(want, world.observe(), world.now).settled
