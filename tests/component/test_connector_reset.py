"""An engine's caches are reset, as after its weights have changed: nothing that was computed before is handed over."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_sides import BLOCK, Engine, decode_leg, idle, making, prefill, prefill_leg, request, until

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.engine.connector import XpydConnector

pytestmark = pytest.mark.timeout(300)
BEFORE, AFTER = 4, 5
"""What one prompt's KV is under two weights."""
Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with making(lambda name, **options: Engine(name, tmp_path, runner="v1", **options)) as build:
        yield build


def reset(engine: Engine) -> bool:
    made = XpydConnector.__new__(XpydConnector)
    made._scheduler, made._worker = engine.scheduler, None
    return made.reset_cache()


def legs(p: Engine, d: Engine) -> tuple[Any, Any]:
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    return theirs, ours


def test_what_was_pushed_before_is_not_mixed_with_what_comes_after(make: Make) -> None:
    p, d = make("p"), make("d")
    theirs, ours = legs(p, d)
    p.fill([1, 2, 3], prompt=BEFORE)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([1, 2],), 0)
    p.step(new=((theirs, [1, 2], 0, 20),))
    assert reset(p)
    p.step(preempted=(theirs,))
    p.fill([20, 21, 22], prompt=AFTER)
    p.scheduler.on_allocated(theirs, ([20, 21, 22],), 0)
    p.step(new=((theirs, [20, 21, 22], 0, 40),))
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (0, False), p, d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 0)
    until(lambda: idle(p) and idle(d), p, d)
    assert p.counts["send/stale"] == 1


def test_what_begins_after_it_is_handed_over(make: Make) -> None:
    p, d = make("p"), make("d")
    assert reset(p)
    assert reset(d)
    theirs, ours = legs(p, d)
    p.fill([1, 2, 3], prompt=AFTER)
    prefill(p, theirs, [1, 2, 3])
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), p, d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    until(lambda: bool(d.recved), p, d)
    assert d.holds([8, 7, 6], prompt=AFTER, first=0)


def test_a_load_that_is_under_way_is_said_to_be(make: Make) -> None:
    p, d = make("p"), make("d")
    theirs, ours = legs(p, d)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([1, 2, 3],), 0)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    assert not reset(d)


def test_the_lookup_buffer_is_empty_and_its_prompt_is_computed_here(make: Make) -> None:
    block = 2 * BLOCK * 4 * 4
    p, d = make("p", keep_bytes=16 * block), make("d", buffer_bytes=1 << 20)
    theirs, ours = legs(p, d)
    p.fill([5, 9, 3], prompt=BEFORE)
    prefill(p, theirs, [5, 9, 3])
    until(lambda: d.counts.get(metrics.BUFFERED_BYTES, 0) >= block, p, d)
    assert reset(d)
    assert d.scheduler.pending(), "workers have not heard of it"
    until(lambda: d.workers[0]._receiver.buffered_bytes == (0, 0), d)
    assert d.scheduler.match_tokens(ours, 0) == (0, False)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 0)
    until(lambda: idle(p) and idle(d), p, d)
