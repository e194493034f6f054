from __future__ import annotations

from collections import Counter
from random import Random

from members import member

from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.candidates import score
from xpyd_sidecar.router.balance.policies import Query


def test_the_most_loaded_of_three_is_never_chosen_and_the_least_most_often() -> None:
    members = [member("a", running=9), member("b", running=5, waiting=1), member("c", running=1)]
    policy = policies.make("least_loaded", {}, Random(3).random)
    counts = Counter(policy.choose(Query(), members) for _ in range(900))
    assert counts[0] == 0
    assert counts[2] > counts[1] > 200


def test_own_legs_since_the_beat_correct_a_stale_load() -> None:
    assert score(member("a", running=4, in_flight=7, at_beat=4)) == 7
    assert score(member("a", running=4, in_flight=1, at_beat=4)) == 1
    assert score(member("a", running=0, in_flight=2, at_beat=2)) == 2, "never less than what is open here"


def test_a_herd_does_not_form_between_two_beats() -> None:
    members = [member("a", running=0), member("b", running=3)]
    policy = policies.make("least_loaded", {}, Random(1).random)
    for _ in range(9):
        members[policy.choose(Query(), members)].in_flight += 1
    assert [m.in_flight for m in members] in ([6, 3], [5, 4])


def test_a_single_one_is_chosen() -> None:
    assert policies.make("least_loaded", {}, Random(1).random).choose(Query(), [member("a")]) == 0
