"""The budget of bodies: what is held is what was taken, within its bounds, in every order of what can happen."""

from __future__ import annotations

import contextlib
import itertools
import math
import random

import pytest

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http import body_budget as bb
from xpyd_sidecar.router.http.body_budget import BodyBudget, HeldBody

SMALL = 4
BUDGET = 36
RESERVE, REST = 4, 28
"""The reserve, and what bodies may have of the 32 others."""
MB = 1_000_000
LARGE = 73_142_857
"""A budget of which large bodies may have 56 MB."""


def tiny() -> BodyBudget:
    """A budget of a few bytes."""
    return BodyBudget(BUDGET, SMALL)


def begun(budget: BodyBudget, name: str, length: int | None, now: float = 0.0) -> HeldBody:
    body, ended = budget.begin(name, length, now)
    assert body is not None
    assert not ended
    return body


def names(bodies: list[HeldBody]) -> list[str]:
    return [body.owner for body in bodies]


class World:
    """A budget, and what a simple account of it says."""

    def __init__(self) -> None:
        self.budget = tiny()
        self.now = 0.0
        self.here: dict[HeldBody, int] = {}
        self.is_whole: set[HeldBody] = set()
        self.gone: set[HeldBody] = set()
        self.bodies: list[HeldBody] = []
        self.once: list[int] = []
        """Sizes of those that came at once."""

    def do(self, step: tuple[str, int, int]) -> None:
        """One thing happens, some time after the one before."""
        what, which, size = step
        self.now += 0.4
        if what == "begin":
            self._begin(size)
        elif what == "once":
            free = RESERVE - self.budget.reserve.held if size <= SMALL else -1
            assert self.budget.at_once(size) == (size <= free)
            if size <= free:
                self.once.append(size)
        elif what == "once back":
            if self.once:
                self.budget.give_back(self.once.pop())
        elif which < len(self.bodies):
            self._to(what, self.bodies[which], size)
        self.check()

    def _begin(self, size: int) -> None:
        slow = {body for body in self.budget._coming if self.now - body.began >= 1.0}
        body, ended = self.budget.begin(f"b{len(self.bodies)}", size or None, self.now)
        self._ended(ended)
        assert set(ended) <= slow, "those that are old enough"
        if body is None:
            assert not ended, "nobody goes for one that is not begun"
            assert size > SMALL
        else:
            self.bodies.append(body)
            self.here[body] = 0
            if size > SMALL:
                assert self.budget.rest.held + size <= REST, "there is room for what was announced"

    def _to(self, what: str, body: HeldBody, size: int) -> None:
        if what == "grow" and body not in self.is_whole:
            ended = self.budget.grow(body, size, self.now)
            assert len(set(ended)) == len(ended)
            self._ended(ended, body)
            if body in self.here:
                self.here[body] += size
            if body in ended:
                assert ended[-1] is body
        elif what == "pass" and body not in self.is_whole:
            assert self.budget.grow(body, size, self.now, kept=False) == []
        elif what == "whole":
            self.budget.complete(body)
            self.is_whole.add(body)
        elif what == "back":
            self.budget.give_back(body)
            self.here.pop(body, None)
            self.gone.add(body)

    def _ended(self, ended: list[HeldBody], grower: HeldBody | None = None) -> None:
        for body in ended:
            assert body not in self.is_whole, "a whole body is never taken away"
            assert body not in self.gone, "ended twice"
            assert self.here.pop(body) or body is grower, "one without any bytes makes no room"
            self.gone.add(body)

    def check(self) -> None:
        """The laws."""
        budget = self.budget
        assert budget.held_bytes == sum(self.here.values()) + sum(self.once), "held is what was taken and not given back"
        assert 0 <= budget.reserve.held <= RESERVE
        assert 0 <= budget.rest.held <= REST
        for body in self.bodies:
            assert body.size == self.here.get(body, 0)
            assert body.ended == (body in self.gone)
            if body.room is budget.reserve:
                assert body.size <= SMALL
        assert set(budget._coming) == {body for body in self.here
                                       if body.room is budget.rest and body not in self.is_whole}


STEPS = [("begin", 0, 0), ("begin", 0, 3), ("begin", 0, 20), ("grow", 0, 3), ("grow", 0, 17), ("grow", 1, 3),
         ("grow", 1, 17),
         ("whole", 0, 0), ("back", 0, 0), ("back", 1, 0), ("once", 0, 3), ("once back", 0, 0)]


def test_the_laws_hold_in_every_interleaving_of_two_bodies() -> None:
    for steps in itertools.product(STEPS, repeat=5):
        if steps[0][0] in {"begin", "once"}:
            world = World()
            for step in steps:
                world.do(step)


