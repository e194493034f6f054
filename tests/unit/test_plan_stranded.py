"""No state that only a person can leave: whatever was lost or taken, a service comes to what is wanted where there is room,
and to rest where there is not; and where two have places, they are a pair.
"""

from __future__ import annotations

import os
from random import Random

import msgspec
import pytest
from more_cases import more
from pod_world import ROLES, PodWorld, wish

from xpyd_operator.plan.actions import Create
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import ObservedService, Phase
from xpyd_operator.plan.step import step
from xpyd_operator.plan.stranded import AGAIN_S, STRANDED_S
from xpyd_sidecar.contract.ids import Role

ROUND_S = 5.0
REST_S = AGAIN_S + STRANDED_S
SEEDS = 20
WORLDS = int(os.environ.get("XPYD_WORLDS", "400")) // SEEDS
"""Worlds of each seed."""


def served(world: PodWorld) -> tuple[int, int]:
    return len(world.serving(Role.PREFILL)), len(world.serving(Role.DECODE))


def rest(world: PodWorld, want: DesiredService, limit_s: float = 4000.0) -> list[str]:
    """Run until nothing was done for ``REST_S``; what was done but for labels."""
    begin, quiet, ends = len(world.log), 0.0, world.now + limit_s
    while quiet < REST_S:
        assert world.now < ends, f"no rest: {world.log[begin:][-12:]}"
        quiet = 0.0 if world.tick(want, ROUND_S).actions else quiet + ROUND_S
    return [line for line in world.log[begin:] if "route" not in line and "roster" not in line]


def only(world: PodWorld, role: Role, want: DesiredService) -> None:
    """All pods of the other role have gone, and their places are somebody else's."""
    for pod in [pod for pod in world.pods.values() if pod.role is not role]:
        del world.pods[pod.name]
    world.room = len(world.pods)
    world.tick(want, ROUND_S)


@pytest.mark.parametrize("room", [2, 3])
def test_2p2d_with_room_for_less_is_a_pair_at_once(room: int) -> None:
    world, want = PodWorld(room=room), wish(2, 2, same_places=True)
    rest(world, want)
    assert min(served(world)) == 1
    assert sum(served(world)) == room
    world.room = 4
    rest(world, want)
    assert served(world) == (2, 2)


@pytest.mark.parametrize("switches", [False, True])
@pytest.mark.parametrize("role", ROLES)
def test_where_one_role_has_all_places_the_other_gives_one_up(role: Role, switches: bool) -> None:
    world, want = PodWorld(), wish(2, 2, same_places=True, switches=switches)
    rest(world, want)
    only(world, role, want)
    began = world.now
    did = rest(world, want)
    assert served(world) == (1, 1)
    assert any(line.startswith("switch") for line in did) is switches
    assert world.now - began - REST_S < STRANDED_S + 60
    world.room = 4
    rest(world, want)
    assert served(world) == (2, 2)


def test_what_is_asked_for_when_one_role_has_all_places_needs_no_router() -> None:
    """Somebody asks for less, as the conditions tell him: it must not wait for a router, which lives beside decode."""
    world = PodWorld()
    rest(world, wish(2, 2))
    only(world, Role.PREFILL, wish(2, 2))
    assert served(world) == (2, 0)
    rest(world, wish(1, 1))
    assert served(world) == (1, 1)


def test_roles_that_need_other_nodes_give_nothing_up_for_each_other() -> None:
    world, want = PodWorld(), wish(2, 2)
    rest(world, want)
    only(world, Role.PREFILL, want)
    assert rest(world, want) == []
    assert served(world) == (2, 0)


def test_the_last_one_is_never_given_up_and_nothing_goes_while_the_place_before_may_still_be_found() -> None:
    world, want = PodWorld(), wish(3, 3, same_places=True)
    rest(world, want)
    only(world, Role.PREFILL, want)
    gone: list[float] = []
    for _ in range(400):
        world.room = 0  # somebody takes each place at once
        plan = world.tick(want, ROUND_S)
        gone += [world.now for action in plan.actions if "finds no place" in str(action)]
    assert len(gone) == 2
    assert gone[1] - gone[0] >= STRANDED_S
    assert served(world) == (1, 0)


def test_decode_which_serves_waits_for_long_before_it_gives_up_another_one() -> None:
    world, want = PodWorld(), wish(1, 4, same_places=True)
    rest(world, want)
    only(world, Role.DECODE, want)
    gone: list[float] = []
    while served(world) != (0, 1):
        world.room = 0
        plan = world.tick(want, ROUND_S)
        gone += [world.now for action in plan.actions if "finds no place" in str(action)]
        assert world.now < 5000
    assert len(gone) == 3
    assert gone[1] - gone[0] >= AGAIN_S
    assert gone[2] - gone[1] >= AGAIN_S


