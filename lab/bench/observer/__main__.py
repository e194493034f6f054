"""What observing costs: counting one request, a second's turn, a scrape, an answer to the dashboard.

Everything runs in one thread, as in the router; figures are processor time, the best of several rounds.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
from beats import SERVICE, beat
from lab.bench.processor_time import ROUNDS, best_us, run_command
from records import leg, record

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.observing import history as hi
from xpyd_sidecar.router.observing.batch import of_records
from xpyd_sidecar.router.observing.observer import RouterObserver
from xpyd_sidecar.router.observing.record import Record

RESULTS = Path(__file__).resolve().parents[3] / "bench/results" / "observer.json"
REQUESTS = 20_000
PREFILLS, DECODES = 16, 16


class NoTimers(asyncio.AbstractEventLoop):
    """Requests that have ended are told of when there are enough of them, and by no timer."""

    def call_later(self, *_: object, **__: object) -> None:  # type: ignore[override]
        """Nothing comes of it."""

    def time(self) -> float:
        """As an event loop's."""
        return time.monotonic()


def made(number: int) -> Record:
    """A stream of 128 tokens through one of 256 pairs; times differ from request to request."""
    shift = (number * 7919 % 1000) / 1000
    first, end = 10.05 + 0.4 * shift, 12.0 + 3 * shift
    return record(leg(Role.PREFILL, f"p{number % PREFILLS}", 1, 10.0, 10.04, 10.04),
                  leg(Role.DECODE, f"d{number // PREFILLS % DECODES}", 1, 10.0, first, end),
                  first_at=first, last_at=end, tokens=128, bytes=33_000, arrived_unix=time.time())


def measured() -> dict[str, float]:
    """All figures."""
    roster = Roster(SERVICE, started=0.0, settle_s=0.0, missed_beats=3)
    for number in range(PREFILLS):
        roster.on_message(1.0, beat(f"p{number}", Role.PREFILL))
    for number in range(DECODES):
        roster.on_message(1.0, beat(f"d{number}"))
    observer = RouterObserver(roster, NoTimers())
    records = [made(number) for number in range(REQUESTS)]
    each = iter(records * (2 * ROUNDS))

    def one() -> None:
        observer.on_opened(1000, "")
        observer.on_over(next(each))

    out = {"request_us": best_us(one, REQUESTS)}
    now = time.time()
    for second in range(hi.SECONDS + 1):
        for number in range(64):
            of = records[(second * 64 + number) % REQUESTS]
            observer.history.on_closed(of_records(of.api, [of]))
        observer.history.advance(now + second + 1, 100, 0)
    out["second_of_64_pairs_us"] = best_us(lambda: hi.row_of(observer.history.seconds[-1]), 1000)
    out["scrape_ms"] = best_us(observer.metrics.text, 20) / 1000
    out["scrape_kib"] = len(observer.metrics.text()) / 1024

    def fleet() -> bytes:
        return msgspec.json.encode(observer.fleet(SERVICE, "r0", 2.0, 0.0, draining=False))

    out["fleet_ms"] = best_us(fleet, 20) / 1000
    out["fleet_kib"] = len(fleet()) / 1024
    out["dashboard_first_ms"] = best_us(lambda: msgspec.json.encode(observer.history.rows_since(0)), 20) / 1000
    return out


run_command("What metrics, history and the dashboard cost the router.", RESULTS, measured)
