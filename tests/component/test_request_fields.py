"""The table of request fields against vLLM's own request models: a new vLLM with a new field fails here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm_places import MODULE

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.contract.legs import FIELD, Leg, Peer
from xpyd_sidecar.router.api import paths
from xpyd_sidecar.router.api.bodies import PROMPT, decode_body, in_dialect, parse, passed_body, prefill_body
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.fields import TABLE, Api, OnPrefill

P_LEG = Leg(1, Role.PREFILL, TransferId("0" * 32), Attempt(1), 5.0,
            Peer(InstanceName("d"), Incarnation("i"), HostPort("h:1")))
D_LEG = Leg(1, Role.DECODE, TransferId("0" * 32), Attempt(1), 5.0)
NOT_VLLMS = {"best_of", *(("return_weight_versions",) if MODULE == "v032" else ())}
"""Fields of OpenAI's API that older engines knew, and those that only newer ones know."""


@pytest.fixture(scope="module")
def models() -> dict[Api, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return {"completions": CompletionRequest, "chat": ChatCompletionRequest}


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_field_of_the_engine_is_classified(models: dict[Api, Any], api: Api) -> None:
    known = set(models[api].model_fields)
    assert known - set(TABLE[api]) == set(), "not in the table: decide what prefill does with them"
    common = set(TABLE["completions"]) & set(TABLE["chat"])
    extra = set(TABLE[api]) - known - NOT_VLLMS
    assert extra <= common, f"the engine does not know {extra - common}"
    assert set(TABLE[api]) <= set().union(*(model.model_fields for model in models.values())) | NOT_VLLMS


FULL: dict[Api, dict[str, Any]] = {
    "completions": {
        "model": "m", "prompt": "hi", "max_tokens": 40, "min_tokens": 5, "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 3, "logprob_token_ids": [1], "stop": ["x"], "stop_token_ids": [3], "seed": 1, "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1, "bad_words": ["y"],
        "structured_outputs": {"regex": "a+"}, "truncate_prompt_tokens": 10, "cache_salt": "abc", "return_token_ids": True,
        "suffix": "z", "priority": 1, "thinking_token_budget": 10, "repetition_detection": None, "user": "u"},
    "chat": {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 40, "min_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 3, "stop": "x", "seed": 1,
        "tool_choice": "auto",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "reasoning_effort": "low",
        "response_format": {"type": "json_object"}, "chat_template_kwargs": {"a": 1},
        "documents": [{"title": "t", "text": "x"}],
        "add_generation_prompt": True, "continue_final_message": False, "parallel_tool_calls": False, "n": 1},
}


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_engine_accepts_both_legs_of_a_request_with_many_fields(models: dict[Api, Any], api: Api) -> None:
    request = parse(api, json.dumps(FULL[api]).encode())
    prefill = models[api].model_validate_json(prefill_body(request, P_LEG))
    decode = models[api].model_validate_json(decode_body(request, None))
    assert prefill.max_tokens == 1
    assert (prefill.stream, prefill.stream_options, prefill.logprobs or None) == (False, None, None)
    sampling = prefill.to_sampling_params(1, {})
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.n) == (1, 0, 0.0, 1)
    assert sampling.prompt_logprobs is None
    assert sampling.stop == []
    assert decode.stream
    assert decode.model_dump(exclude_unset=True).keys() == FULL[api].keys()


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_what_the_prompt_is_made_from_is_equal_on_both_legs(models: dict[Api, Any], api: Api) -> None:
    request = parse(api, json.dumps(FULL[api]).encode())
    prefill = models[api].model_validate_json(prefill_body(request, P_LEG))
    decode = models[api].model_validate_json(decode_body(request, None))

    class Config:
        max_model_len = 2048

    left, right = prefill.build_tok_params(Config()), decode.build_tok_params(Config())
    for name in ("max_total_tokens", "truncate_prompt_tokens", "truncation_side", "add_special_tokens"):
        assert getattr(left, name) == getattr(right, name), name
    assert left.max_truncation_tokens == right.max_truncation_tokens
    if api == "chat":
        assert prefill.build_chat_params(None, "auto") == decode.build_chat_params(None, "auto")
        assert prefill.messages == decode.messages
        assert prefill.tools == decode.tools
        assert prefill.tool_choice == decode.tool_choice
    else:
        assert (prefill.prompt, prefill.suffix) == (decode.prompt, decode.suffix)


def test_a_chat_cut_to_the_context_skips_prefill(models: dict[Api, Any]) -> None:
    # Without max_tokens the cut leaves the whole context to the prompt, with max_tokens=1 one token less.
    class Config:
        max_model_len = 2048

    body = {"messages": [{"role": "user", "content": "hi"}], "truncate_prompt_tokens": -1}
    request = parse("chat", json.dumps(body).encode())
    assert request.skips == "truncate_prompt_tokens"
    prefill = models["chat"].model_validate_json(prefill_body(request, P_LEG)).build_tok_params(Config())
    decode = models["chat"].model_validate_json(decode_body(request, None)).build_tok_params(Config())
    differ = prefill.max_truncation_tokens != decode.max_truncation_tokens
    assert differ == (MODULE == "v032"), "where no version differs any more, the skip can go"


