from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from beats import SERVICE, beat
from records import pair, record

from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.router.fleet.member import HealthResult, RosterChange
from xpyd_sidecar.router.fleet.roster import InstanceName, Roster
from xpyd_sidecar.router.observing import observer as ob


class Clock:
    """The wall clock."""

    def __init__(self) -> None:
        self.now = 2000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ob, "time", made)
    return made


class Untimed(asyncio.AbstractEventLoop):
    """A loop whose time does not pass: who asks hears all."""

    def call_later(self, delay: float, callback: object, *args: object, context: object = None) -> Any:
        """Never."""

    def time(self) -> float:
        """The roster's clock."""
        return 3.0


def observed() -> ob.RouterObserver:
    roster = Roster(SERVICE, started=0.0, settle_s=0.0, missed_beats=3)
    roster.on_message(1.0, beat("p1", Role.PREFILL))
    roster.on_message(1.0, beat("d1", load=Load(running=2, kv_usage=0.5)))
    return ob.RouterObserver(roster, Untimed())


def fleet(of: ob.RouterObserver) -> Fleet:
    return of.fleet(SERVICE, "r0", 3.0, 1.0, draining=False)


def test_the_fleet_says_what_happened_within_the_window(clock: Clock) -> None:
    observer = observed()
    observer.metrics.queued = lambda: 4
    for number in range(10):
        observer.on_opened(100, "")
        observer.on_over(record(*pair("p1", "d1", 0.1), outcome="ok" if number else "broken", detail="it broke", bytes=100,
                               retries=1, continued=2))
    observer.on_opened(100, "")
    observer.on_refused("chat", "q", "unavailable", 503, "nobody decodes")
    clock.now += 2
    seen = fleet(observer)
    assert (seen.service, seen.router, seen.uptime_s, seen.window_s) == (SERVICE, "r0", 2.0, 2)
    assert (seen.requests_total, seen.requests_failed, seen.in_flight, seen.queued) == (11, 2, 1, 4)
    rates = seen.rates
    assert (rates.requests, rates.failed, rates.retries, rates.continued) == (5.5, 1.0, 5.0, 10.0)
    assert (rates.tokens, rates.bytes) == (55.0, 500.0)
    assert set(seen.latencies) == {"ttft", "tpot", "total", "queue", "handover"}
    assert seen.latencies["ttft"].count == 10
    assert seen.latencies["tpot"].count == 9, "a broken stream has no TPOT"
    assert seen.latencies["handover"].p50 == pytest.approx(0.1, rel=0.05)
    assert [(each.prefill, each.decode, each.count, each.per_s) for each in seen.pairs] == [("p1", "d1", 10, 5.0)]
    assert [(each.outcome, each.detail) for each in seen.failures] == [("broken", "it broke"),
                                                                      ("unavailable", "nobody decodes")]
    instances = {each.instance: each for each in seen.instances}
    assert (instances[InstanceName("d1")].served_s, instances[InstanceName("d1")].load.kv_usage) == (5.0, 0.5)


def test_what_is_older_than_the_window_is_left_out(clock: Clock) -> None:
    observer = observed()
    observer.on_opened(100, "")
    observer.on_over(record(*pair("p1", "d1")))
    clock.now += ob.WINDOW_S + 1
    seen = fleet(observer)
    assert (seen.window_s, seen.rates.requests, seen.pairs, seen.latencies["ttft"].count) == (ob.WINDOW_S, 0.0, (), 0)
    assert seen.requests_total == 1


def test_changes_and_probes_reach_metrics_and_history(clock: Clock) -> None:
    observer = observed()
    observer.on_changed(RosterChange(InstanceName("d1"), "evicted: silent", "evicted"))
    observer.on_probed(HealthResult.DEAD)
    seen = fleet(observer).changes
    assert [(each.at, each.instance, each.what) for each in seen] == [(clock.now, "d1", "evicted: silent")]
    text = observer.metrics.text().decode()
    assert 'xpyd_router_roster_changes_total{change="evicted"} 1.0' in text
    assert 'xpyd_router_probes_total{result="dead"} 1.0' in text


def test_readers_and_routers_of_different_versions_understand_each_other(clock: Clock) -> None:
    whole = msgspec.json.encode(fleet(observed()))
    assert msgspec.json.decode(whole, type=Fleet).instances[0].instance == "d1"
    old = {"service": "s", "router": "r", "uptime_s": 1.0, "settled": True, "instances": []}
    assert msgspec.json.decode(msgspec.json.encode(old | {"newer": 1}), type=Fleet).pairs == ()
