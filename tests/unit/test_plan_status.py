from __future__ import annotations

from plan_world import World, desired

from xpyd_operator.plan.absent import put_off
from xpyd_operator.plan.actions import Plan
from xpyd_operator.plan.status import complete, is_true, status, words
from xpyd_operator.plan.step import step


def said(world: World, **more: object):
    want = desired(1, 3, **more)
    observed = world.observe()
    return status(want, observed, step(want, observed, world.now), world.now)


def test_a_settled_service_is_ready_and_has_no_plan() -> None:
    world = World()
    world.run(desired(1, 3))
    out = said(world)
    assert (out.wanted, out.ready, out.plan) == ("1P3D", "1P3D", None)
    assert is_true(out, "Ready")
    assert not is_true(out, "Progressing")
    assert not is_true(out, "Degraded")
    assert out.revisions == ("r1",)


def test_a_starting_service_says_what_is_missing() -> None:
    world = World()
    world.tick(desired(1, 3))
    out = said(world)
    assert out.ready == "0P0D"
    assert out.roles.decode.starting == 3
    condition = out.conditions[0]
    assert (condition.reason, condition.message) == (
        "Starting",
        "0 of 1 prefill instances ready, 0 of 3 decode instances ready",
    )


def test_a_crashed_instance_is_named_and_its_restart_announced() -> None:
    world = World()
    world.run(desired(1, 3))
    for _ in range(3):
        world.crash("qwen-e2")
    out = said(world)
    assert is_true(out, "Ready")
    assert not complete(out)
    assert out.conditions[0].reason == "Serving"
    assert out.conditions[0].message == "2 of 3 decode instances ready; crashed: qwen-e2"
    assert is_true(out, "Degraded")
    assert out.conditions[2].message == "qwen-e2: engine crashed 3 times in a row (exit code 1)"
    assert out.plan == "restarting engine of qwen-e2 waits: exit code 1, 3 in a row (in 4 s)"
    assert out.roles.decode.failed == 1


def test_router_trouble_comes_before_counts() -> None:
    world = World()
    world.run(desired(1, 3))
    world.crash_router()
    assert said(world).conditions[0].reason == "RouterDown"
    world.router = None
    assert said(world).conditions[0].reason == "RouterDown"


def test_stopping_is_not_ready_and_progressing() -> None:
    world = World()
    world.run(desired(1, 3))
    out = said(world, stopping=True)
    assert not is_true(out, "Ready")
    assert is_true(out, "Progressing")


def test_words_join_actions_and_waits() -> None:
    plan = Plan((), (put_off("a", "b", 12.0), put_off("c", "d")))
    assert words(plan, 10.0) == "a waits: b (in 2 s); c waits: d"
    assert words(Plan(), 10.0) == ""
