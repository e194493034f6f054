"""Which sampled streams go on elsewhere; those that do have the distribution of streams that nothing happened to."""

from __future__ import annotations

import math

import pytest
from chi_square import p_of, upper_gamma
from msgspec import Raw
from sampled_streams import MAX_TOKENS, PLANTS, run
from seam_judge import judge

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.routing.fields import TABLE, Api
from xpyd_sidecar.routing.sampled import EXACT, HISTORY, UNTOLD, Told, keeps_distribution, told_of
from xpyd_sidecar.routing.ways import goes_on_sampled

ALIKE = told_of([Sampling(), Sampling()])
ASKED = {"model": Raw(b'"tiny"'), "prompt": Raw(b'"once"'), "stream": Raw(b"true"), "temperature": Raw(b"0.7")}
CHAT = {**{name: raw for name, raw in ASKED.items() if name != "prompt"},
        "messages": Raw(b'[{"role":"user","content":"a"}]')}


USED = {
    "presence_penalty": b"0.5", "frequency_penalty": b"0.5", "structured_outputs": b'{"regex": "a"}',
    "response_format": b'{"type": "json_object"}', "tools": b'[{"type": "function"}]', "include_reasoning": b"false",
    "repetition_detection": b'{"max_pattern_size": 4}', "watermarking": b"{}", "spaces_between_special_tokens": b"false",
    "thinking_token_budget": b"10", "stop": b'["a"]', "bad_words": b'["a"]', "n": b"2", "best_of": b"2",
    "use_beam_search": b"true", "prompt_embeds": b'"a"', "echo": b"true", "suffix": b'"a"', "mm_payload": b"{}",
    "media_io_kwargs": b"{}", "mm_processor_kwargs": b"{}", "prompt_logprobs": b"1", "routed_experts_prompt_start": b"1",
    "return_prompt_text": b"true", "return_token_offsets": b"true", "return_mm_kwargs": b"true", "vllm_xargs": b'{"a": 1}',
    "stream_interval": b"2",
}
"""Fields that need the output's history, with values that use them."""


def test_every_field_of_a_request_has_one_row_and_one_that_has_none_needs_the_outputs_history() -> None:
    assert not EXACT.keys() & HISTORY.keys()
    assert all(EXACT.values())
    assert all(HISTORY.values())
    assert USED.keys() == HISTORY.keys()
    for name, value in {**USED, "a_field_of_next_year": b"1"}.items():
        for api in TABLE:
            asked = {**(ASKED if api == "completions" else CHAT), name: Raw(value)}
            if name in TABLE[api] or name not in USED:  # an engine ignores what another API has
                assert not goes_on_sampled(api, asked, ALIKE), (api, name)
            assert goes_on_sampled(api, {**asked, name: Raw(b"null")}, ALIKE), name
    for name in EXACT:
        assert keeps_distribution({**ASKED, name: Raw(b"1")}), name
    assert goes_on_sampled("completions", {**ASKED, "stop": Raw(b"[]")}, ALIKE)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_fields_that_nobody_knows_of_are_few(api: Api) -> None:
    assert {name for name in TABLE[api] if name not in EXACT and name not in HISTORY} <= {
        "kv_transfer_params", "ec_transfer_params", "logits_processors", "return_metrics"}


@pytest.mark.parametrize(("field", "goes_on"), [
    (b"temperature", True), (b"top_p", True), (b"repetition_penalty", True), (b"presence_penalty", False),
    (b"frequency_penalty", False),
])
def test_what_engines_add_counts_as_if_it_stood_in_the_request(field: bytes, goes_on: bool) -> None:
    told = told_of([Sampling(((field.decode(), 0.5),))])
    assert goes_on_sampled("completions", ASKED, told) == goes_on
    null = {**ASKED, field.decode(): Raw(b"null")}
    assert goes_on_sampled("completions", null, told) == goes_on, "null is as good as absent"
    if not goes_on:
        assert goes_on_sampled("completions", {**ASKED, field.decode(): Raw(b"0")}, told), "the client's own counts first"


@pytest.mark.parametrize("told", [
    UNTOLD, told_of([]), told_of([None]), told_of([Sampling(), None]), told_of([Sampling(), Sampling((("top_k", 3.0),))]),
    told_of([Sampling(own=("my.processor",))]),
])
def test_nothing_sampled_goes_on_where_engines_tell_nothing_tell_different_things_or_have_processors(told: Told) -> None:
    assert goes_on_sampled("completions", ASKED, ALIKE)
    assert not goes_on_sampled("completions", ASKED, told)


def test_of_engines_that_are_not_alike_each_is_looked_at() -> None:
    told = told_of([Sampling(max_tokens=9), Sampling((("top_k", 3.0),), max_tokens=5)])
    assert (told.alike, told.bound, told.default("top_k")) == (False, 5, None)
    assert [one.get("top_k") for one in told.counted(ASKED)] == [Raw(b"3.0"), None]


# ---- the judge


@pytest.mark.parametrize(("df", "x", "p"), [(1, 3.841, 0.05), (5, 11.070, 0.05), (10, 29.588, 0.001), (40, 40.0, 0.4703)])
def test_p_values_are_those_of_tables(df: int, x: float, p: float) -> None:
    assert math.isclose(upper_gamma(df / 2, x / 2), p, rel_tol=2e-3)


def test_equal_samples_are_equal_and_different_ones_are_not() -> None:
    one = {"a": 100, "b": 200, "c": 1}
    assert p_of(one, one) == 1.0
    assert p_of(one, {"a": 200, "b": 100}) < 1e-12
    assert p_of({}, one) == 1.0


@pytest.mark.parametrize("streams", [200, 2000])
def test_streams_that_went_on_have_the_distribution_of_those_that_did_not(streams: int) -> None:
    samples = run(streams, seed=1)
    assert sum(sample.cut and sample.seam is not None for sample in samples) > streams / 4, "that went on elsewhere"
    verdict = judge(samples, MAX_TOKENS)
    assert not verdict.rejects, verdict.worst


@pytest.mark.parametrize("name", PLANTS)
def test_the_judge_rejects_an_error_in_how_they_go_on(name: str) -> None:
    verdict = judge(run(2000, seed=1, plant=PLANTS[name]), MAX_TOKENS)
    assert verdict.rejects, verdict.worst
