"""The connector in two real engines, both legs of a request sent straight to them.

Outputs are compared with those of the prefill engine without ``kv_transfer_params``. The data link runs through a proxy
(``wire``) that can ruin, hold and cut it. Every test ends with both engines empty: no transfer open, no block in use.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engine_pair import (
    LOAD_TIMEOUT_S,
    OUTPUT,
    PEER_TIMEOUT_S,
    SOON_S,
    Pair,
    ask,
    leave,
    new,
    say_farewell,
    started,
    tokens,
    wait_until,
)
from engines import MODEL_NAME, Engine, HttpError, post
from processes import processor_s

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, Incarnation, Role, TransferId
from xpyd_sidecar.router.api import audited, bodies

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
LONG_S = 10 * SOON_S
"""What decode would wait for, and must not."""
CLAIM_S = 60.0
"""Prefill lets go after it, whatever happens."""


@pytest.fixture(scope="class")
def recompute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from started(Pair(tmp_path_factory.mktemp("recompute"), policy="recompute", claim_s=CLAIM_S))


@pytest.fixture(scope="class")
def fail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from started(Pair(tmp_path_factory.mktemp("fail"), policy="fail", checksum="disabled", claim_s=CLAIM_S))


def naps(engine: Engine) -> bool:
    """Whether an engine takes little, over a second and a half: vLLM's own polling takes 1.5 processors."""
    pids, began = engine.group.pids(), time.monotonic()
    used = processor_s(pids)
    time.sleep(1.5)
    return (processor_s(pids) - used) / (time.monotonic() - began) < 0.8


def audit(pair: Pair, prompt: list[int]) -> float:
    """What a router finds by the three requests of an audit."""
    transfer, request = new(), bodies.parse("completions", json.dumps({"model": MODEL_NAME, "prompt": prompt}).encode())

    def answer(engine: Engine, salt: str, leg: legs.Leg | None, **shown: Any) -> bytes:
        body = audited.body_of(bodies.one_token(request) | shown, salt, leg)
        return json.dumps(post(f"{engine.url}/v1/completions", json.loads(body), timeout_s=400.0)).encode()

    def odds(engine: Engine, salt: str, leg: legs.Leg | None) -> audited.TokenProbabilities:
        found = audited.odds_of(answer(engine, salt, leg, **audited.SHOWN["completions"]))
        assert found is not None
        return found

    alone = odds(pair.d, f"{transfer}-alone", None)  # which compiles a function for its first log probabilities
    to_prefill = legs.Leg(legs.VERSION, Role.PREFILL, TransferId(transfer), Attempt(1), 30.0, pair.peer())
    to_decode = legs.Leg(legs.VERSION, Role.DECODE, TransferId(transfer), Attempt(1), 30.0)
    handed = pair.pool.submit(odds, pair.d, transfer, to_decode)
    answer(pair.p, transfer, to_prefill)
    return audited.difference(handed.result(SOON_S), alone)


