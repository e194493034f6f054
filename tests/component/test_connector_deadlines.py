"""Deadlines of a load are silences of progress, and the whole has a bound of its own. Engines stepped by hand.

The clock of all threads is moved on; real time is what threads and sockets need. A load timeout of 4 s stands for one of
30 s, so "3 s later" is "29 s later" there. Each of these seconds is ten of the clock, so that on a full machine threads and
sockets may take ten of them, between 3 s and 4 s.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_sides import BLOCK, Engine, decode_leg, idle, making, prefill_leg, request, until
from copies import COPY_S, Gpu
from long_prompts import PROMPT, LongPrompt, Time

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.kv.messages import Control, Ping

pytestmark = pytest.mark.timeout(300)
TIMES = {"load_timeout_s": 4.0, "load_limit_s": 600.0, "peer_timeout_s": 60.0, "claim_s": 600.0, "keep_ttl_s": 600.0}
SECOND_S = 10.0
"""What a second of these tests is on the clock."""


@pytest.fixture
def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    moved = Time()
    monkeypatch.setattr(time, "monotonic", moved.monotonic)
    return lambda seconds: moved.skip(seconds * SECOND_S)


@pytest.fixture
def make(tmp_path: Path, copies: dict[str, Any], skip: Callable[[float], None]) -> Iterator[Callable[..., Engine]]:
    del skip  # before any engine

    def made(name: str, **options: Any) -> Engine:
        """Its workers have joined its calls, which has a deadline of its own."""
        given = {each: value * SECOND_S if each.endswith("_s") else value for each, value in (TIMES | options).items()}
        engine = Engine(name, tmp_path, **copies, **given)
        until(lambda: engine.scheduler._carrying.crew._ready, engine)
        return engine

    with making(made) as build:
        yield build


def ping(p: Engine, d: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], object], list[Control]]:
    """What has decode hear one more PING of prefill's control thread that says nothing of work; and all that it hears."""
    heard: list[Control] = []
    hear = d.scheduler._hearing.from_prefill

    def noted(peer: bytes, message: Control) -> None:
        heard.append(message)
        hear(peer, message)

    def once_more() -> None:
        before = heard.count(Ping(9))
        p.scheduler._control.post(d.peer(), Ping(9))
        until(lambda: heard.count(Ping(9)) > before)

    monkeypatch.setattr(d.scheduler._hearing, "from_prefill", noted)
    return once_more, heard


def looks(p: Engine) -> Callable[[], None]:
    """What waits for a look of prefill's publisher at its deadlines, which begins then."""
    machine, seen = p.workers[0]._publisher._machine, [0]
    tick = machine.tick

    def ticked(now: float) -> Any:
        out = tick(now)
        seen[0] += 1
        return out

    def wait_look() -> None:
        before = seen[0]
        until(lambda: seen[0] >= before + 2)  # one may be under way

    machine.tick = ticked  # type: ignore[method-assign]
    return wait_look


def other_work(p: Engine, nth: int, tokens: int = 8) -> None:
    """A step of prefill for somebody else."""
    other = request(None, tokens)
    other.request_id = f"other-{nth}"
    p.step(new=((other, [30], 0, tokens),))


# --- progress ---


