"""Sessions stay where they are, unless that is gone or overloaded."""

from __future__ import annotations

from collections import Counter
from random import Random

from members import member

from xpyd_sidecar.router.api.prompt import key_of
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.policies import ALWAYS, Query, SessionAffinity
from xpyd_sidecar.router.fleet.member import FleetMember

FLEET = tuple(member(f"e{number}") for number in range(8))


def made(seed: int = 1) -> SessionAffinity:
    return SessionAffinity(policies.make("random", {}, Random(seed).random))


def chosen(affinity: SessionAffinity, session: str, fleet: tuple[FleetMember, ...] = FLEET) -> FleetMember:
    key = key_of(session.encode()) if session else 0
    return fleet[affinity.choose(Query(session=key), fleet)]


def test_a_session_goes_to_one_instance_in_every_router() -> None:
    routers = [made(seed) for seed in range(3)]
    for number in range(200):
        assert len({chosen(router, f"s{number}").name for router in routers for _ in range(3)}) == 1
    counts = Counter(chosen(routers[0], f"s{number}").name for number in range(4000))
    assert min(counts.values()) > 350, "sessions are spread"


def test_requests_without_a_session_are_the_policys() -> None:
    affinity = made()
    assert len({chosen(affinity, "").name for _ in range(50)}) > 4


def test_when_its_instance_is_gone_a_session_moves_and_stays_there() -> None:
    affinity = made()
    home = chosen(affinity, "s")
    left = tuple(each for each in FLEET if each is not home)
    after = {chosen(affinity, "s", left).name for _ in range(20)}
    assert len(after) == 1
    assert chosen(affinity, "s") is home, "and goes back when it has come back"


def test_an_overloaded_instance_is_left_to_the_policy_until_it_is_not() -> None:
    fleet = tuple(member(f"e{number}") for number in range(8))
    affinity = made()
    home = chosen(affinity, "s", fleet)
    home.in_flight = ALWAYS
    assert len({chosen(affinity, "s", fleet).name for _ in range(40)}) > 3
    for each in fleet:
        each.in_flight = ALWAYS
    assert {chosen(affinity, "s", fleet).name for _ in range(20)} == {home.name}, "not more than the others"
