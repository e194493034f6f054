"""A suspended service: routers first, then everything, nothing is made, and what is said of it."""

from __future__ import annotations

import msgspec
import pytest
from pod_world import PodWorld, wish

from xpyd_operator.api.status import Condition
from xpyd_operator.plan.absent import Breakage, Waiting
from xpyd_operator.plan.actions import Drain, Remove
from xpyd_operator.plan.conditions import conditions
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.news import news
from xpyd_operator.plan.observed import ObservedService, Phase
from xpyd_operator.plan.round import Round, think
from xpyd_operator.plan.suspension import MARGIN_S

WANT = wish(2, 2)


def suspended(since: float) -> DesiredService:
    return wish(0, 0, suspended_since=since)


def serving() -> PodWorld:
    world = PodWorld()
    world.run(WANT)
    assert len(world.observe().instances) == 4
    return world


def said(done: Round) -> dict[str, Condition]:
    return {each.type: each for each in done.status.conditions}


def test_all_go_at_once_as_deleted_pods_do_and_nothing_is_made() -> None:
    world = serving()
    want = suspended(world.now)
    plan = world.tick(want)
    assert [type(each) for each in plan.actions] == [Drain] * 4
    for _ in range(900):
        assert not world.tick(want).actions
        if not world.observe().instances:
            break
    assert not world.observe().instances, "they end within the time that pods have"
    world.run(WANT)
    assert len(world.observe().instances) == 4, "resumed"


def test_no_router_need_tell_a_load() -> None:
    world = serving()
    observed = msgspec.structs.replace(world.observe(), fleet_known=False)
    assert len(think(suspended(world.now), observed, world.now).plan.actions) == 4


def test_what_does_not_serve_goes_too_and_what_is_lost_holds_nothing_up() -> None:
    first, second, third, fourth = serving().observe().instances
    there = (msgspec.structs.replace(first, phase=Phase.CRASHED), msgspec.structs.replace(second, phase=Phase.STARTING),
             msgspec.structs.replace(third, phase=Phase.LOST, absent=Breakage("Lost", "its node is away")),
             msgspec.structs.replace(fourth, phase=Phase.STOPPING))
    done = think(suspended(5.0), ObservedService(there), 5.0)
    assert done.plan.actions == (Remove(first.name, "the service is suspended"),
                                 Remove(second.name, "the service is suspended"))
    rest = said(think(suspended(5.0), ObservedService(there[2:3]), 5.0))
    assert (rest["Suspended"].status, rest["Degraded"].reason) == ("True", "Lost")


@pytest.mark.parametrize("later", [-MARGIN_S - 1.0, 600.0 + MARGIN_S])
def test_instances_wait_for_routers_in_pods_of_their_own_and_not_for_ever(later: float) -> None:
    there = serving().observe().instances
    observed = ObservedService(there, routers=("qwen-router-a",))
    for now in (4.9, 6.0):  # a round begins before it reads the document
        done = think(suspended(5.0), observed, now)
        assert done.plan.actions == ()
        assert "streams end first in qwen-router-a" in done.plan.waits[0].message
    assert len(think(suspended(5.0), observed, 5.0 + later).plan.actions) == 4, "late, or the clock was set back"
    assert len(think(suspended(5.0), ObservedService(there), 6.0).plan.actions) == 4, "they have gone"


def test_it_is_not_ready_while_it_ends_and_nothing_is_said_of_ready_once_it_has() -> None:
    there = serving().observe().instances
    ending = said(think(suspended(5.0), ObservedService(there), 5.0))
    assert {kind: (each.status, each.reason) for kind, each in ending.items()} == {
        "Ready": ("False", "Suspending"), "Suspended": ("False", "Suspending"), "Progressing": ("True", "Suspending"),
        "Degraded": ("False", "Healthy")}
    assert "qwen-e0, qwen-e1, qwen-e2 and 1 more" in ending["Ready"].message
    ended = think(suspended(5.0), ObservedService(), 5.0).status
    assert [(each.type, each.status, each.reason) for each in ended.conditions] == [
        ("Suspended", "True", "Suspended"), ("Progressing", "False", "Suspended"), ("Degraded", "False", "Healthy")]
    assert (ended.wanted, ended.ready) == ("0P0D", "0P0D")
    router = said(think(suspended(5.0), ObservedService(routers=("qwen-router-a",)), 5.0))
    assert router["Suspended"].status == "False"


@pytest.mark.parametrize("after", [Waiting("Waiting", "a Service waits: for x"), Breakage("Failed", "it is forbidden")])
def test_what_a_round_could_not_do_is_said_and_it_is_not_at_rest(after: Waiting | Breakage) -> None:
    done = think(suspended(5.0), ObservedService(), 5.0)
    found = {each.type: each for each in conditions(done.desired, done.observed, done.plan, done.status.roles, (after,))}
    assert found["Suspended"].status == "False"
    assert after.message in found["Progressing"].message + found["Degraded"].message


@pytest.mark.parametrize("kind", ["Ready", "Suspended"])
def test_the_first_condition_is_the_one_whose_reason_kubectl_shows(kind: str) -> None:
    want = WANT if kind == "Ready" else suspended(5.0)
    assert think(want, ObservedService(), 5.0).status.conditions[0].type == kind


def test_news_are_the_beginning_the_end_and_that_it_is_resumed_and_no_warning() -> None:
    world, told = serving(), []
    before: Round | None = think(WANT, world.observe(), world.now)
    for want in (*[suspended(world.now)] * 700, *[WANT] * 60):
        done = think(want, world.observe(), world.now)
        for action in done.plan.actions:
            world.apply(action)
        told += [each for each in news(before, done) if each.instance is None]
        before = done
        world.advance(1.0)
    assert [each.reason for each in told] == ["Suspending", "Suspended", "Resumed", "Ready", "Compatible"]
    assert {each.type for each in told} == {"Normal"}
