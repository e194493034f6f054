"""The goals of membership at scale, over the roster and the real encoders, with simulated time and fixed seeds."""

from __future__ import annotations

import pytest
from membership_sim import World

from xpyd_sidecar.contract.ids import InstanceName

MINUTES = 60.0


@pytest.mark.test_all
@pytest.mark.parametrize("seed", [1, 2])
def test_256_instances_with_a_tenth_of_beats_lost_for_ten_minutes_and_nobody_is_evicted(seed: int) -> None:
    world = World(256, seed=seed, lost=0.1)
    world.run(10 * MINUTES)
    assert world.beats > 256 * 190
    assert 0.09 < world.dropped / world.beats < 0.11
    assert world.probes > 10, "some were silent for three beats in a row, so the rule was tried"
    assert (world.evicted, world.suspended, world.given_up) == ([], [], 0)
    assert world.unpicked_s == 0


@pytest.mark.test_all
def test_1000_instances_with_a_tenth_of_beats_lost_for_four_minutes_and_nobody_is_evicted() -> None:
    world = World(1000, seed=4, lost=0.1)
    world.run(4 * MINUTES)
    assert world.probes > 50
    assert (world.evicted, world.unpicked_s) == ([], 0)


def test_a_quarter_of_beats_and_of_probes_lost_suspends_for_seconds_and_evicts_nobody() -> None:
    world = World(256, seed=5, lost=0.25, unanswered=0.25)
    world.run(10 * MINUTES)
    assert len(world.suspended) > 10, "the rule was tried"
    assert world.evicted == []
    assert world.unpicked_s / (256 * 10 * MINUTES) < 1e-3


def test_nodes_that_vanish_are_not_picked_after_a_quarter_of_a_minute_and_evicted_within_half_of_one() -> None:
    world = World(256, seed=6, lost=0.1)
    world.run(MINUTES)
    dead = {InstanceName(f"test-e{index}") for index in range(0, 256, 8)}
    for name in dead:
        world.kill(name)
    world.run(30.0)
    assert {name for _, name in world.evicted} == dead
    first = {name: at for at, name in reversed(world.suspended)}
    assert dead <= first.keys()
    assert max(first[name] for name in dead) < MINUTES + 3.15 + 9 + 1 + 5 + 0.1
    assert max(at for at, _ in world.evicted) < MINUTES + 30.0


def test_all_at_once_silent_but_alive_are_probed_in_turns_and_kept() -> None:
    """A switch that drops every beat for a minute."""
    world = World(256, seed=7)
    world.run(MINUTES)
    world._lost = 1.0
    world.run(MINUTES)
    world._lost = 0.0
    assert (world.evicted, world.suspended) == ([], [])
    assert world.probes > 256
    world.run(10.0)
    assert world.unpicked_s == 0
