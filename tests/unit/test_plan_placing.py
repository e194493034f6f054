"""Instances of several parts find their places one at a time, and half a one does not keep them for ever."""

from __future__ import annotations

from typing import Any

import msgspec
from pod_world import wish

from xpyd_operator.plan.absent import UNPLACED, Breakage, Waiting
from xpyd_operator.plan.actions import Create, Remove
from xpyd_operator.plan.desired import DesiredService, Revision
from xpyd_operator.plan.observed import BROKEN, UNFINISHED, Instance, ObservedService, Phase
from xpyd_operator.plan.placing import BOUND_S, HALF_S, MADE_S, PAUSE_S, SPREAD_S, pause_s, turns
from xpyd_operator.plan.step import step
from xpyd_sidecar.contract.ids import InstanceName, Role

NOW = 10_000.0
NO_NODE = Waiting(UNPLACED, "no node takes it", place=True)


def one(ordinal: int, unplaced: int = 0, *, since_ago: float = 20.0, parts: int = 2, **more: Any) -> Instance:
    phase = Phase.STARTING if unplaced else Phase.READY
    given: dict[str, Any] = {
        "phase": phase, "since": NOW - since_ago, "absent": NO_NODE if unplaced else None, "parts": parts,
        "placed": parts - unplaced, "unplaced": unplaced, "unplaced_since": NOW - since_ago if unplaced else 0.0}
    return Instance(InstanceName(f"qwen-e{ordinal}"), ordinal, Role.DECODE, Revision("r1"), **(given | more))


def groups(prefill: int, decode: int, **more: Any) -> DesiredService:
    want = wish(prefill, decode, **more)
    return msgspec.structs.replace(want, decode=msgspec.structs.replace(want.decode, parts=2))


def actions(want: DesiredService, *instances: Instance) -> list[str]:
    seen = ObservedService(instances, fleet_known=False)
    return [str(each) for each in step(want, seen, NOW).actions if isinstance(each, Create | Remove)]


def test_where_all_fit_all_are_made_at_once() -> None:
    assert actions(groups(0, 3), one(0)) == ["create qwen-e1 as decode", "create qwen-e2 as decode"]


def test_while_one_waits_for_a_place_no_other_is_made_and_it_alone_goes_on() -> None:
    waiting = [one(1, 2), one(2, 1), one(3, 1), one(0)]
    gone, held = turns(waiting, (), NOW)
    assert [each.instance for each in gone] == ["qwen-e3", "qwen-e1"], "the one with most places stays"
    assert held == "1 of 2 parts of qwen-e2 find no place"
    assert actions(groups(0, 6), *waiting) == [f"remove {name}: qwen-e2 is placed first" for name in ("qwen-e3", "qwen-e1")]
    plan = step(groups(0, 6), ObservedService((one(0), one(2, 1))), NOW)
    assert [str(each) for each in plan.waits] == [f"creating 4 more of decode waits: {held}"]


def test_one_of_which_not_all_parts_can_be_made_goes_on_alone() -> None:
    """A quota may let one of them be made, where it lets no part of a second one be."""
    halves = [one(ordinal, missing=2, phase=Phase.STARTING, since_ago=MADE_S, parts=4, placed=0) for ordinal in (1, 2, 3)]
    halves[2] = msgspec.structs.replace(halves[2], parts=8, missing=1)
    gone, held = turns(halves, (), NOW)
    assert [each.instance for each in gone] == ["qwen-e1", "qwen-e2"], "the one with most parts stays"
    assert held == "1 of 8 parts of qwen-e3 could not be made yet"
    assert turns(halves, (), NOW, gang=True) == (gone, held), "a quota is none of a scheduler's"
    assert turns([one(1, missing=1, phase=Phase.STARTING, since_ago=MADE_S - 1)], (), NOW) == ([], "")


def test_parts_that_do_not_exist_have_no_place() -> None:
    half_made = one(1, 2, parts=16, placed=0, missing=14)
    found = turns([half_made, one(2, 3, parts=16)], (), NOW)
    assert ([each.instance for each in found[0]], found[1]) == (["qwen-e1"], "3 of 16 parts of qwen-e2 find no place")
    being_looked_at = one(1, 2, parts=16, placed=0)
    assert turns([being_looked_at], (), NOW) == ([], ""), "nobody waits for it: it holds nothing yet"