class TestRecompute:
    """Checksums on, load failures are recomputed."""

    @pytest.fixture
    def pair(self, recompute: Pair) -> Iterator[Pair]:
        yield recompute
        recompute.wait_empty()

    @pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 513, 1900])
    def test_decode_answers_like_a_plain_engine_and_computes_the_last_token_alone(self, pair: Pair, length: int) -> None:
        prompt = tokens(length)
        before = pair.computed()
        got = pair.both(prompt)
        pair.wait_empty()
        assert pair.computed() - before == OUTPUT + 1
        assert got == pair.plain(prompt)

    def test_many_at_once_with_preemptions_on_decode(self, pair: Pair) -> None:
        """Ten answers outgrow 34 blocks where enough of them overlap; how many do depends on the speed of the machine, so
        the answers grow until they have."""
        for length in (500, 1000, 1700):
            prompts = [tokens(120) for _ in range(10)]
            answers = list(pair.pool.map(lambda p, n=length: pair.both(p, n), prompts))
            assert [len(answer) for answer in answers] == [length] * 10
            # Sums in batches of another shape differ by about 1e-5, so two close tokens may swap places sooner or later.
            assert [answer[:60] for answer in answers] == [pair.plain(p, 60) for p in prompts]
            if pair.d.metric("vllm:num_preemptions_total") > 0:
                return
        pytest.fail("no request was preempted")

    def test_only_blocks_that_decode_lacks_are_sent(self, pair: Pair) -> None:
        shared = tokens(640)
        pair.both(shared + tokens(3))
        pair.wait_empty()
        sent, before = pair.p.metric(metrics.PUSHED_BYTES + "_total"), pair.computed()
        prompt = shared + tokens(100)
        got = pair.both(prompt)
        pair.wait_empty()
        block = 4 * 2 * 128 * 2 * 32 * 4  # layers, heads, tokens, K and V, head size, bytes
        assert pair.p.metric(metrics.PUSHED_BYTES + "_total") - sent == block  # prefill's own cached blocks not either
        assert pair.computed() - before == OUTPUT + 1
        assert got == pair.plain(prompt)

    def test_prefill_may_come_long_before_decode(self, pair: Pair) -> None:
        prompt, transfer, before = tokens(300), new(), pair.computed()
        pair.p_leg(prompt, transfer).result(SOON_S)
        pair.wait_kept()
        assert pair.d_leg(prompt, transfer).result(SOON_S) == pair.plain(prompt)
        pair.wait_empty()
        assert pair.computed() - before == OUTPUT + 1

    def test_what_a_leg_that_decode_never_knew_was_meant_to_get_is_let_go_at_farewell(self, pair: Pair) -> None:
        transfer = new()
        pair.p_leg(tokens(300), transfer).result(SOON_S)
        pair.wait_kept()
        dropped = pair.outcomes(pair.p, "send", "aborted")
        leg = legs.Leg(legs.VERSION, Role.DECODE, TransferId(transfer), Attempt(1), 30.0)
        asyncio.run(say_farewell(pair.d, leg))
        pair.wait_empty(pair.p, deadline_s=0.7 * CLAIM_S)
        assert pair.outcomes(pair.p, "send", "aborted") == dropped + 1

    def test_prefill_naps_while_its_copies_wait_for_a_decode_that_does_not_come_and_a_prompt_is_served_meanwhile(
            self, pair: Pair) -> None:
        transfer, prompt = new(), tokens(300)
        expected = pair.plain(prompt)
        pair.p_leg(tokens(300), transfer).result(SOON_S)
        wait_until(lambda: naps(pair.p), 0.5 * CLAIM_S, "napping")
        pair.wait_kept()
        assert pair.plain(prompt) == expected
        leg = legs.Leg(legs.VERSION, Role.DECODE, TransferId(transfer), Attempt(1), 30.0)
        asyncio.run(say_farewell(pair.d, leg))
        pair.wait_empty(pair.p, deadline_s=0.7 * CLAIM_S)

    def test_decode_naps_without_blocks_while_it_waits_for_an_announcement(self, pair: Pair) -> None:
        prompt, transfer = tokens(300), new()
        waited = pair.d_leg(prompt, transfer, wait_s=LONG_S)
        pair.wait_parked()
        assert pair.d.metric("vllm:kv_cache_usage_perc") == 0
        wait_until(lambda: naps(pair.d), SOON_S, "napping")
        pair.p_leg(prompt, transfer).result(SOON_S)
        assert waited.result(SOON_S) == pair.plain(prompt)

    def test_without_an_announcement_decode_computes_at_its_deadline(self, pair: Pair) -> None:
        prompt, began, before = tokens(300), time.perf_counter(), pair.outcomes(pair.d, "receive", "deadline")
        assert pair.d_leg(prompt, new(), wait_s=3.0).result(SOON_S) == pair.plain(prompt)
        assert time.perf_counter() - began >= 3.0, "by a clock that is the engine's, too"
        wait_until(lambda: pair.outcomes(pair.d, "receive", "deadline") == before + 1, SOON_S, "counted as what it was")

    @pytest.mark.parametrize("params", [{"xpyd": 99}, {"role": "decode"}, {"xpyd": 1, "role": "decode", "transfer": "x",
                                                                           "attempt": 1, "remaining_s": 1}])
    def test_parameters_that_are_not_understood_make_an_ordinary_request(self, pair: Pair, params: dict[str, Any]) -> None:
        prompt = tokens(50)
        assert ask(pair.d, prompt, OUTPUT, params) == pair.plain(prompt)

    def test_another_prompt_is_refused_and_decode_does_not_wait(self, pair: Pair) -> None:
        prompt, transfer = tokens(300), new()
        decode = pair.d_leg(prompt, transfer, wait_s=LONG_S)
        pair.p_leg(tokens(300), transfer).result(SOON_S)
        assert decode.result(SOON_S) == pair.plain(prompt)
        assert pair.outcomes(pair.d, "receive", "identity") == 1
        wait_until(lambda: pair.outcomes(pair.p, "send", "identity") == 1, SOON_S, "heard of by prefill")

    def test_a_leg_for_another_incarnation_of_decode_is_refused(self, pair: Pair) -> None:
        prompt, transfer = tokens(300), new()
        decode = pair.d_leg(prompt, transfer, wait_s=LONG_S)
        pair.p_leg(prompt, transfer, incarnation=Incarnation("0" * 32)).result(SOON_S)
        assert decode.result(SOON_S) == pair.plain(prompt)
        assert pair.outcomes(pair.d, "receive", "incarnation") == 1

    def test_a_corrupted_block_is_noticed_and_recomputed(self, pair: Pair) -> None:
        prompt, before = tokens(300), pair.computed()
        pair.wire.corrupt = 1
        got = pair.both(prompt)
        assert pair.wire.corrupt == 0
        pair.wait_empty(pair.d)
        assert pair.computed() - before == OUTPUT + len(prompt)
        assert got == pair.plain(prompt)
        assert pair.outcomes(pair.d, "receive", "checksum") == 1

    def test_a_second_decode_leg_of_the_same_transfer_is_an_ordinary_request(self, pair: Pair) -> None:
        prompt, transfer = tokens(200), new()
        first = pair.d_leg(prompt, transfer, wait_s=LONG_S)
        pair.wait_parked()
        assert pair.d_leg(prompt, transfer, wait_s=LONG_S).result(SOON_S) == pair.plain(prompt)
        pair.p_leg(prompt, transfer)
        assert first.result(SOON_S) == pair.plain(prompt)

    def test_decode_leaves_while_parked(self, pair: Pair) -> None:
        prompt, transfer = tokens(300), new()
        leg = legs.encode(legs.Leg(1, Role.DECODE, TransferId(transfer), Attempt(1), 30.0))
        leave(pair.d, prompt, leg, pair.wait_parked)
        pair.wait_empty(pair.d)
        pair.p_leg(prompt, transfer).result(SOON_S)
        pair.wait_empty(pair.p)

    def test_decode_leaves_while_loading(self, pair: Pair) -> None:
        prompt, transfer, lost = tokens(300), new(), pair.outcomes(pair.d, "receive", "peer_lost")
        leg = legs.encode(legs.Leg(1, Role.DECODE, TransferId(transfer), Attempt(1), 30.0))
        pair.wire.hold.set()
        pair.p_leg(prompt, transfer)
        try:
            leave(pair.d, prompt, leg, pair.wait_loading)
            wait_until(lambda: pair.d.metric("vllm:kv_cache_usage_perc") == 0, SOON_S, "free")
            assert pair.outcomes(pair.d, "receive", "peer_lost") == lost, "free before prefill's silence is too long"
        finally:
            pair.wire.hold.clear()

    def test_prefill_leaves_and_another_attempt_takes_its_place(self, pair: Pair) -> None:
        prompt, transfer = tokens(1900), new()
        busy = [pair.pool.submit(ask, pair.p, tokens(1900), 1, None) for _ in range(4)]
        decode = pair.d_leg(prompt, transfer)
        leg = legs.encode(legs.Leg(1, Role.PREFILL, TransferId(transfer), Attempt(1), 30.0, pair.peer()))
        leave(pair.p, prompt, leg, lambda: time.sleep(0.4))
        pair.p_leg(prompt, transfer, attempt=2).result(SOON_S)
        assert decode.result(SOON_S) == pair.plain(prompt)
        for one in busy:
            one.result(SOON_S)

    def test_a_newer_attempt_from_another_engine_in_the_middle_of_a_load(self, pair: Pair) -> None:
        prompt, transfer, before = tokens(700), new(), pair.computed()
        given_up = pair.outcomes(pair.p, "send", "stale")
        pair.wire.hold.set()
        decode = pair.d_leg(prompt, transfer)
        pair.p_leg(prompt, transfer).result(SOON_S)
        pair.wait_loading()
        pair.p_leg(prompt, transfer, attempt=2, engine=pair.d).result(SOON_S)  # an engine can prefill for itself
        assert decode.result(SOON_S) == pair.plain(prompt)
        pair.wire.hold.clear()
        pair.wait_empty(pair.d)
        assert pair.computed() - before == OUTPUT + 1 + len(prompt) + 1  # the second attempt's own leg, and no more
        wait_until(lambda: pair.outcomes(pair.p, "send", "stale") == given_up + 1, SOON_S, "given up by the first engine")

    def test_a_stuck_peer_is_given_up_and_delays_nobody_else(self, pair: Pair) -> None:
        prompt, other = tokens(700), tokens(400)
        pair.wire.hold.set()
        transfer, began = new(), time.perf_counter()
        stuck = pair.d_leg(prompt, transfer)
        pair.p_leg(prompt, transfer).result(SOON_S)
        free = new()
        moving = pair.d_leg(other, free)
        pair.p_leg(other, free, engine=pair.d).result(SOON_S)
        moving_answer, moving_took = moving.result(SOON_S), time.perf_counter() - began
        assert not stuck.done()
        answer, took = stuck.result(SOON_S), time.perf_counter() - began
        pair.wire.hold.clear()
        assert (moving_answer, answer) == (pair.plain(other), pair.plain(prompt))
        assert moving_took < took
        assert PEER_TIMEOUT_S < took < LOAD_TIMEOUT_S, "by its silence"

    def test_prefill_is_killed_in_the_middle_of_a_transfer(self, pair: Pair) -> None:
        prompt, transfer = tokens(1000), new()
        expected = pair.plain(prompt)
        pair.wire.hold.set()
        decode = pair.d_leg(prompt, transfer)
        pair.p_leg(prompt, transfer).result(SOON_S)
        pair.wait_loading()
        pair.p.kill()
        pair.wire.hold.clear()
        pair.wire.cut()
        assert decode.result(SOON_S) == expected
        assert pair.outcomes(pair.d, "receive", "peer_lost") >= 1


