"""Role switches, as plans of a small world without processes."""

from __future__ import annotations

import msgspec
import pytest
from plan_world import World, desired
from pod_world import PodWorld, wish

from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import Phase
from xpyd_operator.plan.step import step
from xpyd_operator.plan.switch import TAKE_S
from xpyd_sidecar.contract.ids import Role


def want(prefill: int, decode: int, **more: object) -> DesiredService:
    return desired(prefill, decode, **({"switches": True, "switch_window_s": 30.0} | more))


def served(prefill: int, decode: int, **more: object) -> World:
    world = World()
    world.run(want(prefill, decode, **more))
    return world


def test_a_surplus_and_a_deficit_are_one_switch_and_nothing_ends_or_starts() -> None:
    world = served(1, 2)
    assert world.run(want(2, 1)) == ["switch qwen-e2 to prefill: decode has 2 of 1, prefill 1 of 2"]
    assert (world.ready(Role.PREFILL), world.ready(Role.DECODE)) == (2, 1)
    assert world.run(want(1, 2)) == ["switch qwen-e2 to decode: prefill has 2 of 1, decode 1 of 2"]
    assert world.engines["qwen-e2"].epoch == 3


def test_the_least_loaded_switches_and_the_rest_of_a_deficit_is_made() -> None:
    world = served(1, 3)
    world.engines["qwen-e1"].load, world.engines["qwen-e2"].load, world.engines["qwen-e3"].load = 1, 7, 7
    log = world.run(want(3, 2))
    assert log[:2] == ["switch qwen-e1 to prefill: decode has 3 of 2, prefill 1 of 3", "create qwen-e4 as prefill"]


def test_instances_that_differ_in_more_than_the_role_are_replaced_and_the_field_is_named() -> None:
    world = served(1, 2)
    why = "spec.prefill and spec.decode differ in args[0]"
    plan = world.tick(want(2, 1, switches=False, no_switch=why))
    assert [str(action) for action in plan.actions] == ["create qwen-e3 as prefill"]
    assert [str(wait) for wait in plan.waits] == [
        f"draining qwen-e2 waits: prefill has 1 of 2 ready; it cannot become prefill: {why}"
    ]
    log = world.run(want(2, 1, switches=False, no_switch=why))
    assert not any(line.startswith("switch") for line in log)
    assert any(line.startswith("drain qwen-e2") for line in log)


def test_who_is_starting_for_less_than_the_window_gives_way_to_who_can_switch() -> None:
    """The pools are scaled one after the other: decode first, which begins a cold start, then prefill comes down."""
    world = World(start_s=100.0)
    for _ in range(110):
        world.tick(want(2, 1))
    assert (world.ready(Role.PREFILL), world.ready(Role.DECODE)) == (2, 1)
    assert [str(action) for action in world.tick(want(2, 2)).actions] == ["create qwen-e3 as decode"]
    world.advance(10)
    assert [str(action) for action in world.tick(want(1, 2)).actions] == [
        "switch qwen-e1 to decode: prefill has 2 of 1, decode 1 of 2",
        "remove qwen-e3: more than asked for, and not serving",
    ]


def test_a_surplus_waits_for_the_window_where_counts_are_set_one_by_one() -> None:
    world = served(2, 1)
    began = world.now
    down = want(1, 1, counts_since=began)
    plan = world.tick(down)
    assert not plan.actions
    assert [str(wait) for wait in plan.waits] == [
        "draining qwen-e1 waits: decode may want it within 30 s (rollout.switchWindow)"
    ]
    world.advance(10)
    assert [str(action) for action in world.tick(want(1, 2, counts_since=world.now)).actions] == [
        "switch qwen-e1 to decode: prefill has 2 of 1, decode 1 of 2"
    ]
    alone = served(2, 1)
    down = want(1, 1, counts_since=alone.now)
    for _ in range(30):
        assert not alone.tick(down).actions
    assert [str(action) for action in alone.tick(down).actions] == ["drain qwen-e1: more than asked for"]


def test_with_a_document_nothing_waits() -> None:
    world = served(2, 1)
    assert [str(action) for action in world.tick(want(1, 1)).actions] == ["drain qwen-e1: more than asked for"]


@pytest.mark.parametrize("change", [{"fleet_known": False}, {"stale": True}])
def test_no_switch_without_a_router_that_tells_or_while_a_revision_is_replaced(change: dict[str, bool]) -> None:
    world = served(1, 2)
    world.fleet_known = change.get("fleet_known", True)
    target = want(2, 1, revision="r2") if change.get("stale") else want(2, 1)
    assert not any("switch" in str(action) for action in step(target, world.observe(), world.now).actions)


def test_while_one_switches_nothing_that_serves_is_drained() -> None:
    world = served(2, 2)
    world.switch_s = 20.0
    world.tick(want(1, 3))
    plan = world.tick(want(1, 2))
    assert not any("drain " in str(action) for action in plan.actions)
    assert any("takes another role at present" in str(wait) for wait in plan.waits)


def test_who_never_takes_its_role_is_drained_and_replaced() -> None:
    world = served(2, 1)
    world.engines["qwen-e1"].deaf = True
    world.tick(want(1, 2))
    assert world.engines["qwen-e1"].role is Role.DECODE
    world.advance(TAKE_S)
    plan = step(want(1, 2), world.observe(), world.now)
    said = [str(action) for action in plan.actions]
    assert "drain qwen-e1: it did not become decode within 180 s" in said
    assert "create qwen-e3 as decode" in said
    world.enter(world.engines["qwen-e1"], Phase.DRAINING)
    again = [str(action) for action in step(want(1, 2), world.observe(), world.now).actions]
    assert not any("undrain" in line for line in again)


def test_the_last_router_that_clients_reach_does_not_switch_before_another_one_routes() -> None:
    more: dict[str, object] = {"switches": True, "switch_window_s": 30.0, "max_sidecars": 1}
    world = PodWorld()
    world.run(wish(1, 2, **more))
    [router] = [pod.name for pod in world.pods.values() if pod.router]
    world.pods[router].load, idle = 0, next(p for p in world.serving(Role.DECODE) if p.name != router)
    idle.load = 9
    log = world.run(wish(2, 1, **more))
    assert log == [f"switch {idle.name} to prefill: decode has 2 of 1, prefill 1 of 2"]
    assert world.routing()
    assert not idle.roster


def test_a_planner_that_begins_in_the_middle_goes_on_from_what_it_sees() -> None:
    """Every step from here follows from the observation: the same plan whoever makes it, and no second switch."""
    world = served(1, 2)
    world.switch_s = 5.0
    world.tick(want(2, 1))
    seen = world.observe()
    assert any(one.switching for one in seen.instances)
    assert not step(want(2, 1), seen, world.now).actions
    assert not step(msgspec.structs.replace(want(2, 1)), seen, world.now + 1).actions