@pytest.fixture(scope="module")
def spoken() -> dict[str, Any]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return {"/v1/messages": AnthropicMessagesRequest, "/v1/responses": ResponsesRequest}


PROMPT_OF = {
    "/v1/messages": {
        "model", "messages", "system", "thinking", "tool_choice", "tools", "output_config", "metadata", "mm_payload",
        "return_mm_kwargs", "cache_salt", "ec_transfer_params", "vllm_xargs", "chat_template_kwargs"},
    "/v1/responses": {
        "background", "input", "instructions", "max_tool_calls", "metadata", "model", "parallel_tool_calls",
        "previous_response_id", "prompt", "reasoning", "include_reasoning", "service_tier", "text", "tool_choice", "tools",
        "truncation", "skip_special_tokens", "user", "prompt_cache_key", "request_id", "session_id", "media_io_kwargs",
        "mm_processor_kwargs", "priority", "mm_payload", "return_mm_kwargs", "cache_salt", "previous_input_messages",
        "vllm_xargs", "ec_transfer_params", "chat_template_kwargs"},
}
"""What a prefill leg keeps: it may be part of the prompt, or says nothing of the answer."""
if MODULE != "v032":
    PROMPT_OF["/v1/responses"] |= {
        "safety_identifier", "prompt_cache_options", "spaces_between_special_tokens", "prompt_cache_retention"}


def api_of(path: str) -> Api:
    route = paths.find(path)
    assert route is not None
    assert route.api is not None
    return route.api


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_every_field_of_other_dialects_is_classified(spoken: dict[str, Any], path: str) -> None:
    api = api_of(path)
    changed = {name for name, rule in TABLE[api].items() if rule.leg is not OnPrefill.KEEP} | {FIELD}
    assert changed | PROMPT_OF[path] == set(spoken[path].model_fields), "decide what prefill does with them"
    assert not changed & PROMPT_OF[path]
    assert set(PROMPT[api]) <= PROMPT_OF[path]


THINKS = {"model": "m", "max_tokens": 4096, "messages": [{"role": "user", "content": "hi"}],
          "thinking": {"type": "enabled", "budget_tokens": 2048}}
SHOWS = {"model": "m", "input": "hi", "max_output_tokens": 40, "top_logprobs": 2, "stream": True,
         "include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(("path", "body"), [("/v1/messages", THINKS), ("/v1/responses", SHOWS)])
def test_both_legs_in_other_dialects_pass_the_engines_checks(spoken: dict[str, Any], path: str,
                                                             body: dict[str, Any]) -> None:
    request = in_dialect(api_of(path), passed_body(path, json.dumps(body).encode()))
    prefill = spoken[path](**json.loads(prefill_body(request, P_LEG)))
    decode = spoken[path](**json.loads(decode_body(request, D_LEG)))
    assert {name: getattr(prefill, name) for name in PROMPT_OF[path] - {"request_id"}} == {
        name: getattr(decode, name) for name in PROMPT_OF[path] - {"request_id"}}


STREAMS = ("true", "false", "null", "0", "1", "2", "1.0", "0.5", '"true"', '"False"', '"yes"', '"off"', '"1"', '"maybe"',
           "[]", "{}")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("raw", STREAMS)
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_router_takes_stream_and_a_byte_order_mark_as_the_engine_does(models: dict[Api, Any], api: Api, raw: str,
                                                                          mark: bytes) -> None:
    prompt = '"prompt":"hi"' if api == "completions" else '"messages":[{"role":"user","content":"hi"}]'
    body = mark + f'{{"model":"m",{prompt},"stream":{raw}}}'.encode()
    try:
        expected = bool(models[api](**json.loads(body)).stream)
    except ValueError:
        with pytest.raises(HttpFault):
            parse(api, body)
    else:
        request = parse(api, body)
        assert request.stream is expected
        assert bool(models[api](**json.loads(decode_body(request, D_LEG))).stream) is expected


@pytest.mark.parametrize("raw", STREAMS)
@pytest.mark.parametrize(("path", "said"), [("/v1/messages", THINKS), ("/v1/responses", SHOWS)])
def test_so_it_does_in_other_dialects(spoken: dict[str, Any], path: str, said: dict[str, Any], raw: str) -> None:
    body = {**said, "stream": json.loads(raw)}
    request = in_dialect(api_of(path), passed_body(path, json.dumps(body).encode()))
    try:
        assert request.stream is bool(spoken[path](**body).stream)
    except ValueError:
        assert not request.stream, "an answer of 400 is not read as a stream"
