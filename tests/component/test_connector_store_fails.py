"""A store beside ours on prefill that fills blocks within a step, and says with its output that it could not fill some."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_sides import BLOCK, decode_leg, idle, making, prefill_leg, request, until
from multi_engines import MultiEngine, Order

from xpyd_sidecar.contract import metrics

pytestmark = pytest.mark.timeout(300)
TOKENS = 40
"""Two blocks and a half."""
GOOD, OTHER = 7, 9
"""Prompts."""
BLOCKS, TAKEN = [20, 21, 22], [14, 15, 16]
"""Of prefill and of decode."""
Make = Callable[..., MultiEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with making(lambda name, clock=None, **options: MultiEngine(name, tmp_path, clock, **options)) as build:
        yield build


def legs(p: MultiEngine, d: MultiEngine, prompt: int = GOOD) -> tuple[Any, Any]:
    """Both halves of a request, which have arrived."""
    transfer = uuid.uuid4().hex
    theirs, ours = (request(params, TOKENS, prompt) for params in (prefill_leg(transfer, d), decode_leg(transfer)))
    for one, engine in ((theirs, p), (ours, d)):
        one.num_tokens, one.block_hashes = TOKENS, [(prompt, at) for at in range(TOKENS // BLOCK)]
        engine.multi.on_new_request(one)
    return theirs, ours


def stored(p: MultiEngine, d: MultiEngine) -> None:
    """The store knows the prompt from a request before."""
    theirs, ours = legs(p, d)
    p.on_allocated(theirs, [5, 8, 3], 0)
    p.fill([5, 8, 3], GOOD)
    p.step(new=((theirs, 0, TOKENS),))
    p.on_request_ended(theirs)
    until(lambda: d.match_tokens(ours) == (TOKENS, True), p, d)
    d.on_allocated(ours, [11, 12, 13], TOKENS)
    until(lambda: d.recved == [ours.request_id] and idle(p) and idle(d) and not p.multi.has_pending_push_work(), p, d)
    d.recved.clear()


def loading(p: MultiEngine, d: MultiEngine) -> tuple[Any, Any]:
    """The same prompt once more: decode waits with blocks for what prefill is about to have the store fill."""
    theirs, ours = legs(p, d)
    assert p.match_tokens(theirs) == (2 * BLOCK, False)
    p.on_allocated(theirs, BLOCKS, 2 * BLOCK)
    until(lambda: d.match_tokens(ours) == (TOKENS, True), d)
    d.on_allocated(ours, TAKEN, TOKENS)
    for _ in range(5):
        d.step()
    return theirs, ours


def fails(p: MultiEngine, rank: int, blocks: set[int]) -> Callable[[], None]:
    """From now on a rank's store fills nothing, and says so; until what is returned is called."""
    store: Any = p.stores[rank]
    store.start_load_kv = lambda *_, **__: None
    store.get_block_ids_with_load_errors = lambda: blocks

    def mend() -> None:
        del store.start_load_kv, store.get_block_ids_with_load_errors

    return mend


def stepping(d: MultiEngine, seconds: float = 0.5) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        d.step()
        time.sleep(0.005)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(("tensor", "order"), [(1, "ours first"), (2, "store first")])
def test_blocks_that_a_store_could_not_load_never_reach_decode(make: Make, policy: str, tensor: int, order: Order) -> None:
    p, d = make("p", order=order, tensor=tensor), make("d", tensor=tensor)
    stored(p, d)
    theirs, ours = loading(p, d)
    p.fill(BLOCKS, OTHER)
    mend = fails(p, tensor - 1, {20, 21})
    p.behind = 1
    p.step(new=((theirs, 2 * BLOCK, TOKENS - 2 * BLOCK),))
    stepping(d)
    assert not d.recved, "nothing is known of the step yet, but that it has run"
    p.behind = 0
    if policy == "fail":
        p.on_request_ended(theirs)  # vLLM ends it before the connector hears of the output
    p.step()
    mend()
    if policy == "recompute":
        p.fill(BLOCKS, GOOD)
        p.step(cached=((theirs, 0, TOKENS),))
        p.on_request_ended(theirs)
    until(lambda: idle(p), p, d)
    assert p.counts[f"send/{'aborted' if policy == 'fail' else 'protocol'}"] == 1
    if policy == "recompute":  # no other try will come: decode computes it itself, at once
        until(lambda: d.recved == [ours.request_id], p, d)
        assert set(d.failed) == {ours.request_id}, "its ranks may say so in different steps"
    stepping(d, 0.2)
    assert ours.request_id in d.failed or ours.request_id not in d.recved
    assert not any(worker.store.used_bytes for worker in p.workers)


