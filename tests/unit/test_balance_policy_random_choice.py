from __future__ import annotations

from collections import Counter
from random import Random

from members import member

from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.policies import Query


def test_all_come_about_equally_often_and_a_seed_repeats() -> None:
    members = [member(f"d{i}") for i in range(4)]
    first, again = policies.make("random", {}, Random(5).random), policies.make("random", {}, Random(5).random)
    drawn = [first.choose(Query(), members) for _ in range(2000)]
    assert drawn == [again.choose(Query(), members) for _ in range(2000)]
    counts = Counter(drawn)
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 400
