"""Whether a service is disaggregating: laws of ``intake_window``, with engines that are played at a beat in 3 s."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from beats import SERVICE, beat

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.intake import Disaggregation, Intake
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.pair_notes import RefusedPeer
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.observing.intake_window import KEPT_S, LEFT_OVER, READINGS, IntakeWindow

PROMPT = 2000
BYTES = 100_000
"""KV of one token."""
BEAT_S = 3
PATIENCE_S = 25
"""Of the 30 s that a user is promised; the operator's own look takes up to 5."""


class Played:
    """One prefill and one decode instance, with a request a second."""

    def __init__(self) -> None:
        self.roster = Roster(SERVICE, started=0.0, settle_s=0.0, missed_beats=3)
        self.window = IntakeWindow()
        self.now = 100.0
        self.counts = Intake(prompts=10**6, received=10**6)
        self.ready, self.refused = State.READY, ()
        self.seq = 0
        self.life = "i1"
        self.heard()

    def heard(self) -> None:
        self.seq += 1
        self.roster.on_message(self.now, beat("p1", Role.PREFILL, state=self.ready, seq=self.seq))
        self.roster.on_message(self.now, beat("d1", seq=self.seq, incarnation=self.life, refused=self.refused,
                                              load=Load(intake=self.counts)))

    def grow(self, *, received: int = 0, computed: int = 0, cached: int = 0, **outcomes: int) -> None:
        had, ended = self.counts, Counter(dict(self.counts.outcomes)) + Counter(outcomes)
        links = Counter(dict(had.links)) + Counter(tcp=received * BYTES)
        self.counts = Intake(
            prompts=had.prompts + received + computed + cached, cached=had.cached + cached,
            received=had.received + received, outcomes=tuple(sorted(ended.items())), links=tuple(sorted(links.items())))

    def second(self) -> Disaggregation:
        self.now += 1
        if int(self.now) % BEAT_S == 0:
            self.heard()
        return self.window.update(self.now, self.roster.members())

    def well(self) -> Disaggregation:
        self.window.on_opened(self.now, PROMPT, Counter())
        self.grow(received=PROMPT - 1, computed=1, ok=1)
        return self.second()

    def until(self, reason: str, step: str = "well") -> float:
        """Seconds until the verdict is that."""
        began = self.now
        while self.now - began < 120:
            if getattr(self, step)().reason == reason:
                return self.now - began
        raise AssertionError(f"never {reason}: {self.window.verdict}")

    def failing(self) -> Disaggregation:
        self.window.on_opened(self.now, PROMPT, Counter())
        self.grow(computed=PROMPT, checksum=1)
        return self.second()

    def alone(self) -> Disaggregation:
        self.window.on_opened(self.now, PROMPT, Counter())
        self.grow(computed=PROMPT)
        return self.second()

    def short(self) -> Disaggregation:
        self.window.on_opened(self.now, PROMPT, Counter(short=PROMPT))
        self.grow(computed=PROMPT)
        return self.second()


def test_healthy_traffic_is_received_with_its_link_and_speed() -> None:
    played = Played()
    played.until("Receiving")
    for _ in range(80):
        told = played.well()
    assert (told.holds, told.share) == ("True", 1.0)
    assert [(one.link, one.gb_s) for one in told.links] == [("tcp", pytest.approx(PROMPT * BYTES / 1e9, rel=0.02))]
    assert told.message == "decode received 100% of the prompts' tokens that it was to receive over tcp at 0.2 GB/s"


def test_failed_loads_show_within_the_promise_and_so_does_their_end() -> None:
    played = Played()
    played.until("Receiving")
    assert played.until("LoadsFail", "failing") <= PATIENCE_S
    assert (played.window.verdict.holds, dict(played.window.verdict.failed).keys()) == ("False", {"checksum"})
    assert "checksum" in played.window.verdict.message
    assert played.until("Receiving") <= PATIENCE_S


