"""Every state of the step rules within small bounds; larger ones are explored by ``campaign-dp``."""

import random

import pytest
from step_model import Bounds, Broken, explore, walk

from xpyd_sidecar.dp.look_ahead import LookAhead

ONE = LookAhead(1)

SOUND = {
    "two ranks": Bounds((2, 1)),
    "fixed look-ahead": Bounds((3, 2), policy=LookAhead(2)),
    "requests that end early": Bounds((3, 2), early_stop=True),
    "three ranks": Bounds((2, 1, 0)),
    "kv comes late": Bounds((2, 0), kv=(0, 1)),
    "kv comes late, three ranks": Bounds((2, 0, 0), kv=(0, 1, 0)),
    "kv never comes": Bounds((2, 0), kv=(0, 1), kv_comes=False),
    "a lost frame": Bounds((2, 1), losses=1),
    "pause and resume": Bounds((1, 1), pause=True),
    "pause and resume, a lost frame": Bounds((1, 0), pause=True, losses=1),
    "pause and resume, three ranks": Bounds((1, 0, 0), pause=True),
    "frames of an earlier epoch": Bounds((1, 0), pause=True, ghosts=2),
    "a rank dies": Bounds((2, 1), deaths=1),
}
BROKEN: dict[Broken, Bounds] = {
    "count before schedule": Bounds((2, 0), kv=(0, 1)),
    "no heartbeat": Bounds((2, 1), losses=1),
    "no dummy while waiting for KV": Bounds((2, 0), kv=(0, 1), kv_comes=False),
    "vote too early": Bounds((2, 1), pause=True, policy=ONE),
    "epoch ignored": Bounds((1, 0), pause=True, ghosts=1),
    "no watch": Bounds((2, 1), deaths=1),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_state_is_stuck_or_misaligned(name: str) -> None:
    found = explore(SOUND[name])
    print(f"{name}: {found.states} states, {found.transitions} transitions")
    assert found.verdict == "ok", found.trace
    assert found.states > 20


@pytest.mark.parametrize("broken", BROKEN)
def test_without_one_rule_the_ranks_get_stuck(broken: Broken) -> None:
    found = explore(BROKEN[broken]._replace(broken=broken))
    print(f"{broken}: stuck after {' > '.join(found.trace)}")
    assert found.verdict == "stuck"


def test_random_ways_with_deaths_end_with_everybody_ended() -> None:
    rng = random.Random(1)
    bounds = Bounds((4, 3, 2), kv=(0, 2, 0), losses=3, pause=True, deaths=1, early_stop=True)
    verdicts = {walk(bounds, rng).verdict for _ in range(100)}
    assert verdicts == {"ok"}