def test_instances_of_one_part_are_made_all_the_same() -> None:
    found = actions(groups(2, 2), one(0), one(1, 1))
    assert found == ["create qwen-e2 as prefill", "create qwen-e3 as prefill"]


def test_half_an_instance_goes_after_its_time_and_others_can_have_its_places() -> None:
    late = one(1, 1, since_ago=HALF_S)
    assert turns([one(1, 1, since_ago=HALF_S - 1)], (), NOW)[0] == []
    (gone,), _ = turns([late], (), NOW)
    assert (gone.instance, gone.pause_s) == ("qwen-e1", pause_s("", NOW))
    want = groups(0, 2)
    paused = msgspec.structs.replace(want, place_after=NOW + PAUSE_S + SPREAD_S)
    assert actions(paused, one(0)) == []
    assert actions(msgspec.structs.replace(want, place_after=NOW - 1), one(0)) == ["create qwen-e1 as decode"]
    back = msgspec.structs.replace(want, place_after=NOW + 10 * PAUSE_S)
    assert actions(back, one(0)) == ["create qwen-e1 as decode"], "the clock was set back"


def test_two_services_that_give_halves_back_at_once_do_not_try_again_at_once() -> None:
    """Each has half an instance where one has room: who comes back first finds all of its places before the other does."""
    apart = []
    for again in range(20):
        now = NOW + 700.0 * again
        half = one(1, 1, unplaced_since=now - HALF_S)
        pauses = [turns([half], (), now, uid=uid)[0][0].pause_s for uid in ("a", "b")]
        assert all(PAUSE_S <= each <= PAUSE_S + SPREAD_S for each in pauses)
        apart.append(abs(pauses[0] - pauses[1]))
    assert sum(each > 10.0 for each in apart) > 15, apart


def test_one_that_could_not_be_finished_leaves_time_to_others() -> None:
    late = one(1, phase=Phase.CRASHED, absent=Breakage(UNFINISHED, "1 of 2 pods", replaced=True), since_ago=60)
    plan = step(groups(0, 1), ObservedService((late,)), NOW)
    assert plan.actions[0] == Remove(late.name, "it will never run again: Unfinished", pause_s("", NOW))
    broken = msgspec.structs.replace(late, absent=Breakage(BROKEN, "a hole", replaced=True))
    gone = Remove(late.name, "it will never run again: Broken")
    assert step(groups(0, 1), ObservedService((broken,)), NOW).actions[0] == gone


def test_an_instance_without_any_place_may_wait_as_long_as_it_takes() -> None:
    assert turns([one(1, 2, since_ago=100 * HALF_S)], (), NOW)[0] == []


def test_nobody_waits_for_one_that_holds_nothing() -> None:
    """As where a new revision wants a topology that no node has: what breaks beside it is made anew all the same."""
    waiting = one(1, 2, since_ago=100 * HALF_S)
    assert turns([waiting, one(2, 2)], (), NOW) == ([], ""), "else the second would be made and taken away again and again"
    assert actions(groups(0, 3), waiting, one(0)) == ["create qwen-e2 as decode"]
    gone, held = turns([waiting, one(2, 1)], (), NOW)
    assert ([each.instance for each in gone], held) == (["qwen-e1"], "1 of 2 parts of qwen-e2 find no place")


def test_who_goes_anyway_does_not_hold_the_others_up() -> None:
    assert turns([one(1, 1), one(2, 2, phase=Phase.STOPPING)], {InstanceName("qwen-e1")}, NOW) == ([], "")


def test_where_a_scheduler_places_whole_instances_all_are_made_whatever_waits() -> None:
    waiting = [one(1, 2), one(2, 2), one(0)]
    assert turns(waiting, (), NOW, gang=True) == ([], "")
    want = msgspec.structs.replace(groups(0, 5), gang=True)
    assert actions(want, *waiting) == ["create qwen-e3 as decode", "create qwen-e4 as decode"]


def test_a_scheduler_that_leaves_halves_is_not_trusted_longer_than_it_takes_to_bind_one() -> None:
    being_bound = [one(1, 2), one(2, 1, since_ago=BOUND_S - 1)]
    assert turns(being_bound, (), NOW, gang=True) == ([], "")
    halves = [one(1, 2), one(2, 1, since_ago=BOUND_S), one(3, 1, since_ago=BOUND_S)]
    assert turns(halves, (), NOW, gang=True) == turns(halves, (), NOW)
    assert [each.instance for each in turns(halves, (), NOW, gang=True)[0]] == ["qwen-e3", "qwen-e1"]
