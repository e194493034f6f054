"""What links carry is learned from what comes through them while others wait, and asks for the instances it needs."""

from __future__ import annotations

import msgspec
import pytest

from xpyd_operator.plan.planner import need
from xpyd_operator.plan.planner.capacity import Capacity
from xpyd_operator.plan.planner.figures import Bounds, Figures, Goals, RoleFigures
from xpyd_operator.plan.planner.gather import Gather
from xpyd_operator.simulation.controllers import PlannerController, Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.trace import Arrival
from xpyd_operator.simulation.world import World
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.intake import Intake
from xpyd_sidecar.contract.membership import Load

MODEL = EngineModel(prefill_rate=20_000, step_base=0.01, step_per_request=0.001, kv_tokens=400_000, cold_start=60.0,
                    kv_bytes=100_000.0, link=1e9)
GOALS = Goals(ttft_s=3.0, tpot_s=0.06, cold_start_s=60.0)
WAITS = Figures(
    over_s=30.0, arrivals=150, arrived_tokens=600_000, ended=100, prompt_tokens=400_000, prompt_squares=1.6e9,
    output_tokens=3000, parked=60, link_bytes=30e9, handover_s=8.0, tpot_mean=0.02, tpot_p95=0.02,
    prefill=RoleFigures(ready=3, busy=2.0, running=3.0), decode=RoleFigures(ready=1, busy=1.0, running=5.0, kv_usage=0.1),
)


def test_a_link_is_known_once_others_waited_for_it_and_there_was_room() -> None:
    known = Capacity().with_interval(WAITS, 600_000)
    assert known.link == pytest.approx(1e9)
    assert known.link_waits
    assert known.full == 0  # decode had room
    assert known.token_bytes == pytest.approx(50_000)
    free = Capacity().with_interval(msgspec.structs.replace(WAITS, handover_s=0.05, parked=0), 600_000)
    assert free.link == 0
    assert not free.link_waits


def test_kv_that_waits_for_room_tells_nothing_of_the_link() -> None:
    full = msgspec.structs.replace(WAITS, decode=RoleFigures(ready=1, busy=1.0, running=5.0, kv_usage=0.95))
    known = Capacity().with_interval(full, 600_000)
    assert known.link == 0
    assert known.full == 5.0
    untold = Capacity().with_interval(msgspec.structs.replace(WAITS, link_bytes=0.0), 600_000)
    assert untold.link == 0
    assert untold.full == 5.0


def test_what_a_link_was_seen_to_carry_it_can_carry_and_it_is_forgotten_slowly() -> None:
    known = Capacity().with_interval(WAITS, 600_000)
    free = msgspec.structs.replace(WAITS, handover_s=0.05, parked=0)
    for _ in range(20):  # ten minutes
        known = known.with_interval(free, 600_000)
    assert 1e9 <= known.link < 1.1e9
    more = known.with_interval(msgspec.structs.replace(free, link_bytes=60e9), 600_000)
    assert more.link == pytest.approx(2e9)


def test_the_role_that_has_fewer_instances_tells_what_one_link_carries() -> None:
    two = msgspec.structs.replace(
        WAITS, prefill=RoleFigures(ready=2, busy=2.0), decode=RoleFigures(ready=5, busy=5.0, running=5.0, kv_usage=0.1))
    assert Capacity().with_interval(two, 600_000).link == pytest.approx(0.5e9)


def test_both_roles_need_so_many_links() -> None:
    known = Capacity().with_interval(WAITS, 600_000)
    assert need.link(0.0, Capacity()) == 0
    assert need.link(20_000, known) == 2  # 1 GB/s, at 92 %
    assert need.link(40_000, known) == 3
    assert need.link(1e9, known) == need.MOST


def test_a_decode_whose_link_is_used_up_is_given_others_and_the_sentence_says_why() -> None:
    trace = [Arrival(index * 0.25, 4000, 40) for index in range(4800)]  # 1.6 GB/s
    planner = PlannerController(GOALS, Bounds((1, 8), (1, 8)))
    run = World(trace, MODEL, (3, 1), planner).play()
    fixed = World(trace, MODEL, (3, 1), Static()).play()
    late = [index for index, each in enumerate(trace) if each.at > 600]
    assert sum(run.ttft[index] <= 3 for index in late) / len(late) > 0.99
    assert sum(fixed.ttft[index] <= 3 for index in late) / len(late) < 0.1
    asked = next(decision for _, decision in planner.decisions if decision.changes)
    assert "GB/s of KV at" in asked.sentence
    most = max(max(after) for _, _, after in run.changes)
    assert most <= 5  # two links carry it, and what has waited
    # While what waits is behind one link of two, the mean is less than what one carries; never less than half of it.
    assert 0.5e9 <= planner.memory.known.link <= 1.1e9


def fleet(**received: int) -> Fleet:
    return Fleet(
        service=ServiceName("s"), router="r", uptime_s=1.0, settled=True,
        instances=tuple(
            FleetInstance(
                instance=InstanceName(name), role=Role.PREFILL if name.startswith("p") else Role.DECODE, epoch=1,
                state=State.READY, incarnation=Incarnation("i"), fingerprint=Fingerprint("f"), http=(), control=(),
                model="m",
                load=Load(intake=Intake(links=(("shm", count - count // 2), ("tcp", count // 2)))), drained=False,
                in_flight=0, beat_age_s=1.0)
            for name, count in received.items()
        ))


def test_bytes_are_those_that_came_into_decode_since_the_last_look() -> None:
    gather = Gather()
    assert gather.figures({"r": fleet(d1=10**12, p1=5)}, 100.0) is None
    first = gather.figures({"r": fleet(d1=10**12, p1=9)}, 130.0)
    assert first is not None
    assert first.link_bytes == 0
    more = gather.figures({"r": fleet(d1=10**12 + 7 * 10**9, d2=10**11, p1=10**10)}, 160.0)
    assert more is not None
    assert more.link_bytes == 7e9
    again = gather.figures({"r": fleet(d1=5, d2=10**11 + 3)}, 190.0)
    assert again is not None
    assert again.link_bytes == 3.0
