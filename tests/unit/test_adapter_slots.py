"""Where requests for adapters go: laws of ``AdapterSlots``, and how seldom engines change their adapters."""

from __future__ import annotations

from random import Random

from xpyd_sidecar.contract.adapters import AdapterReport
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.router.balance.adapter_slots import BOUND, FEW, AdapterSlots
from xpyd_sidecar.router.fleet.member import FleetMember


def members(count: int, slots: int) -> list[FleetMember]:
    told = AdapterReport(slots=slots)
    return [FleetMember(InstanceName(f"d{index}"), Role.DECODE, adapters=told) for index in range(count)]


def test_a_request_goes_to_who_has_the_adapter_while_that_is_not_loaded_far_above_the_others() -> None:
    slots, fleet = AdapterSlots(), members(4, 2)
    slots.use("sql", fleet[2])
    assert slots.narrow("sql", fleet) == [fleet[2]]
    fleet[2].in_flight = 3
    assert fleet[2].in_flight >= BOUND * (3 + 1) / 4 + FEW - 0.5
    fleet[2].in_flight = 20
    assert fleet[2] not in slots.narrow("sql", fleet)


def test_a_free_place_is_taken_before_an_adapter_is_pushed_out_and_routers_agree_where() -> None:
    fleet = members(4, 2)
    first, second = AdapterSlots(), AdapterSlots()
    assert first.narrow("sql", fleet) == second.narrow("sql", fleet)
    for name in ("a", "b"):
        first.use(name, fleet[0])
    for name in (f"n{index}" for index in range(50)):
        assert first.narrow(name, fleet) != [fleet[0]]


def test_where_places_are_not_known_all_may_be_chosen() -> None:
    slots, fleet = AdapterSlots(), members(3, 2)
    fleet[1].adapters = None
    assert slots.narrow("sql", fleet) is fleet
    fleet[1].adapters = AdapterReport()
    assert slots.narrow("sql", fleet) is fleet


def test_whoever_was_used_longest_ago_leaves_a_full_instance() -> None:
    slots, [one, *_] = AdapterSlots(), members(2, 2)
    assert [slots.use(name, one) for name in ("a", "b", "a", "c", "a", "b")] == [False, False, True, False, True, False]


def test_another_start_of_an_engine_has_none() -> None:
    slots, fleet = AdapterSlots(), members(2, 1)
    slots.use("sql", fleet[0])
    fleet[0].incarnation = type(fleet[0].incarnation)("another")
    slots.use("law", fleet[1])
    assert slots.narrow("sql", fleet) == [fleet[0]], "by its free place alone"
    assert not slots.use("sql", fleet[0])


def test_what_other_routers_sent_is_known_with_the_next_beat() -> None:
    slots, fleet = AdapterSlots(), members(2, 2)
    slots.use("a", fleet[0])
    fleet[0].load, fleet[0].beat_at = Load(adapters=("b", "c")), 1.0
    assert slots.narrow("c", fleet) == [fleet[0]]
    assert slots.use("a", fleet[0]), "it was sent after what the beat tells, or so it may be"
    assert not slots.use("b", fleet[0]), "which a's request has pushed out"
    fleet[0].load, fleet[0].beat_at = Load(adapters=("c", "d")), 2.0
    fleet[0].load, fleet[0].beat_at = Load(adapters=("e", "f")), 3.0
    assert slots.narrow("b", fleet) == [fleet[0]], "sent since the last beat that was looked at"


def test_engines_change_adapters_hardly_more_often_than_if_the_commonest_were_known() -> None:
    """1,000 adapters over 8 instances with 64 places each, asked for by a law of Zipf; 200 requests run at a time.

    Who knows how often each is asked for keeps the 512 commonest, and pays for every other one.
    """
    shares = [1 / (rank + 1) for rank in range(1000)]
    known = sum(shares[512:]) / sum(shares)
    random, slots, fleet = Random(7), AdapterSlots(), members(8, 64)
    names = [f"adapter-{index}" for index in range(1000)]
    random.shuffle(names)
    running: list[FleetMember] = []
    changes, began = 0, 10_000
    for at, name in enumerate(random.choices(names, shares, k=30_000)):
        if len(running) == 200:
            running.pop(random.randrange(200)).in_flight -= 1
        slots.count(name, fleet)
        chosen = min(slots.narrow(name, fleet), key=lambda one: one.in_flight)
        changes += not slots.use(name, chosen) and at >= began
        chosen.in_flight += 1
        running.append(chosen)
    assert changes / 20_000 < 1.35 * known
    assert max(one.in_flight for one in fleet) <= BOUND * 200 / 8 + FEW + 1
