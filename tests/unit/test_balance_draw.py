from __future__ import annotations

from collections import Counter

from xpyd_sidecar.router.balance.candidates import Draw


def test_the_same_seed_gives_the_published_splitmix64_numbers() -> None:
    draw = Draw(1234567)
    assert [draw.bits() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_numbers_are_in_range_and_even() -> None:
    draw = Draw(1)
    counts = Counter(draw.below(5) for _ in range(5000))
    assert set(counts) == set(range(5))
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_two_are_different_and_every_pair_comes() -> None:
    draw = Draw(2)
    pairs = Counter(draw.two_below(3) for _ in range(600))
    assert set(pairs) == {(a, b) for a in range(3) for b in range(3) if a != b}
