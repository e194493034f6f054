from __future__ import annotations

import json
from typing import Any

import pytest

from xpyd_sidecar.router.api import bodies, failover_modes, fields
from xpyd_sidecar.router.api.failover_modes import FailoverMode, one_choice, way_of
from xpyd_sidecar.router.api.fields import Api

REPLAYED = {"structured_outputs", "repetition_detection", "thinking_token_budget", "suffix", "prompt_embeds", "vllm_xargs",
            "prompt_logprobs", "routed_experts_prompt_start", "mm_payload", "return_mm_kwargs", "media_io_kwargs",
            "mm_processor_kwargs", "return_token_offsets", "stream_interval", "return_weight_versions", "watermarking"}
"""Fields that make a replay of a request whatever they say."""
REFUSED = {"kv_transfer_params", "ec_transfer_params"}


def way(api: Api = "completions", **given: Any) -> FailoverMode:
    prompt: dict[str, Any] = {"prompt": "x"} if api == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    request = bodies.parse(api, json.dumps({"temperature": 0, **prompt, **given}).encode())
    return way_of(api, request.fields)


def test_every_field_that_the_router_knows_is_decided() -> None:
    known = set(fields.TABLE["completions"]) | set(fields.TABLE["chat"])
    assert known - set(failover_modes.TABLE) == REPLAYED | REFUSED
    assert set(failover_modes.TABLE) <= known
    assert not REPLAYED & set(failover_modes.TABLE)


@pytest.mark.parametrize("given", [
    {}, {"max_tokens": 5, "min_tokens": 2, "ignore_eos": True}, {"stop": "x"}, {"stop": ["a", "b"], "stop_token_ids": [3]},
    {"include_stop_str_in_output": True, "stop": "x"}, {"logit_bias": {"3": 1}}, {"skip_special_tokens": False},
    {"repetition_penalty": 1.2}, {"stream_options": {"include_usage": True}}, {"logprobs": 3}, {"temperature": 0.0},
    {"temperature": 1e-6}, {"seed": 3}, {"n": 1}, {"echo": False}, {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": None}, {"prompt": [1, 2, 3]},
    {"truncate_prompt_tokens": 4}, {"bad_words": []}])
def test_what_depends_on_the_tokens_before_it_goes_on_from_them(given: dict[str, Any]) -> None:
    assert way(**given) is FailoverMode.CONTINUE


@pytest.mark.parametrize("given", [
    {"presence_penalty": 0.1}, {"frequency_penalty": -1}, {"structured_outputs": {"regex": "a"}}, {"n": 2},
    {"echo": True}, {"response_format": {"type": "json_object"}}, {"repetition_detection": {}}, {"bad_words": ["x"]},
    {"prompt": ["a", "b"]},
    {"thinking_token_budget": 5}, {"temperature": 0.5, "seed": 1}, {"seed": 1, "temperature": None}, {"prompt_logprobs": 1},
    {"prompt": [[1], [2]]}, {"use_beam_search": True}, {"something_new": 1}, {"spaces_between_special_tokens": False},
    {"best_of": 3}, {"response_format": 5}, {"frequency_penalty": "x"}])
def test_what_has_a_state_or_a_seed_is_run_again(given: dict[str, Any]) -> None:
    assert way(**given) is FailoverMode.REPLAY


@pytest.mark.parametrize("given", [{"temperature": 0.5}, {"temperature": None}, {"temperature": 1, "seed": None},
                                   {"temperature": 0.7, "structured_outputs": {"regex": "a"}}])
def test_what_is_drawn_at_random_has_no_second_run(given: dict[str, Any]) -> None:
    assert way(**given) is FailoverMode.ERROR


def test_without_temperature_it_is_drawn_at_random() -> None:
    assert way_of("completions", bodies.parse("completions", b'{"prompt":"x"}').fields) is FailoverMode.ERROR


@pytest.mark.parametrize(("given", "expected"), [
    ({"reasoning_effort": "low", "max_completion_tokens": 7, "logprobs": True, "top_logprobs": 2}, FailoverMode.CONTINUE),
    ({"tools": [{"type": "function"}]}, FailoverMode.REPLAY),
    ({"tools": [{"type": "function"}], "tool_choice": "auto"}, FailoverMode.REPLAY),
    ({"tools": [{"type": "function"}], "tool_choice": "none"}, FailoverMode.CONTINUE),
    ({"tools": []}, FailoverMode.CONTINUE),
    ({"include_reasoning": False}, FailoverMode.REPLAY), ({"include_reasoning": True}, FailoverMode.CONTINUE),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, FailoverMode.CONTINUE),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
     FailoverMode.REPLAY),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, FailoverMode.REPLAY)])
def test_chats(given: dict[str, Any], expected: FailoverMode) -> None:
    assert way("chat", **given) is expected


@pytest.mark.parametrize(("given", "one"), [({}, True), ({"n": 1}, True), ({"n": 2}, False), ({"best_of": 2}, False),
                                            ({"prompt": ["a", "b"]}, False), ({"prompt": [3, 4]}, True),
                                            ({"n": None}, True)])
def test_how_many_choices_an_answer_has(given: dict[str, Any], one: bool) -> None:
    assert one_choice(bodies.parse("completions", json.dumps({"prompt": "x", **given}).encode()).fields) is one
