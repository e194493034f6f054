"""Legs of all workers together, and what an acknowledgement of a drain may say."""

from __future__ import annotations

import random

import pytest

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.workers.sharing import Key, LegCounts


def key(name: str) -> Key:
    return InstanceName(name), Incarnation(f"i-{name}")


def test_counts_are_sums_over_workers_and_a_worker_that_ends_takes_its_own_along() -> None:
    counts = LegCounts()
    counts.begin(1)
    counts.begin(2)
    assert counts.report(1, 1, [(*key("d0"), 3), (*key("d1"), 1)]) == [key("d0"), key("d1")]
    counts.report(2, 1, [(*key("d0"), 2)])
    assert (counts.of(key("d0")), counts.of(key("d1")), counts.of(key("d2"))) == (5, 1, 0)
    counts.report(1, 2, [(*key("d1"), 0)])
    assert counts.of(key("d1")) == 0
    counts.end(2)
    assert counts.of(key("d0")) == 3
    assert counts.report(2, 9, [(*key("d0"), 7)]) == [], "said before it ended, heard later"
    assert counts.of(key("d0")) == 3
    counts.begin(1)
    assert counts.of(key("d0")) == 0, "another process with this number has no legs"


def test_what_drains_counts_until_every_worker_knows_of_it() -> None:
    counts = LegCounts()
    for worker in (1, 2):
        counts.begin(worker)
        counts.report(worker, 5, [])
    counts.drains(key("d0"), 6)
    counts.drains(key("d0"), 8)  # each beat says so: the first counts
    assert counts.of(key("d0")) == 1
    assert counts.report(1, 6, []) == [key("d0")], "its count may be another now"
    assert counts.of(key("d0")) == 1
    counts.report(2, 7, [(*key("d0"), 2)])
    assert counts.of(key("d0")) == 2
    counts.report(2, 7, [(*key("d0"), 0)])
    assert counts.of(key("d0")) == 0
    counts.begin(2)
    assert counts.of(key("d0")) == 1, "a new worker knows nothing yet"
    counts.end(2)
    assert counts.of(key("d0")) == 0, "one that has ended picks nobody"
    counts.begin(2)
    counts.serves(key("d0"))
    assert counts.of(key("d0")) == 0
    counts.drains(key("d1"), 20)
    counts.keep({key("d0")})
    assert counts.of(key("d1")) == 0


@pytest.mark.parametrize("seed", range(20))
def test_whoever_may_still_be_picked_never_counts_as_free(seed: int) -> None:
    """Workers hear of a drain at any time, and pick what they do not know to drain; some end, others take their place."""
    dice = random.Random(seed)
    counts, index, drained_at = LegCounts(), 0, 0
    heard: dict[int, int] = {}
    legs: dict[int, int] = {}
    said: dict[int, int] = {}
    for _ in range(400):
        worker = dice.randrange(3)
        match dice.choice(["begin", "end", "hear", "pick", "over", "say", "say", "drain", "other"]):
            case "begin":
                counts.begin(worker)
                heard[worker] = legs[worker] = said[worker] = 0
            case "end":
                counts.end(worker)
                for known in (heard, legs, said):
                    known.pop(worker, None)
            case "hear" if worker in heard:
                heard[worker] = index
            case "pick" if worker in heard and not (drained_at and heard[worker] >= drained_at):
                legs[worker] += 1
            case "over" if legs.get(worker):
                legs[worker] -= 1
            case "say" if worker in heard:
                counts.report(worker, heard[worker], [(*key("d0"), legs[worker])])
                said[worker] = legs[worker]
            case "drain" if not drained_at and index > 20:
                index += 1
                drained_at = index
                counts.drains(key("d0"), index)
            case "other":
                index += 1
        if drained_at and counts.of(key("d0")) == 0:
            # All have said that they know, and that no leg is open: nobody can have one, now or later.
            assert not any(legs.values())
            assert all(at >= drained_at for at in heard.values())