def test_who_waits_for_a_place_does_not_take_the_one_that_is_given_up() -> None:
    """Those of the same role were made first, so a scheduler would give it to them."""
    world, want = PodWorld(), wish(2, 4, same_places=True)
    rest(world, want)
    for pod in [pod for pod in world.pods.values() if pod.role is Role.PREFILL][:] + world.serving(Role.DECODE)[:2]:
        del world.pods[pod.name]
    world.room = 2
    for pod in world.pods.values():
        assert pod.scheduled
    rest(world, want)
    assert served(world) == (1, 1)


@pytest.mark.parametrize(("counts", "order"), [
    ((2, 2), "PDPD"), ((1, 3), "PDDD"), ((4, 2), "PDPPDP"), ((2, 6), "PDDDPDDD"), ((0, 2), "DD"), ((3, 3), "PDPDPD")])
def test_they_are_made_in_the_ratio_that_is_wanted(counts: tuple[int, int], order: str) -> None:
    made = [each for each in step(wish(*counts), ObservedService(), 1000.0).actions if isinstance(each, Create)]
    assert "".join(each.role.value[0].upper() for each in made) == order
    assert len({each.instance for each in made}) == sum(counts)


@pytest.mark.parametrize(("counts", "order"), [((1, 1), "DP"), ((2, 2), "DPPD"), ((0, 2), "DD")])
def test_where_decode_may_serve_alone_it_has_the_first_place(counts: tuple[int, int], order: str) -> None:
    want = msgspec.structs.replace(wish(*counts), decode_first=True)
    made = [each for each in step(want, ObservedService(), 1000.0).actions if isinstance(each, Create)]
    assert "".join(each.role.value[0].upper() for each in made) == order


def shaken(random: Random) -> tuple[PodWorld, DesiredService]:
    """A service in some state that places taken and given back, lost racks, preemption and quotas left behind."""
    counts = random.randint(1, 4), random.randint(1, 4)
    most = sum(counts) + 2
    world = PodWorld(room=random.randint(0, most), start_s=random.choice([5.0, 20.0]), drain_s=random.choice([5.0, 40.0]))
    settings = {"same_places": True, "switches": random.random() < 0.5, "switch_window_s": 30.0}
    want = wish(*counts, **settings)
    for _ in range(random.randint(1, 5)):
        match random.randrange(7):
            case 0:
                world.room = random.randint(0, most)
            case 1:
                world.quota = random.choice([None, random.randint(0, most)])
            case 2:
                rack = random.choice([(role,) for role in ROLES] + [ROLES])
                for pod in [pod for pod in world.pods.values() if pod.scheduled and pod.role in rack]:
                    world.lose(pod.name)
            case 3:
                for pod in list(world.pods.values()):
                    if pod.scheduled and random.random() < 0.5:
                        world.fail(pod.name)
            case 4:
                only(world, random.choice(ROLES), want)
            case 5:
                want = wish(random.randint(1, 4), random.randint(1, 4), **settings)
            case 6:
                world.nodes_back()
        for _ in range(random.choice([2, 10, 50])):
            world.tick(want, ROUND_S)
    world.nodes_back()
    return world, want


@pytest.mark.parametrize("seed", [*range(2), *more(range(2, SEEDS))])
def test_every_world_comes_to_what_is_wanted_or_to_rest(seed: int) -> None:
    for number in range(WORLDS):
        random = Random(f"{seed} {number}")
        world, want = shaken(random)
        wanted = want.prefill.replicas + want.decode.replicas
        world.quota, places = random.choice([(None, wanted), (None, wanted), (None, random.randint(2, 6)),
                                             (random.randint(2, 6), 1000)])
        used = [pod for pod in world.pods.values() if pod.scheduled and pod.phase is not Phase.LOST]
        for pod in random.sample(used, max(0, len(used) - places)):
            world.fail(pod.name)  # others take their places
        world.room = places
        did = rest(world, want)
        room = min(places, world.quota if world.quota is not None else places)
        if room >= wanted:
            assert served(world) == (want.prefill.replicas, want.decode.replicas), (seed, number, did[-8:])
        else:
            assert min(served(world)) >= 1, (seed, number, served(world), did[-8:])
        assert len(did) <= 8 * (wanted + 4), "back and forth"
