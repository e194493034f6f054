"""Which sampled streams may go on elsewhere: every field of vLLM's requests, and what engines add to them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.router.api import bodies, failover_modes, fields
from xpyd_sidecar.router.api.failover_modes import (
    EXACT,
    EXACT_ALONE,
    UNTOLD,
    FailoverMode,
    SamplingTerms,
    goes_on_sampled,
    keeps_distribution,
    told_of,
    way_of,
)
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.stream.continuation import go_on, may_go_on, position_of, speaks_first
from xpyd_sidecar.router.stream.position import Position

PLAIN = told_of([Sampling()])
TERMS = SamplingTerms(True, PLAIN)
REFUSED = {"kv_transfer_params", "ec_transfer_params"}


def request_of(api: Api = "completions", **given: Any) -> bodies.GenerationRequest:
    prompt: dict[str, Any] = {"prompt": "x"} if api == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    return bodies.parse(api, json.dumps({"stream": True, **prompt, **given}).encode())


def goes_on(api: Api = "completions", told: Any = PLAIN, **given: Any) -> bool:
    position = position_of(request_of(api, **given), goes_on=True, terms=SamplingTerms(True, told))
    return position is not None and position.sampled


def test_every_field_that_may_go_on_whatever_it_says_is_one_that_the_router_knows_and_has_a_reason() -> None:
    known = set(fields.TABLE["completions"]) | set(fields.TABLE["chat"])
    assert set(EXACT) <= known - REFUSED
    assert all(EXACT.values())


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_field_of_vllms_requests_stands_in_a_table_or_stops_a_sampled_stream(api: Api) -> None:
    model = CompletionRequest if api == "completions" else ChatCompletionRequest
    names = set(model.model_fields)
    assert len(names) > 40
    for name in names - set(EXACT) - REFUSED:
        given = bodies.split(json.dumps({name: {"x": 1}}).encode())
        with_prompt = {**request_of(api).fields, **given}
        assert not goes_on_sampled(api, with_prompt, PLAIN), name


def test_a_field_that_nobody_knows_needs_the_history() -> None:
    assert not keeps_distribution(bodies.split(b'{"prompt":"x","something_new":1}'))
    assert keeps_distribution(bodies.split(b'{"prompt":"x","something_new":null}'))
    assert not goes_on(something_new=1)


def test_what_a_sampled_stream_may_have_a_greedy_one_may_have_as_well() -> None:
    always = {name for name, ask in failover_modes.TABLE.items() if ask is failover_modes._continues}
    assert set(EXACT) - {"prompt", "messages"} == always - {"stop"}


@pytest.mark.parametrize("given", [
    {}, {"temperature": 0.7}, {"temperature": None}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}, {"logit_bias": {"3": 1}},
    {"allowed_token_ids": [1, 2]}, {"repetition_penalty": 1.2}, {"stop_token_ids": [3]}, {"ignore_eos": True},
    {"logprobs": 3}, {"max_tokens": 5, "min_tokens": 2}, {"stop": None}, {"stop": []}, {"bad_words": []},
    {"presence_penalty": 0, "frequency_penalty": 0.0}, {"n": 1}, {"response_format": {"type": "text"}}, {"prompt": [1, 2]},
    {"seed": None}])
def test_what_depends_on_tokens_alone_keeps_its_distribution(given: dict[str, Any]) -> None:
    assert goes_on(**given)


@pytest.mark.parametrize("given", [
    {"presence_penalty": 0.1}, {"frequency_penalty": -1}, {"stop": "x"}, {"stop": ["x"]}, {"bad_words": ["x"]}, {"n": 2},
    {"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}}, {"repetition_detection": {}},
    {"thinking_token_budget": 5}, {"watermarking": True}, {"vllm_xargs": {"a": 1}}, {"echo": True}, {"prompt": ["a", "b"]},
    {"prompt_logprobs": 1}, {"use_beam_search": True}, {"spaces_between_special_tokens": False}])
def test_what_needs_the_history_does_not_go_on(given: dict[str, Any]) -> None:
    assert not goes_on(temperature=0.7, **given)


def test_chats() -> None:
    assert goes_on("chat", tools=[], reasoning_effort="low", max_completion_tokens=7)
    assert not goes_on("chat", tools=[{"type": "function"}])
    assert not goes_on("chat", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_a_seeded_or_greedy_stream_is_none_of_these() -> None:
    for given, way in (({"seed": 3}, FailoverMode.REPLAY), ({"temperature": 0}, FailoverMode.CONTINUE)):
        position = position_of(request_of(**given), goes_on=True, terms=TERMS)
        assert position is not None
        assert (position.way, position.sampled, position.lasts) == (way, False, True)


def test_by_the_rule_exact_nothing_sampled_goes_on() -> None:
    position = position_of(request_of(), goes_on=True, terms=SamplingTerms(False, PLAIN))
    assert position is not None, "its tokens are counted"
    assert not position.lasts
    assert not position.goes_on


# ---- what engines add


def test_from_engines_that_tell_nothing_or_other_things_nothing_sampled_goes_on() -> None:
    assert not goes_on(told=UNTOLD)
    assert not goes_on(told=told_of([]))
    assert not goes_on(told=told_of([Sampling(), None]))
    assert not goes_on(told=told_of([Sampling(), Sampling((("top_p", 0.9),))]))
    assert goes_on(told=told_of([Sampling((("top_p", 0.9),)), Sampling((("top_p", 0.9),))]))


@pytest.mark.parametrize("added", [
    Sampling((("presence_penalty", 0.5),)), Sampling((("frequency_penalty", 0.5),)), Sampling(own=("logits_processors",)),
    Sampling(own=("watermarking",)), Sampling((("something_new", 1.0),)), Sampling(own=("lossy_speculation",))])
def test_what_engines_add_counts_as_if_it_stood_in_the_request(added: Sampling) -> None:
    told = told_of([added, added])
    assert not goes_on(told=told)
    again = way_of("completions", request_of(temperature=0).fields, told)
    assert again is FailoverMode.REPLAY, "a greedy stream is run again"
    assert way_of("completions", request_of(temperature=0).fields, told_of([None, added])) is FailoverMode.REPLAY
    assert way_of("completions", request_of(temperature=0).fields, PLAIN) is FailoverMode.CONTINUE


def test_a_field_of_the_request_counts_before_what_engines_add() -> None:
    told = told_of([Sampling((("presence_penalty", 0.5), ("temperature", 0.0)))])
    assert goes_on(told=told, presence_penalty=0, temperature=0.5)
    assert not goes_on(told=told, presence_penalty=None, temperature=0.5)
    greedy = told_of([Sampling((("temperature", 0.0),))])
    assert way_of("completions", request_of().fields, greedy) is FailoverMode.CONTINUE, "greedy without saying so"
    assert way_of("completions", request_of(temperature=1).fields, greedy) is FailoverMode.ERROR
    unlike = told_of([Sampling((("temperature", 0.0),)), None])
    assert way_of("completions", request_of().fields, unlike) is FailoverMode.ERROR


def test_prefills_token_is_shown_early_for_greedy_requests_alone() -> None:
    for temperature, shown in ((0, True), (0.7, False), (None, False)):
        request = request_of(max_tokens=9, temperature=temperature)
        assert speaks_first(request, position_of(request, goes_on=True, terms=TERMS)) is shown


# ---- what is asked


def position_with(request: bodies.GenerationRequest, *tokens: tuple[str, str], terms: SamplingTerms = TERMS) -> Position:
    position = position_of(request, goes_on=True, terms=terms)
    assert position is not None
    position.prompt = b"7,8"
    for text, ids in tokens:
        position.log += f"{json.dumps(text)}\t{ids}\n".encode()
    return position


def asked(request: bodies.GenerationRequest, position: Position, told: Any = PLAIN) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bodies.decode_body(go_on(request, position, told).request, None))
    return found


def test_it_goes_on_from_all_ids_and_with_less_to_come() -> None:
    request = request_of(prompt="a prompt of some length", max_tokens=20, min_tokens=5)
    position = position_with(request, ("a", "1"), ("", "2"), ("", "3"))
    assert may_go_on(request, position, TERMS, TERMS)
    body = asked(request, position)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([7, 8, 1, 2, 3], 17, 2)
    going = go_on(request, position)
    assert going.seam is not None
    assert (going.texts, list(going.ids[0])) == ({}, []), "nothing comes again"
    assert go_on(request, position_with(request, ("", "2"), ("a", "1"))).seam is None


@pytest.mark.parametrize(("given", "added", "wanted"), [
    ({}, Sampling(), 14), ({"max_tokens": 9}, Sampling(), 7), ({"max_tokens": None}, Sampling((("max_tokens", 50.0),)), 48),
    ({"max_tokens": 100}, Sampling((("max_tokens", 50.0),), max_tokens=50), 48),
    ({"max_tokens": 10}, Sampling((("max_tokens", 50.0),), max_tokens=50), 8), ({"max_tokens": None}, Sampling(), None)])
def test_limits_of_engines_are_not_counted_anew(given: dict[str, Any], added: Sampling, wanted: int | None) -> None:
    told = told_of([added])
    request = request_of(**given)
    position = position_with(request, ("a", "1"), ("b", "2"), terms=SamplingTerms(True, told))
    assert asked(request, position, told)["max_tokens"] == wanted


def test_a_stream_without_a_token_begins_anew() -> None:
    request = request_of(max_tokens=5)
    position = position_with(request)
    assert may_go_on(request, position, TERMS, TERMS)
    assert (asked(request, position)["prompt"], asked(request, position)["max_tokens"]) == ("x", 5)


def test_where_a_sampled_stream_ends_with_an_error() -> None:
    request = request_of(max_tokens=3, prompt="a prompt of some length")
    here = position_with(request, ("a", "1"))
    assert may_go_on(request, here, TERMS, TERMS)
    other = SamplingTerms(True, told_of([Sampling((("top_k", 5.0),))]))
    assert not may_go_on(request, here, TERMS, other), "another engine came"
    assert not may_go_on(request, here, TERMS, SamplingTerms(True, UNTOLD))
    assert not may_go_on(request, position_with(request, ("a", "1"), ("b", "2"), ("c", "3")), TERMS, TERMS), "none is left"
    here.forgets = True
    assert not may_go_on(request, here, TERMS, TERMS), "ids are of no use"
    nameless = position_with(request, ("a", "1"))
    nameless.prompt = b""
    assert not may_go_on(request, nameless, TERMS, TERMS)
    short = request_of(prompt="x")
    assert not may_go_on(short, position_with(short, ("a", "1"), ("", "2")), TERMS, TERMS), "too little is known"


def test_a_greedy_stream_is_run_again_where_engines_now_add_what_needs_the_history() -> None:
    request = request_of(temperature=0)
    position = position_with(request, ("a", "1"), terms=EXACT_ALONE)
    assert may_go_on(request, position, EXACT_ALONE, TERMS)
    assert not position.replays
    assert may_go_on(request, position, EXACT_ALONE, SamplingTerms(True, told_of([Sampling((("presence_penalty", 1.0),))])))
    assert position.replays


def test_a_parser_between_text_and_what_is_seen_stops_it_inside_a_character() -> None:
    request = request_of("chat")
    position = position_with(request)
    position.log += b'{"reasoning":"thinking at length"}\t1\n'
    assert may_go_on(request, position, TERMS, TERMS)
    position.log += b"{}\t2\n"
    assert not may_go_on(request, position, TERMS, TERMS)