@pytest.mark.parametrize("seed", range(20))
def test_the_laws_hold_with_many_bodies(seed: int) -> None:
    dice, world = random.Random(seed), World()
    for _ in range(2000):
        kind = dice.choice(["begin", "begin", "grow", "grow", "grow", "grow", "pass", "whole", "back", "once", "once back"])
        world.do((kind, max(0, len(world.bodies) - 1 - dice.randrange(12)), dice.choice([0, 1, 2, 4, 5, 9, 20, 27])))
    for body in (*world.bodies, *world.once):
        world.budget.give_back(body)
    assert world.budget.held_bytes == 0, "nothing is left of anybody"


def test_the_reserve_is_for_small_bodies_and_the_rest_for_all() -> None:
    budget = tiny()
    large = begun(budget, "large", 20)
    assert budget.grow(large, 20, 0.0) == []
    small = [begun(budget, f"s{number}", 3) for number in range(4)]
    for body in small[:3]:
        assert budget.grow(body, 3, 0.0) == []
    assert (budget.reserve.held, budget.rest.held) == (3, 26), "those without room in the reserve are in the rest"
    assert names(budget.grow(small[3], 3, 0.5)) == ["s1"], "and there the slowest goes, small or large"
    assert budget.held_bytes == 29


def test_a_small_body_that_becomes_large_takes_all_of_it_along() -> None:
    budget = tiny()
    body = begun(budget, "chunks", None)
    budget.grow(body, 3, 0.0)
    assert (budget.reserve.held, budget.rest.held) == (3, 0)
    budget.grow(body, 3, 0.0)
    assert (budget.reserve.held, budget.rest.held, body.size) == (0, 6, 6)


def test_the_slowest_goes_first_when_others_grow() -> None:
    budget = tiny()
    fast, slow, grower = (begun(budget, name, None) for name in ("fast", "slow", "grower"))
    for body, size in ((fast, 12), (slow, 9), (grower, 6)):
        assert budget.grow(body, size, 2.0) == []
    budget.grow(grower, 6, 3.0, kept=False)
    assert names(budget.grow(grower, 5, 4.0)) == ["slow"]
    assert (slow.ended, slow.size, budget.rest.held) == (True, 0, 23)
    assert budget.grow(slow, 5, 4.0) == [], "what still comes of it is nothing to anybody"
    assert budget.rest.held == 23


def test_the_young_go_after_all_others() -> None:
    """What has just begun has come with a few bytes, and is no slower for it than one that has stood still for long."""
    budget = tiny()
    old, young = begun(budget, "old", None, 8.9), begun(budget, "young", None, 9.5)
    budget.grow(old, 22, 9.0)
    budget.grow(young, 6, 10.0)
    assert young.speed(10.0) == 12.0 < old.speed(10.0)
    assert names(budget.grow(young, 2, 10.0)) == ["old"]


def test_where_all_others_are_whole_the_one_that_grows_goes_itself() -> None:
    budget = tiny()
    whole, body = begun(budget, "whole", None), begun(budget, "body", None)
    budget.grow(whole, 20, 1.0)
    budget.complete(whole)
    budget.grow(body, 6, 1.0)
    assert names(budget.grow(body, 6, 1.0)) == ["body"]
    assert (budget.rest.held, whole.size) == (20, 20)


def test_an_announcement_takes_the_room_of_slow_ones_alone() -> None:
    budget = BodyBudget(LARGE)
    stalled, fast = begun(budget, "stalled", 30 * MB), begun(budget, "fast", 30 * MB)
    budget.grow(stalled, 20 * MB, 1.0)
    budget.grow(fast, 28 * MB, 1.0)
    assert budget.begin("early", 30 * MB, 15.0) == (None, []), "both have come with more than a megabyte a second"
    assert budget.begin("soon", 30 * MB, 15.01) == (None, [])
    body, ended = budget.begin("late", 20 * MB, 21.0)
    assert body is not None
    assert (names(ended), fast.size) == (["stalled"], 28 * MB)


def test_nobody_is_ended_for_one_that_would_not_fit_even_so() -> None:
    budget = BodyBudget(LARGE)
    stalled, whole = begun(budget, "stalled", MB), begun(budget, "whole", 50 * MB)
    budget.grow(stalled, MB, 1.0)
    budget.grow(whole, 50 * MB, 1.0)
    budget.complete(whole)
    assert budget.begin("large", 30 * MB, 60.0) == (None, [])
    assert stalled.size == MB


