"""Which decode instances route."""

from __future__ import annotations

import msgspec
from pod_world import PodWorld, wish

from xpyd_operator.plan.observed import Instance, ObservedService, Phase
from xpyd_operator.plan.routers import label, last_router
from xpyd_sidecar.contract.ids import InstanceName, Role

WANT = wish(1, 3, max_sidecars=2)


def decode(ordinal: int, phase: Phase = Phase.READY, flags: str = "", load: int = 0) -> Instance:
    """``flags``: r(oster), c(lients reach it), s(ettled)."""
    return Instance(
        InstanceName(f"q-e{ordinal}"),
        ordinal,
        Role.DECODE,
        WANT.decode.revision,
        phase,
        load=load,
        roster="r" in flags,
        router="c" in flags,
        settled="s" in flags,
    )


def said(*instances: Instance, going: tuple[str, ...] = (), last: str = "", most: int = 2) -> dict[str, tuple[bool, bool]]:
    want = msgspec.structs.replace(WANT, max_sidecars=most)
    return {one.instance: (one.roster, one.router) for one in label(want, ObservedService(instances), going, last)}


def test_the_first_ones_hear_the_roster_before_clients_reach_them() -> None:
    assert said(decode(0, Phase.STARTING), decode(1, Phase.STARTING), decode(2, Phase.STARTING)) == {
        "q-e0": (True, False),
        "q-e1": (True, False),
    }
    assert said(decode(0, flags="r"), decode(1, flags="rs")) == {"q-e1": (True, True)}


def test_nothing_changes_once_it_is_so() -> None:
    assert said(decode(0, flags="rcs"), decode(1, flags="rcs"), decode(2)) == {}


def test_who_is_ready_takes_the_place_of_who_is_not() -> None:
    assert said(decode(0, Phase.STARTING, "r"), decode(1, Phase.STARTING, "r"), decode(2)) == {
        "q-e1": (False, False),
        "q-e2": (True, False),
    }


def test_a_router_that_works_is_not_given_up_for_a_lower_ordinal() -> None:
    assert said(decode(0), decode(1, flags="rcs"), decode(2, flags="rcs")) == {}


def test_with_fewer_places_the_settled_one_keeps_clients() -> None:
    assert said(decode(0, flags="rc"), decode(1, flags="rcs"), most=1) == {"q-e0": (False, False)}


def test_an_unsettled_router_keeps_clients_and_what_leaves_keeps_everything() -> None:
    assert said(decode(0, flags="rc"), decode(1, Phase.STOPPING, "rcs"), decode(2, flags="rcs")) == {}
    assert said(decode(0, flags="rcs"), decode(1, flags="rcs"), decode(2), going=("q-e1",)) == {"q-e2": (True, False)}


def test_prefill_instances_lose_both_and_without_sidecars_nobody_is_labelled() -> None:
    wrong = msgspec.structs.replace(decode(0, flags="rcs"), role=Role.PREFILL)
    assert said(wrong, decode(1, flags="rcs")) == {"q-e0": (False, False)}
    assert said(decode(0), most=0) == {}


def test_the_last_router_stays_while_another_could_take_over() -> None:
    routing, heir = decode(0, flags="rcs"), decode(1)
    assert last_router(ObservedService((routing, heir)), {"q-e0"}) == "q-e0"
    assert last_router(ObservedService((routing, heir)), {"q-e1"}) == ""
    assert last_router(ObservedService((routing, heir)), {"q-e0", "q-e1"}) == ""
    assert last_router(ObservedService((routing, decode(1, flags="rcs"))), {"q-e0"}) == ""
    busy = (decode(0, flags="rcs", load=1), decode(1, flags="rcs", load=5), decode(2))
    assert last_router(ObservedService(busy), {"q-e0", "q-e1"}) == "q-e1"
    assert said(routing, heir, last="q-e0", most=1) == {"q-e1": (True, False)}


def test_a_rollout_hands_clients_over_and_always_has_a_router() -> None:
    for most in (1, 2, 8):
        world = PodWorld()
        world.run(wish(1, 1, max_sidecars=most))
        want = wish(1, 1, "r2", max_sidecars=most)
        for _ in range(80):
            world.tick(want)
            assert world.routing()
        assert {pod.revision for pod in world.pods.values()} == {"r2"}


def test_fewer_decode_instances_never_cost_the_only_router() -> None:
    world = PodWorld()
    world.run(wish(1, 4, max_sidecars=1))
    (router,) = world.routing()
    world.run(wish(1, 1, max_sidecars=1))
    assert [pod.name for pod in world.routing()] == [router.name]
