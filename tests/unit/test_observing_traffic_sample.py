"""The sample of the last hour's traffic: bounded, whole for what it covers, and without content."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from records import pair, record

from xpyd_sidecar.contract.ids import ServiceName
from xpyd_sidecar.contract.sample import COLUMNS, HOUR_S, MOST, PackedSample, pack_numbers, unpack
from xpyd_sidecar.router.observing.traffic_sample import TrafficSample

NAME = ServiceName("qwen")


def test_times_and_sizes_of_a_request_are_kept() -> None:
    sample = TrafficSample(900.0)
    sample.add([record(*pair("p1", "d1", 0.25), prompt_tokens=700, queued_s=0.125)])
    told = unpack(sample.pack(NAME, 1100.0))
    assert told.covers_s == 200.0
    [one] = told.requests
    assert (one.at, one.prompt, one.output) == (100.0, 700, 11)
    assert (one.ttft, one.total, one.queued) == (0.5, 2.5, 0.125)
    assert (one.prefill, one.handover) == (pytest.approx(0.3, abs=1e-4), pytest.approx(0.25, abs=1e-4))


def test_what_is_not_known_is_told_as_such_and_failures_are_left_out() -> None:
    sample = TrafficSample(900.0)
    sample.add([record(*pair("p1", "d1")[1:], stream=False, tokens=-1, prompt_size=40),
                record(*pair("p1", "d1"), outcome="failed")])
    [one] = unpack(sample.pack(NAME, 1001.0)).requests
    assert (one.prompt, one.output, one.ttft, one.prefill, one.handover) == (40, -1, -1.0, -1.0, -1.0)


def test_what_is_kept_is_bounded_and_whole_for_what_it_covers() -> None:
    sample = TrafficSample(0.0, most=100)
    for second in range(1000):
        sample.add([record(*pair("p1", "d1"), arrived_unix=1000.0 + second)])
    told = unpack(sample.pack(NAME, 2000.0))
    assert len(sample) == 100
    assert 0 < told.covers_s <= 101
    assert len(told.requests) in {100, 101 - 1}
    assert [one.at for one in told.requests] == sorted(one.at for one in told.requests)
    size = sample._at.itemsize * MOST + sample._rest.itemsize * len(sample._rest) // 100 * MOST
    assert size <= 2 << 20


def test_nothing_older_than_an_hour_is_told() -> None:
    sample = TrafficSample(0.0)
    sample.add([record(*pair("p1", "d1"), arrived_unix=at) for at in (1000.0, 1000.0 + HOUR_S)])
    told = unpack(sample.pack(NAME, 1010.0 + HOUR_S))
    assert (told.covers_s, len(told.requests)) == (HOUR_S, 1)


@pytest.mark.parametrize(("at", "rest"), [(1001.0, float("inf")), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_numbers_that_are_none_are_no_sample(at: float, rest: float) -> None:
    numbers = pack_numbers(array("d", [at])), pack_numbers(array("f", [rest, *[1.0] * (COLUMNS - 1)]))
    with pytest.raises(ValueError, match="a number is not finite"):
        unpack(PackedSample(NAME, 1000.0, 1100.0, *numbers))


def test_no_word_of_a_request_is_in_it() -> None:
    sample = TrafficSample(900.0)
    sample.add([record(*pair("p1", "d1"), request_id="SECRET-1", detail="SECRET-2", path="/SECRET-3", skips="SECRET-4")])
    raw = msgspec.json.encode(sample.pack(NAME, 1100.0))
    assert b"SECRET" not in raw
    assert unpack(msgspec.json.decode(raw, type=PackedSample)).requests


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="1 arrivals and 2 numbers, which should be 7 for each"):
        unpack(PackedSample(NAME, 0.0, 1.0, b"\0" * 8, b"\0" * 8))