def test_after_a_look_in_vain_no_other_is_made_for_a_while() -> None:
    budget = BodyBudget(LARGE)
    body = begun(budget, "stalled", None, 0.0)
    budget.grow(body, 50 * MB, 1.0)
    assert budget.begin("a", 20 * MB, 49.98)[0] is None
    assert budget.begin("b", 20 * MB, 50.01)[0] is None, "it is slow now, but nobody looks"
    assert budget.begin("c", 20 * MB, 50.04)[0] is not None
    assert body.ended


def test_the_last_eighth_of_the_rest_is_not_for_bodies() -> None:
    others = 0
    budget = BodyBudget(BUDGET, SMALL, lambda: others)
    large, more = begun(budget, "large", 28), begun(budget, "more", None)
    assert budget.begin("larger", 29, 0.0) == (None, [])
    assert budget.grow(large, 28, 0.0) == []
    budget.complete(large)
    assert names(budget.grow(more, 5, 0.0)) == ["more"]
    budget.give_back(large)
    others = 20
    assert budget.begin("large", 9, 0.0) == (None, [])
    begun(budget, "small enough", 8)


def test_bodies_that_come_too_slowly_are_let_go_for_a_request_if_that_is_enough() -> None:
    budget = BodyBudget(LARGE)
    slow, fast = begun(budget, "slow", 20 * MB), begun(budget, "fast", 30 * MB)
    budget.grow(slow, 5 * MB, 1.0)
    budget.grow(fast, 30 * MB, 1.0)
    assert budget.let_go(6 * MB, 10.0) == []
    assert budget.let_go(5 * MB, 10.1) == ["slow"]
    assert (slow.ended, budget.held_bytes) == (True, 30 * MB)


def test_of_several_keys_each_has_its_share_from_its_first_byte_on_and_one_body_always() -> None:
    budget = BodyBudget(BUDGET, SMALL)
    assert budget.shares.share == 16
    budget.shares.several = lambda: True
    first = budget.begin("first", 20, 0.0, "a")[0]
    assert first is not None
    assert budget.grow(first, 20, 0.0) == []
    with pytest.raises(HttpFault, match="a key's share is 16"):
        budget.begin("second", 5, 0.0, "a")
    chunks, other = budget.begin("chunks", None, 0.0, "a")[0], budget.begin("other", 8, 0.0, "b")[0]
    assert chunks is not None
    assert other is not None
    with pytest.raises(HttpFault) as fault:
        budget.grow(chunks, 1, 0.0)
    assert (fault.value.status, chunks.ended) == (429, True)
    assert budget.grow(chunks, 9, 0.0) == [], "what still comes of it is nothing to anybody"
    assert budget.grow(other, 8, 0.0) == []
    budget.complete(first)
    assert budget.shares.counted_bytes("a") == 20, "also while it waits"
    for body in (first, other, first):
        budget.give_back(body)
    assert (budget.shares._had, budget.held_bytes) == ({}, 0)


def test_what_is_counted_of_a_key_is_what_its_bodies_have() -> None:
    dice, budget = random.Random(3), tiny()
    budget.shares.several = lambda: True
    here: list[HeldBody] = []
    refused = 0
    for now in range(4000):
        with contextlib.suppress(HttpFault):
            refused += 1
            if dice.random() < 0.3:
                body, _ = budget.begin("x", dice.choice([None, 3, 9]), now / 4, dice.choice("ab"))
                here += [] if body is None else [body]
            elif here and dice.random() < 0.7:
                budget.grow(here[-1 - dice.randrange(min(6, len(here)))], dice.randrange(9), now / 4)
            elif here:
                budget.give_back(here.pop(dice.randrange(len(here))))
            refused -= 1
        for key in "ab":
            assert budget.shares.counted_bytes(key) == sum(body.size for body in here if body.key == key)
    assert refused > 50


def test_what_passes_through_counts_for_the_speed_alone() -> None:
    budget = tiny()
    body = begun(budget, "form", None)
    budget.grow(body, 10, 1.0)
    budget.grow(body, 990, 1.0, kept=False)
    assert (body.size, body.speed(2.0)) == (10, 500.0)
    assert math.isfinite(body.speed(0.0)), "also at the very moment of its head"


def test_the_numbers() -> None:
    budget = BodyBudget(512 << 20)
    assert (budget.reserve.limit, budget.whole_rest, budget.rest.limit) == (64 << 20, 448 << 20, 392 << 20)
    assert BodyBudget(LARGE).rest.limit == 56 * MB
    assert (bb.SMALL, budget.small) == (64 << 10, 64 << 10)
