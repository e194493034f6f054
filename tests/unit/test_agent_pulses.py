"""One word that changes as long as all workers of a member go on."""

from __future__ import annotations

from xpyd_sidecar.agent.pulses import Pulses
from xpyd_sidecar.contract.group import MemberState, Pulse

RUNS = MemberState("l", 1, 1, "a", running=True)


def looked(pulses: Pulses, now: float, *found: Pulse) -> tuple[Pulses, bool]:
    after = pulses.observe(RUNS, found, now)
    return after, after.word != pulses.word


def test_before_there_are_workers_the_launcher_alone_counts() -> None:
    assert looked(Pulses(), 0.0)[1]
    assert looked(Pulses(), 0.0, Pulse(7, "another life", 3))[1]


def test_one_worker_that_is_stopped_stops_the_word() -> None:
    pulses, _ = looked(Pulses(), 0.0, Pulse(7, "a", 1), Pulse(8, "a", 1))
    pulses, goes_on = looked(pulses, 1.5, Pulse(7, "a", 4), Pulse(8, "a", 1))
    assert goes_on
    pulses, goes_on = looked(pulses, 1.6, Pulse(7, "a", 4), Pulse(8, "a", 1))
    assert not goes_on
    pulses, goes_on = looked(pulses, 9.0, Pulse(7, "a", 10))
    assert not goes_on, "its file is gone, and it was there in this life"
    assert looked(pulses, 9.5, Pulse(7, "a", 10), Pulse(8, "a", 2))[1]


def test_a_step_that_does_not_end_stops_the_word_after_two_minutes() -> None:
    pulses = Pulses()
    for second in range(121):
        pulses, goes_on = looked(pulses, float(second), Pulse(7, "a", second, steps=5, inside=True))
        assert goes_on
    assert not looked(pulses, 121.0, Pulse(7, "a", 121, steps=5, inside=True))[1]
    assert looked(pulses, 121.0, Pulse(7, "a", 121, steps=6, inside=True))[1]
    assert looked(pulses, 121.0, Pulse(7, "a", 121, steps=5))[1]


def test_workers_of_the_life_before_are_forgotten() -> None:
    pulses, _ = looked(Pulses(), 0.0, Pulse(7, "a", 1))
    later = MemberState("l", 1, 3, "b", running=True)
    assert pulses.observe(later, [], 60.0).word != pulses.word
