"""The ring of seconds, by simulated clocks."""

from __future__ import annotations

import random

import msgspec
import pytest
from records import D1, P1, pair, record

from xpyd_sidecar.contract.fleet import Quantiles
from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.contract.totals import bucket_of
from xpyd_sidecar.router.observing import history as hi
from xpyd_sidecar.router.observing.batch import MAX_PAIRS, MEASURES, OTHER, of_records
from xpyd_sidecar.router.observing.record import Record


def close(history: hi.History, now: float, of: Record) -> None:
    history.on_closed(of_records(of.api, [msgspec.structs.replace(of, arrived_unix=now - of.last_at + of.arrived)]))


def test_a_percentile_is_right_within_its_bucket() -> None:
    draw = random.Random(7)
    values = sorted(draw.lognormvariate(-3, 1.2) for _ in range(5000))
    buckets: hi.Buckets = {}
    for value in values:
        buckets[bucket_of(value)] = buckets.get(bucket_of(value), 0) + 1
    found = hi.quantiles([buckets])
    assert found.count == 5000
    for share, seen in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert seen == pytest.approx(values[int(share * 5000) - 1], rel=0.05)
    assert hi.quantiles([]) == Quantiles() == hi.quantiles([{}])


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e-4, 1e9])
def test_durations_beyond_the_ends_have_a_bucket(seconds: float) -> None:
    assert 0 <= bucket_of(seconds) <= 200


def test_every_second_is_there_once() -> None:
    history = hi.History(100.9)
    history.advance(100.95, 1, 0)
    assert not history.seconds
    for now in (101.0, 101.5, 104.2, 104.1, 90.0, 105.0):
        history.advance(now, 3, 2)
    assert [second.at for second in history.seconds] == [100, 101, 102, 103, 104]
    assert history.seconds[2].in_flight == 3
    history.advance(105.0 + 10 * hi.SECONDS, 0, 0)
    assert [second.at for second in history.seconds] == list(range(105 + 9 * hi.SECONDS, 105 + 10 * hi.SECONDS))


def test_since_gives_what_a_reader_has_not_seen() -> None:
    history = hi.History(10.0)
    assert history.rows_since(0) == []
    history.advance(15.0, 0, 0)
    assert [row[0] for row in history.rows_since(12)] == [13, 14]
    assert [row[0] for row in history.rows_since(0)] == [10, 11, 12, 13, 14]
    assert history.rows_since(14) == [] == history.rows_since(99)


def test_a_request_counts_in_the_second_in_which_it_ends() -> None:
    history = hi.History(100.0)
    history.on_opened()
    history.advance(102.0, 1, 0)
    close(history, 102.5, record(P1, D1, retries=1, continued=2, bytes=70))
    history.advance(103.0, 0, 0)
    first, idle, last = history.seconds
    assert (first.opened, first.done, first.in_flight, idle.done) == (1, 0, 1, 0)
    assert (last.done, last.failed, last.retries, last.continued, last.tokens, last.bytes) == (1, 0, 1, 2, 11, 70)
    assert [sum(getattr(last, name).values()) for name in MEASURES] == [1, 1, 1, 1, 1]
    assert last.served == {"p1": 1, "d1": 1}
    row = dict(zip(hi.COLUMNS, history.seconds[-1].row, strict=True))
    assert (row["at"], row["done"], row["bytes"]) == (102, 1, 70)
    assert row["ttft_p50"] == row["ttft_p95"] == pytest.approx(0.5, rel=0.05)
    assert dict(zip(hi.COLUMNS, history.seconds[-2].row, strict=True))["ttft_p50"] is None
    assert not history.failures


def test_failures_keep_their_reason_and_are_bounded() -> None:
    history = hi.History(100.0)
    for number in range(100):
        close(history, 100.0, record(P1, D1, outcome="broken", detail=f"{number} " + "x" * 1000))
    history.on_refused(100.5, "q", "unavailable", 503, "no decode instance is known")
    history.on_refused(100.5, "q", "refused", 400, "bad JSON")
    close(history, 100.6, record(P1, D1, outcome="client_gone"))
    assert len(history.failures) == hi.MAX_NEWS
    assert history.failures[-1].detail == "no decode instance is known"
    kept = history.failures[-2]
    assert (kept.detail[:3], len(kept.detail), kept.prefill, kept.decode) == ("99 ", hi.MAX_WORDS, "p1", "d1")
    history.advance(101.0, 0, 0)
    assert (history.seconds[0].done, history.seconds[0].failed) == (103, 101)


def test_pairs_are_counted_with_their_rate_and_the_busiest_comes_first() -> None:
    history = hi.History(100.0)
    for decode, times in (("d1", 1), ("d2", 3)):
        for _ in range(times):
            close(history, 100.0, record(*pair("p1", decode, 0.1)))
    history.advance(101.0, 0, 0)
    busy, calm = hi.pairs(history.seconds, 2)
    assert (busy.prefill, busy.decode, busy.count, busy.per_s, busy.handover_s) == ("p1", "d2", 3, 1.5, pytest.approx(0.1))
    assert (calm.decode, calm.count) == ("d1", 1)


def test_pairs_beyond_the_bound_are_others() -> None:
    history = hi.History(100.0)
    for number in range(MAX_PAIRS + 50):
        close(history, 100.0, record(*pair("p1", f"d{number}")))
    history.advance(101.0, 0, 0)
    flows = history.seconds[0].flows
    assert len(flows) == MAX_PAIRS + 1
    assert flows[OTHER, OTHER].count == 50
    assert len(history.seconds[0].served) == MAX_PAIRS
    assert sum(each.count for each in hi.pairs(history.seconds, 1)) >= MAX_PAIRS


def test_changes_of_the_roster_are_kept() -> None:
    history = hi.History(100.0)
    history.on_changed(100.1234, InstanceName("d1"), "joined")
    assert [(each.at, each.instance, each.what) for each in history.changes] == [(100.123, "d1", "joined")]
