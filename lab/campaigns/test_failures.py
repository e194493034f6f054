"""Rows of the failure table (docs/protocols/kv.md) that cost more than CI has time for: real engines, real signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from engine_pair import OUTPUT, PEER_TIMEOUT_S, Pair, ask, new, started, tokens, wait_until
from engines import Engine

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions

pytestmark = pytest.mark.timeout(550)
LOAD_S = 10.0


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from started(Pair(tmp_path_factory.mktemp("failures"), policy="recompute", load_timeout_s=LOAD_S))


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    yield engines
    engines.wait_empty(deadline_s=30.0)


def loaded(pair: Pair) -> None:
    """A prompt is handed over, and decode computes none of it."""
    prompt, before = tokens(300), pair.computed()
    assert pair.both(prompt) == pair.plain(prompt)
    assert pair.computed() - before == OUTPUT + 1


def test_prefill_is_preempted_in_the_middle_of_transfers(pair: Pair) -> None:
    """Answers that outgrow prefill's blocks push out the youngest requests: prompts that are computed in chunks."""
    for _ in range(6):
        before = pair.p.metric("vllm:num_preemptions_total")
        own = [pair.pool.submit(ask, pair.p, tokens(250), 400, None) for _ in range(8)]
        prompts = [tokens(1500) for _ in range(4)]
        answers = [pair.pool.submit(pair.both, prompt) for prompt in prompts]
        got = [answer.result(120) for answer in answers]
        for one in own:
            one.result(120)
        assert got == [pair.plain(prompt) for prompt in prompts]
        if pair.p.metric("vllm:num_preemptions_total") > before:
            return
    pytest.fail("no request was preempted")


def test_decode_is_stopped_and_prefill_goes_on(pair: Pair) -> None:
    prompt, other = tokens(900), tokens(200)
    pair.wire.hold.set()
    transfer = new()
    answer = pair.d_leg(prompt, transfer)
    pair.p_leg(prompt, transfer).result(30)
    pair.wait_loading()
    assert pair.p.metric(metrics.SENDS_OPEN) == 1
    pair.d.group.signal_all(signal.SIGSTOP)
    pair.wire.hold.clear()
    try:
        expected = pair.plain(other)
        wait_until(lambda: pair.p.metric(metrics.SENDS_OPEN) == pair.p.metric(metrics.KEPT_BYTES) == 0,
                   LOAD_S + PEER_TIMEOUT_S + 5, "let go by prefill")
        assert pair.plain(other) == expected
    finally:
        pair.d.group.signal_all(signal.SIGCONT)
    assert answer.result(60) == pair.plain(prompt)
    loaded(pair)


def test_prefill_is_stopped_and_decode_computes_the_prompt(pair: Pair) -> None:
    prompt, other = tokens(900), tokens(200)
    expected = [pair.plain(prompt), pair.plain(other)]
    pair.wire.hold.set()
    transfer, began = new(), time.monotonic()
    answer = pair.d_leg(prompt, transfer)
    pair.p_leg(prompt, transfer).result(30)
    pair.wait_loading()
    pair.p.group.signal_all(signal.SIGSTOP)
    pair.wire.hold.clear()
    try:
        assert ask(pair.d, other, OUTPUT, None) == expected[1]
        assert answer.result(60) == expected[0]
        assert time.monotonic() - began < LOAD_S + 20
        pair.wait_empty(pair.d)
    finally:
        pair.p.group.signal_all(signal.SIGCONT)
    pair.wait_empty(deadline_s=30.0)
    loaded(pair)


def test_a_peer_of_another_kind_is_refused_and_decode_does_not_wait(pair: Pair) -> None:
    """bfloat16 there, float32 here: nothing is taken, and the reason is in decode's log."""
    with Engine("other", pair.p.folder, key_file=pair.p.key_file, options=KvOptions(transport="tcp"),
                args=("--dtype", "bfloat16", "--num-gpu-blocks-override", "34")) as other:
        other.wait_ready()
        prompt, transfer, began = tokens(300), new(), time.monotonic()
        expected, refused = pair.plain(prompt), pair.outcomes(pair.d, "receive", "incompatible")
        answer = pair.d_leg(prompt, transfer)
        pair.p_leg(prompt, transfer, engine=other).result(60)
        assert answer.result(60) == expected
        assert time.monotonic() - began < 25
        assert pair.outcomes(pair.d, "receive", "incompatible") == refused + 1
        assert "fingerprint: " in pair.d.log.read_text()


def test_prefill_restarts_at_the_same_address_and_is_used_at_once(pair: Pair) -> None:
    prompt, transfer = tokens(900), new()
    expected = pair.plain(prompt)
    pair.wire.hold.set()
    answer = pair.d_leg(prompt, transfer)
    pair.p_leg(prompt, transfer).result(30)
    pair.wait_loading()
    pair.p.kill()
    pair.wire.hold.clear()
    pair.wire.cut()
    assert answer.result(60) == expected
    pair.wait_empty(pair.d)
    pair.p.start().wait_ready()
    loaded(pair)


def test_decode_restarts_and_its_former_life_gets_nothing(pair: Pair) -> None:
    loaded(pair)
    former = pair.d.record()
    assert former is not None
    pair.p_leg(tokens(900), new()).result(30)
    pair.d.kill()
    pair.wait_empty(pair.p, deadline_s=PEER_TIMEOUT_S + 5)
    pair.d.start().wait_ready()
    loaded(pair)
    prompt, transfer = tokens(300), new()
    answer = pair.d_leg(prompt, transfer, wait_s=5.0)
    now = pair.d.record()
    assert now is not None
    leg = legs.Leg(legs.VERSION, Role.PREFILL, TransferId(transfer), Attempt(1), 30.0,
                   legs.Peer(InstanceName("d"), former.incarnation, now.control))
    ask(pair.p, prompt, 1, legs.encode(leg))
    assert answer.result(60) == pair.plain(prompt)
    assert pair.outcomes(pair.d, "receive", "incarnation") == 1