def test_who_shares_such_a_block_in_a_later_step_that_was_planned_before_is_withdrawn_and_others_go_on(make: Make) -> None:
    p, d = make("p"), make("d")
    stored(p, d)
    theirs, ours = loading(p, d)
    p.fill(BLOCKS, OTHER)
    shares, waits = legs(p, d)
    p.on_allocated(shares, [20, 21, 25], 0)
    alone, apart = legs(p, d, prompt=3)
    p.on_allocated(alone, [26, 27, 28], 0)
    p.fill([26, 27, 28], 3)
    mend = fails(p, 0, {21})
    p.behind = 1
    p.step(new=((theirs, 2 * BLOCK, TOKENS - 2 * BLOCK), (alone, 0, TOKENS)))
    mend()
    p.step(new=((shares, 2 * BLOCK, TOKENS - 2 * BLOCK),))
    p.behind = 0
    until(lambda: d.match_tokens(waits) == (0, False) and d.match_tokens(apart) == (TOKENS, True), p, d)
    d.on_allocated(apart, [1, 2, 4], TOKENS)
    until(lambda: len(d.recved) == 2, p, d)
    assert d.failed == [ours.request_id]
    assert d.holds([1, 2, 4], prompt=3, first=0)
    until(lambda: idle(p), p, d)
    assert (p.counts["send/protocol"], p.counts["send/ok"]) == (2, 2)


def test_what_could_be_loaded_leaves_when_the_output_has_been_heard_and_no_put_waits_for_that(make: Make) -> None:
    p, d = make("p", mode="put", put_wait_s=3.0), make("d")
    stored(p, d)
    put = p.workers[0]._put
    assert put is not None
    put._slow.put("d", 0.0)  # decode took the first one late
    late = p.counts[metrics.PUT_LATE]
    theirs, ours = loading(p, d)
    p.fill([22], GOOD)
    for layer, cache in enumerate(p.caches[0].values()):
        cache[22].fill_(GOOD * 1000 + layer * 20 + 2)
    p.behind = 1
    p.step(new=((theirs, 2 * BLOCK, TOKENS - 2 * BLOCK),))
    stepping(d, 0.2)
    assert not d.recved
    until(lambda: d.recved == [ours.request_id], p, d)
    assert d.holds(TAKEN, GOOD, first=0)
    assert p.counts[metrics.PUT_LATE] == late


def test_a_load_beside_the_steps_that_fails_costs_nobody_the_hand_over(make: Make) -> None:
    """Its request has not run by then: vLLM computes it, and ours hands over what was computed."""
    p, d = make("p", late=True), make("d")
    stored(p, d)
    theirs, ours = legs(p, d)
    assert p.match_tokens(theirs) == (2 * BLOCK, True)
    p.on_allocated(theirs, BLOCKS, 2 * BLOCK)
    mend = fails(p, 0, {20, 21})
    p.step()
    mend()
    p.on_allocated(theirs, BLOCKS, 0)
    p.fill(BLOCKS, GOOD)
    p.step(new=((theirs, 0, TOKENS),))
    p.on_request_ended(theirs)
    until(lambda: d.match_tokens(ours) == (TOKENS, True), p, d)
    d.on_allocated(ours, TAKEN, TOKENS)
    until(lambda: ours.request_id in d.recved, p, d)
    assert d.holds(TAKEN, GOOD, first=0)