class TestFail:
    """No checksums, load failures fail the request."""

    @pytest.fixture
    def pair(self, fail: Pair) -> Iterator[Pair]:
        yield fail
        fail.wait_empty()

    def test_a_corrupted_block_changes_the_answer_where_nothing_checks(self, pair: Pair) -> None:
        prompt = tokens(300)
        assert pair.both(prompt) == pair.plain(prompt)
        prompt = tokens(300)
        pair.wire.corrupt = 1
        assert pair.both(prompt) != pair.plain(prompt)

    @pytest.mark.timeout(1000)
    def test_an_audit_sees_a_corrupted_block_where_nothing_checks(self, pair: Pair) -> None:
        assert audit(pair, tokens(300)) < 1e-3
        pair.wire.corrupt = 1
        assert audit(pair, tokens(300)) > 1e-2

    def test_without_an_announcement_the_request_fails_at_its_deadline(self, pair: Pair) -> None:
        before = pair.outcomes(pair.d, "receive", "deadline")
        with pytest.raises(HttpError) as failed:
            pair.d_leg(tokens(300), new(), wait_s=1.0).result(SOON_S)
        assert failed.value.status == 500
        wait_until(lambda: pair.outcomes(pair.d, "receive", "deadline") == before + 1, SOON_S, "counted as what it was")

    def test_a_load_that_breaks_fails_the_request(self, pair: Pair) -> None:
        prompt, transfer = tokens(700), new()
        pair.wire.hold.set()
        decode = pair.d_leg(prompt, transfer)
        pair.p_leg(prompt, transfer).result(SOON_S)
        pair.wait_loading()
        pair.wire.cut()
        with pytest.raises(HttpError) as failed:
            decode.result(SOON_S)
        pair.wire.hold.clear()
        assert failed.value.status == 500
        prompt = tokens(100)
        assert pair.both(prompt) == pair.plain(prompt)

    def test_decode_is_killed_and_prefill_lets_go(self, pair: Pair) -> None:
        pair.p_leg(tokens(700), new()).result(SOON_S)
        pair.wait_kept()
        before = pair.outcomes(pair.p, "send", "peer_lost")
        pair.d.kill()
        pair.wait_empty(pair.p, deadline_s=0.7 * CLAIM_S)
        assert pair.outcomes(pair.p, "send", "peer_lost") == before + 1