def test_prefill_that_is_away_shows_without_traffic_and_so_does_its_return() -> None:
    played = Played()
    played.until("Receiving")
    played.ready = State.STARTING
    assert played.until("NoPrefill", "second") <= BEAT_S + 1
    assert played.window.verdict.holds == "False"
    assert "p1 starting" in played.window.verdict.message
    for _ in range(60):
        played.alone()
    played.ready = State.READY
    assert played.until("Receiving") <= PATIENCE_S


def test_what_skips_by_rule_is_not_held_against_it() -> None:
    played = Played()
    played.until("Receiving")
    for _ in range(100):
        played.window.on_opened(played.now, 2 * PROMPT, Counter(short=PROMPT))
        played.grow(received=PROMPT - 1, computed=1 + PROMPT, ok=1)
        told = played.second()
        assert told.holds == "True", told
    assert "50% of the prompts' tokens skip prefill by rule (short" in told.message
    assert played.until("SkippedByRule", "short") <= PATIENCE_S
    assert played.window.verdict.holds == "False"


def test_prompts_that_decode_computes_for_no_known_reason_show() -> None:
    played = Played()
    played.until("Receiving")
    assert played.until("Computed", "alone") <= PATIENCE_S
    assert played.window.verdict.holds == "False"


def test_without_traffic_the_verdict_of_traffic_stands() -> None:
    played = Played()
    assert played.second().reason == "NoTraffic"
    played.until("LoadsFail", "failing")
    for _ in range(300):
        assert played.second().reason == "LoadsFail"


def test_pairs_that_cannot_be_are_no_disaggregation() -> None:
    played = Played()
    played.until("Receiving")
    played.refused = (RefusedPeer(InstanceName("p1"), Incarnation("i-p1"), "another layout"),)
    assert played.until("NoPair", "alone") <= BEAT_S + 1
    played.refused = ()
    assert played.until("Receiving") <= PATIENCE_S


def test_another_life_begins_anew() -> None:
    played = Played()
    played.until("Receiving")
    played.life, played.counts = "i2", Intake()
    for _ in range(10):
        played.well()
        assert played.window.verdict.holds == "True"
    rates = played.window.rates(InstanceName("d1"), Incarnation("i2"))
    assert rates is not None
    assert 0 < rates.received_s < 2 * PROMPT, "the first reading of a life counts nothing"
    assert played.window.rates(InstanceName("d1"), Incarnation("i1")) is None


def test_the_rest_of_a_block_that_each_load_leaves_is_no_failure() -> None:
    played = Played()
    for _ in range(60):
        played.window.on_opened(played.now, 100, Counter())
        played.grow(received=100 - LEFT_OVER, computed=LEFT_OVER, ok=1)
        played.second()
    assert (played.window.verdict.reason, played.window.verdict.share) == ("Receiving", 1.0)


def test_words_stay_while_the_reason_does() -> None:
    played = Played()
    played.until("Receiving")
    told = [played.well() for _ in range(int(3 * KEPT_S))]
    changes = sum(one is not before for before, one in pairwise(told))
    assert changes <= 3


def test_what_is_kept_is_bounded_and_goes_with_the_instance() -> None:
    played = Played()
    for _ in range(500):
        played.well()
    seen = played.window._seen
    assert all(len(one.readings) <= READINGS for one in seen.values())
    assert len(played.window._asked) <= READINGS
    played.window.update(played.now + 1, [])
    assert not played.window._seen


def test_the_best_speed_of_a_link_is_remembered() -> None:
    played = Played()
    for _ in range(30):
        played.window.on_opened(played.now, PROMPT, Counter())
        played.grow(received=10 * PROMPT, ok=10)
        played.second()
    for _ in range(60):
        played.well()
    rates = played.window.rates(InstanceName("d1"), Incarnation("i1"))
    assert rates is not None
    assert rates.bytes_s == pytest.approx(PROMPT * BYTES, rel=0.05)
    assert rates.best_bytes_s == pytest.approx(10 * PROMPT * BYTES, rel=0.05)