def test_a_prefill_that_computes_is_waited_for_although_no_block_is_whole(
        make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    p, d = make("p"), make("d")
    one = LongPrompt(p, d, 3 * BLOCK)
    one.begin()
    for step in range(11):  # four of them to a block, 33 seconds
        one.compute(4)
        one.wait_told(4 * step)
        assert not one.over
        skip(3.0)
    one.compute(4)
    one.wait_loaded()
    until(lambda: idle(p) and idle(d), p, d)
    assert (p.counts["send/ok"], d.counts["receive/ok"]) == (1, 1)


def test_one_block_per_silence_that_is_almost_too_long_is_enough_where_prefill_says_nothing(
        make: Callable[..., Engine], skip: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make("p", load_timeout_s=60.0), make("d")
    monkeypatch.setattr(p.scheduler._offers, "take_progress", list)  # it says nothing of its work
    one = LongPrompt(p, d, 8 * BLOCK)
    one.begin()
    for _ in range(8):
        one.compute(BLOCK)
        one.wait_arrived()
        skip(3.0)
    one.wait_loaded()


def test_a_prompt_that_waits_in_prefills_queue_is_waited_for_while_others_are_served(
        make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    p, d = make("p"), make("d")
    one = LongPrompt(p, d, 2 * BLOCK)
    one.begin()
    one.compute(BLOCK)
    one.wait_arrived()
    other_work(p, 0)  # ours is preempted
    for step in range(1, 8):
        skip(3.0)
        other_work(p, step)
        one.wait_told(BLOCK, step)
        assert not one.over
    one.compute(BLOCK)
    one.wait_loaded()


def test_prefills_half_lasts_while_its_work_grows(make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    """It waits 64 s for decode; no block becomes whole in 80 s."""
    p, d = make("p"), make("d", load_timeout_s=600.0)
    one = LongPrompt(p, d, 2 * BLOCK)
    one.begin()
    one.compute(BLOCK)
    one.wait_arrived()
    wait_look = looks(p)
    for step in range(1, 9):
        skip(10.0)
        other_work(p, step)
        wait_look()
        assert p.workers[0]._publisher._machine.open == 1
    one.compute(BLOCK)
    one.wait_loaded()


def test_prefills_half_ends_where_its_work_does_not_grow(
        make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    p, d = make("p"), make("d", load_timeout_s=600.0)
    one = LongPrompt(p, d, 2 * BLOCK)
    one.begin()
    one.compute(BLOCK)
    one.wait_arrived()
    skipped, wait_look = 0.0, looks(p)
    while not one.over:
        skip(10.0)
        skipped += 10.0
        assert skipped < 120.0
        p.step()
        d.step()
        wait_look()
    assert skipped >= 60.0
    assert d.failed == [one.ours.request_id]
    until(lambda: p.counts.get("send/deadline"), p, d)


def test_a_clock_that_jumps_ends_no_load(make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    patient = {"load_limit_s": 1e6, "peer_timeout_s": 1e6}
    p, d = make("p", **patient), make("d", **patient)
    one = LongPrompt(p, d, 4 * BLOCK)
    one.begin()
    for _ in range(4):
        assert not one.over
        one.compute(BLOCK)
        skip(10_000.0)
        d.step()
        one.wait_arrived()
    one.wait_loaded()


def test_a_prompt_of_128k_tokens_is_handed_over(make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    """16 chunks of 8,192 tokens, 25 s each: 400 s by the clock."""
    tokens, chunk = 128 << 10, 8 << 10
    options = {"blocks": tokens // BLOCK + 1, "load_timeout_s": 30.0, "keep_bytes": 64 << 20}
    p, d = make("p", **options), make("d", **options)
    for device in d.devices:
        if isinstance(device, Gpu):
            device.place_s = COPY_S  # of a thousand fetches
    one = LongPrompt(p, d, tokens)
    one.begin()
    for _ in range(tokens // chunk):
        one.compute(chunk)
        one.wait_arrived()
        skip(25.0)
    one.wait_loaded()
    until(lambda: idle(p) and idle(d), p, d)
    assert d.counts[metrics.LOADED_TOKENS] == tokens


# --- silence ---


def test_pings_without_progress_keep_no_load(
        make: Callable[..., Engine], skip: Callable[[float], None], caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make("p"), make("d")
    one = LongPrompt(p, d, 4 * BLOCK)
    one.begin()
    one.compute(BLOCK)
    one.wait_arrived()
    once_more, heard = ping(p, d, monkeypatch)
    # Prefill's steps go on, and have no work.
    assert one.wait_failed(p, skip=skip, each_s=0.5, most_s=8.0, meanwhile=once_more) >= 3.0
    assert heard.count(Ping(9)) > 3
    assert "no progress for 40 s" in caplog.text
    until(lambda: p.workers[0].store.used_bytes == 0 and idle(d), p, d)


def test_a_prefill_that_hangs_inside_a_forward_is_given_up_although_its_threads_live(
        make: Callable[..., Engine], skip: Callable[[float], None], caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make("p"), make("d")
    one = LongPrompt(p, d, 4 * BLOCK)
    one.begin()
    one.compute(BLOCK)
    one.wait_arrived()
    once_more, heard = ping(p, d, monkeypatch)
    skip(1.0)
    one.hang(BLOCK)
    assert one.wait_failed(p.clock, skip=skip, each_s=0.5, most_s=8.0, meanwhile=once_more) >= 3.0
    assert heard.count(Ping(9)) > 3
    assert one.told == (BLOCK, 0), "of the step that hangs nothing is said"
    assert "no progress for 40 s" in caplog.text


def test_words_of_work_that_does_not_grow_keep_no_load(
        make: Callable[..., Engine], skip: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make("p"), make("d")
    one = LongPrompt(p, d, 4 * BLOCK)
    one.begin()
    monkeypatch.setattr(p.scheduler, "_tell_s", 0.0)
    one.compute(BLOCK)
    other_work(p, 0)
    one.wait_told(BLOCK)
    said = p.scheduler._offers.take_progress
    leg = next(iter(p.scheduler._offers._open.values()))

    def again() -> Any:
        leg.told = leg.told._replace(steps=-1)  # it says the same in every step
        return said()

    monkeypatch.setattr(p.scheduler._offers, "take_progress", again)
    assert one.wait_failed(p, skip=skip, each_s=0.5, most_s=8.0) >= 3.0


# --- the whole ---


@pytest.mark.parametrize("whose", ["limit", "router"])
def test_the_whole_is_bounded_however_much_comes(make: Callable[..., Engine], skip: Callable[[float], None], whose: str,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("p"), make("d", load_limit_s=10.0 if whose == "limit" else 600.0)
    one = LongPrompt(p, d, 16 * BLOCK - 4, limit_s=10.0 * SECOND_S if whose == "router" else None)
    one.begin()
    steps = 0
    while not one.over:
        one.compute(BLOCK)
        one.wait_arrived()
        skip(2.0)
        d.step()
        d.step()
        steps += 1
        assert steps < 10
    assert steps >= 4, "ten seconds are five steps, less what the test itself takes"
    assert d.failed == [one.ours.request_id]
    assert "it took longer than a load may" in caplog.text
    until(lambda: p.workers[0].store.used_bytes == 0 and idle(d), p, d)


def test_a_prompt_for_which_the_router_has_no_time_left_is_not_loaded(
        make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    p, d = make("p"), make("d")
    one = LongPrompt(p, d, 2 * BLOCK, limit_s=5.0 * SECOND_S)
    d.scheduler.new_request(one.ours)
    p.scheduler.new_request(one.theirs)
    p.scheduler.on_allocated(one.theirs, (one.source,), 0)
    until(lambda: d.scheduler.match_tokens(one.ours, 0) == (one.tokens, True), d)
    skip(6.0)
    d.scheduler.on_allocated(one.ours, (one.target,), one.tokens)
    until(lambda: one.over, p, d)
    assert d.failed == [one.ours.request_id]


# --- who leaves ---


def test_decodes_client_leaves_a_load_that_has_lasted_long(
        make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    p, d = make("p"), make("d")
    one = LongPrompt(p, d, 6 * BLOCK)
    one.begin()
    for _ in range(3):
        one.compute(BLOCK)
        one.wait_arrived()
        skip(3.0)
    d.scheduler.on_request_ended(one.ours)
    until(lambda: one.over and idle(d), d)
    one.compute(BLOCK)
    until(lambda: p.workers[0].store.used_bytes == 0 and p.counts.get("send/aborted"), p, d)
    assert not d.holds(one.target[3:4], PROMPT, first=3), "what comes later is placed nowhere"


def test_prefills_client_leaves_a_load_that_has_lasted_long_and_no_other_try_comes(
        make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    p, d = make("p"), make("d")
    one = LongPrompt(p, d, 6 * BLOCK)
    one.begin()
    for _ in range(3):
        one.compute(BLOCK)
        one.wait_arrived()
        skip(3.0)
    p.scheduler.on_request_ended(one.theirs)
    until(lambda: idle(p), p, d)
    assert one.wait_failed(p, skip=skip, each_s=0.5, most_s=8.0) > 0
    until(lambda: idle(d), d)


# --- blocks that loads hold ---


def test_loads_hold_half_of_decodes_blocks_and_the_next_one_waits_in_the_queue(make: Callable[..., Engine]) -> None:
    p, d = make("p", blocks=64), make("d", blocks=32)
    each = 6 * BLOCK
    prompts = [LongPrompt(p, d, each) for _ in range(3)]
    for at, one in enumerate(prompts):
        one.source = list(range(1 + 6 * at, 7 + 6 * at))
        one.target = list(range(1 + 6 * at, 7 + 6 * at))
        d.scheduler.new_request(one.ours)
        p.scheduler.new_request(one.theirs)
        p.scheduler.on_allocated(one.theirs, (one.source,), 0)
    for one in prompts[:2]:
        until(lambda one=one: d.scheduler.match_tokens(one.ours, 0) == (each, True), d)
        d.scheduler.on_allocated(one.ours, (one.target,), each)
    third = prompts[2]
    until(lambda: d.scheduler._pairing.leg(third.ours.request_id).source is not None, d)
    for _ in range(5):
        assert d.scheduler.match_tokens(third.ours, 0) == (None, False), "12 of 16 blocks are held, and it wants 6"
        d.step()
    assert d.scheduler.match_tokens(request(None), 0) == (0, False), "who loads nothing does not wait"
    for one in prompts:
        p.fill(one.source, PROMPT)
    prompts[0].compute(each)
    prompts[0].wait_loaded()
    assert d.scheduler.match_tokens(third.ours, 0) == (each, True)
    d.scheduler.on_allocated(third.ours, (third.target,), each)
    for one in prompts[1:]:
        one.compute(each)
        until(lambda one=one: one.over, p, d)
    assert d.failed == []
    until(lambda: idle(p) and idle(d), p, d)
    assert d.scheduler._room.held_blocks == 0


def test_who_waits_for_room_and_leaves_waits_no_more_and_a_load_that_failed_holds_nothing(
        make: Callable[..., Engine], skip: Callable[[float], None]) -> None:
    p, d = make("p"), make("d", blocks=8)
    one = LongPrompt(p, d, 4 * BLOCK)
    one.begin()
    two = LongPrompt(p, d, 4 * BLOCK)
    d.scheduler.new_request(two.ours)
    p.scheduler.new_request(two.theirs)
    p.scheduler.on_allocated(two.theirs, (two.source,), 0)
    until(lambda: d.scheduler._pairing.leg(two.ours.request_id).source is not None, d)
    assert d.scheduler.match_tokens(two.ours, 0) == (None, False)
    assert (d.scheduler._room.held_blocks, d.scheduler._room.waiting_requests) == (4, 1)
    d.scheduler.on_request_ended(two.ours)
    assert d.scheduler._room.waiting_requests == 0
    one.wait_failed(p, skip=skip, each_s=0.5, most_s=8.0)
    assert d.scheduler._room.held_blocks == 0


# --- what the two engines are told ---


@pytest.mark.parametrize("limit_s", ["soon", 0, -1.0])
def test_a_limit_that_is_none_makes_an_ordinary_request(
        make: Callable[..., Engine], limit_s: object, caplog: pytest.LogCaptureFixture) -> None:
    d = make("d")
    wrong = request(decode_leg("ab" * 16) | {"limit_s": limit_s})
    d.scheduler.new_request(wrong)
    assert d.scheduler.match_tokens(wrong, 0) == (0, False)
    assert re.search(r"served as an ordinary one: .*limit_s", caplog.text)


def test_prefill_tells_its_decode_engines_apart(make: Callable[..., Engine]) -> None:
    p, d, e = make("p"), make("d"), make("e")
    one, two = LongPrompt(p, d, 2 * BLOCK), LongPrompt(p, e, 2 * BLOCK)
    two.theirs = request(prefill_leg(two.theirs.kv_transfer_params["transfer"], e), two.tokens)
    one.begin()
    two.source = [5, 6]
    two.begin()
    one.compute(4)
    two.compute(8)
    other_work(p, 0)
    until(lambda: one.told[0] == 4 and two.told[0] == 8, p, d, e)
