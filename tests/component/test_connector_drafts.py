"""A draft's KV between two engines that are stepped by hand: it moves with the rest where both draft alike, else it stays.

A draft with k tokens calls its layers' hooks k times a step: the first time for the prompt, then for what it writes behind
it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from connector_sides import (
    BLOCK,
    LAYERS,
    Engine,
    Hooks,
    cache,
    decode_leg,
    idle,
    making,
    prefill_leg,
    request,
    until,
)
from copies import RUNNERS

from xpyd_sidecar.contract import metrics, record
from xpyd_sidecar.contract.speculation import Speculation

pytestmark = pytest.mark.timeout(300)
LAYER = "model.layers.3.self_attn.attn"
EAGLE = Speculation("eagle", "a", "float32", num_speculative_tokens=3, layers=(LAYER,))
OTHER = msgspec.structs.replace(EAGLE, model="b")
NGRAM = Speculation("ngram", num_speculative_tokens=3)
FROM, INTO, BEHIND = [5, 9, 3], [11, 12, 13], 20
TOKENS = 3 * BLOCK
EACH = 2 * BLOCK * 4 * 4
"""Bytes of a block of an array."""


@pytest.fixture
def make(tmp_path: Path, copies: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    with making(lambda name, **options: Engine(name, tmp_path, **copies, **options)) as build:
        yield build


def hand_over(p: Engine, d: Engine, hooks: Hooks = "layers", late: Callable[[], Any] = lambda: True) -> None:
    """A prompt of three blocks, in two chunks; prefill's table has one more, for drafts.

    ``late``: what must be true before decode has blocks.
    """
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer), tokens=TOKENS), request(prefill_leg(transfer, d), tokens=TOKENS)
    d.scheduler.new_request(ours)
    p.fill(FROM, prompt=7)
    p.lookahead = BEHIND
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([*FROM, BEHIND],), 0)
    p.step(new=((theirs, [*FROM, BEHIND], 0, 20),), hooks=hooks)
    p.step(cached=((theirs, [], 20, TOKENS - 20),), hooks=hooks)
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.scheduler.match_tokens(ours, 0)[1], d)
    until(late, p, d)
    tokens, _ = d.scheduler.match_tokens(ours, 0)
    assert tokens is not None
    d.scheduler.on_allocated(ours, ([*INTO, BEHIND],), tokens)  # decode has one for its own drafts, too
    until(lambda: d.recved, p, d)
    assert d.failed == []
    until(lambda: idle(p) and idle(d), p, d)


def moved(p: Engine, d: Engine) -> int:
    """Blocks of one array each."""
    assert p.counts[metrics.PUSHED_BYTES] == d.counts[metrics.LOADED_BYTES]
    assert (p.counts["send/ok"], d.counts["receive/ok"]) == (1, 1)
    whole, rest = divmod(int(p.counts[metrics.PUSHED_BYTES]), EACH)
    assert rest == 0
    return whole


@pytest.mark.parametrize("hooks", ["layers", "graph"])
@pytest.mark.parametrize("copies", RUNNERS, indirect=True)
def test_a_draft_that_both_have_moves_once_although_its_hook_is_called_for_every_token(make: Callable[..., Engine],
                                                                                        hooks: Hooks) -> None:
    p, d = make("p", speculation=EAGLE), make("d", speculation=EAGLE)
    hand_over(p, d, hooks)
    assert d.holds(INTO, prompt=7, first=0)
    assert moved(p, d) == len(FROM) * (LAYERS + 1), "nothing twice, and not the block behind the prompt"
    assert not any(cache[BEHIND].any() for cache in d.caches[0].values())
    assert bool((p.caches[0][LAYER][BEHIND] == -1).all()), "the draft has written there"


def test_without_prefills_draft_the_draft_here_has_no_kv(make: Callable[..., Engine],
                                                         caplog: pytest.LogCaptureFixture) -> None:
    """So few of its drafts are accepted (``test_speculation``), and the text is the same."""
    p, d = make("p", speculation=NGRAM), make("d", speculation=EAGLE)
    hand_over(p, d)
    assert d.holds(INTO, prompt=7, first=0, layers=LAYERS)
    assert not d.caches[0][LAYER].any()
    assert moved(p, d) == len(FROM) * LAYERS
    assert "prefill engine p: speculation.method: 'eagle' here, 'ngram' there; prefill computes no KV" in caplog.text


def test_a_draft_that_decode_does_not_have_stays_at_prefill(make: Callable[..., Engine],
                                                            caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("p", speculation=EAGLE), make("d")
    hand_over(p, d)
    assert d.holds(INTO, prompt=7, first=0)
    assert moved(p, d) == len(FROM) * LAYERS
    assert "decode has no use for the KV of prefill's draft (eagle)" in caplog.text


@pytest.mark.parametrize("options", [{}, {"mode": "get"}, {"mode": "put"}], ids=str)
def test_drafts_of_other_models_do_not_move_though_they_look_alike(make: Callable[..., Engine],
                                                                   options: dict[str, Any]) -> None:
    p, d = make("p", speculation=EAGLE, **options), make("d", speculation=OTHER, **options)
    hand_over(p, d)
    assert d.holds(INTO, prompt=7, first=0, layers=LAYERS)
    assert not d.caches[0][LAYER].any()
    assert moved(p, d) == len(FROM) * LAYERS


@pytest.mark.parametrize("draft", [EAGLE, OTHER], ids=["alike", "otherwise"])
def test_what_prefill_cannot_keep_goes_into_the_buffer_and_a_draft_of_another_model_does_not(make: Callable[..., Engine],
                                                                                            draft: Speculation) -> None:
    p, d = make("p", speculation=EAGLE, keep_bytes=16 * EACH), make("d", speculation=draft, buffer_bytes=1 << 20)
    alike = draft is EAGLE
    hand_over(p, d, late=lambda: d.counts.get(metrics.BUFFERED_BYTES, 0) > 0)
    assert d.holds(INTO, prompt=7, first=0, layers=None if alike else LAYERS)
    assert alike or not d.caches[0][LAYER].any()
    assert moved(p, d) == len(FROM) * (LAYERS + alike)


def test_what_prefill_cannot_keep_goes_into_the_buffer_also_where_arrays_come_in_another_order(
        make: Callable[..., Engine]) -> None:
    """As in ranks that share out the layers otherwise, or in another version of vLLM."""
    def turned() -> dict[str, Any]:
        return {name: cache("HND") for name in reversed([f"layer{n}" for n in range(LAYERS)])}

    p, d = make("p", make_caches=turned, keep_bytes=16 * EACH), make("d", buffer_bytes=1 << 20)
    hand_over(p, d, late=lambda: d.counts.get(metrics.BUFFERED_BYTES, 0) > 0)
    assert all(bool((d.caches[0][name][into] == p.caches[0][name][block]).all())
               for name in d.caches[0] for block, into in zip(FROM, INTO, strict=True))
    assert moved(p, d) == len(FROM) * LAYERS


@pytest.mark.parametrize(("skipped", "said"), [(True, 1), (False, 0)])
def test_a_draft_that_does_not_run_before_the_copies_leave_is_told_of_once(
        make: Callable[..., Engine], caplog: pytest.LogCaptureFixture, skipped: bool, said: int) -> None:
    """As where a vLLM skips drafts that a request with one token cannot use."""
    p, d = make("p", speculation=EAGLE), make("d", speculation=EAGLE)
    if skipped:
        save = p.workers[0].save_layer
        p.workers[0].save_layer = lambda layer: None if layer == LAYER else save(layer)  # type: ignore[method-assign]
    hand_over(p, d)
    assert caplog.text.count("the draft has written no KV in a step of prefill") == said


def test_states_and_another_number_of_drafts_are_refused_with_the_field(make: Callable[..., Engine],
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    mtp = msgspec.structs.replace(EAGLE, method="mtp", states=True)
    p, d = make("p", speculation=mtp), make("d", speculation=msgspec.structs.replace(mtp, num_speculative_tokens=2))
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer, wait_s=600.0)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([1, 2, 3],), 0)
    p.step(new=((theirs, [1, 2, 3], 0, 40),))
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (0, False), d)
    d.scheduler.on_allocated(ours, ([1, 2, 3],), 0)
    until(lambda: idle(p) and idle(d), p, d)
    assert "refused prefill engine p: speculation.num_speculative_tokens: 2 here, 3 there; the states of" in caplog.text
    assert p.counts["send/incompatible"] == d.counts["receive/incompatible"] == 1


def test_the_record_says_how_an_engine_speculates(make: Callable[..., Engine]) -> None:
    """Its agent tells routers what of it matters for pairing."""
    known = record.read(make("d", speculation=EAGLE).folder, 0)
    assert known is not None
    assert known.speculation == EAGLE
