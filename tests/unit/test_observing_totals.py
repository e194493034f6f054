"""Counters of a router: what two answers differ in is what happened between them."""

from __future__ import annotations

import msgspec
from records import pair, record

from xpyd_sidecar.contract.totals import Totals, bucket_of, middle_of
from xpyd_sidecar.router.observing.batch import Counting, of_records


def test_a_request_is_counted_by_its_size_when_it_comes_and_by_its_tokens_when_it_ends() -> None:
    counting = Counting(5.0)
    counting.on_opened(90)
    counting.on_opened(10)
    assert (counting.totals().arrivals, counting.totals().arrived_tokens, counting.totals().measured) == (2, 100, 0)
    over = record(*pair("p1", "d1", 0.25), outcome="ok", prompt_tokens=100, prompt_size=80, tokens=11, stream=True)
    counting.on_closed(of_records(over.api, [over]))
    told = counting.totals()
    assert (told.since, told.measured) == (5.0, 1)
    assert (told.prompt_tokens, told.measured_size, told.prompt_squares, told.output_tokens) == (100, 80, 10_000, 11)
    assert (told.handovers, round(told.handover_s, 3)) == (1, 0.25)
    assert sum(told.ttft.values()) == 1
    assert sum(told.tpot.values()) == 1


def test_what_failed_or_is_not_known_is_not_measured() -> None:
    counting = Counting(0.0)
    for each in (record(outcome="broken", prompt_tokens=5, tokens=5), record(outcome="ok", prompt_tokens=-1, tokens=5)):
        counting.on_closed(of_records(each.api, [each]))
    assert counting.totals().measured == 0


def test_the_form_survives_json_and_buckets_hold_their_middle() -> None:
    told = Totals(since=1.0, ttft={3: 4, 200: 1}, tpot={0: 2})
    assert msgspec.json.decode(msgspec.json.encode(told), type=Totals) == told
    for seconds in (0.001, 0.05, 3.0, 100.0):
        assert abs(middle_of(bucket_of(seconds)) / seconds - 1) < 0.05
