from __future__ import annotations

import json
from typing import Any

import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.errors import OurFault
from xpyd_sidecar.router.api.bodies import body_of, decode_body, parse, prefill_body
from xpyd_sidecar.router.api.faults import Fault
from xpyd_sidecar.router.api.fields import Api

PEER = legs.Peer(InstanceName("d0"), Incarnation("i"), HostPort("h:1"))
P_LEG = legs.Leg(1, Role.PREFILL, TransferId("0" * 32), Attempt(2), 5.0, PEER)
D_LEG = legs.Leg(1, Role.DECODE, TransferId("0" * 32), Attempt(2), 5.0)


def prefill(api: Api, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(prefill_body(parse(api, json.dumps(fields).encode()), P_LEG))
    assert legs.REMOTE not in body[legs.FIELD]
    assert legs.decode(body.pop(legs.FIELD)) == P_LEG
    return body


def fault_of(api: Api, body: bytes) -> Fault:
    with pytest.raises(Fault) as caught:
        parse(api, body)
    return caught.value


def test_prefill_gets_one_token_and_nothing_that_one_token_contradicts() -> None:
    fields = {"prompt": "hi", "model": "m", "max_tokens": 50, "min_tokens": 5, "stream": True, "logprobs": 3, "stop": ["x"],
              "stream_options": {"include_usage": True}, "temperature": 0.7, "top_p": 0.9, "seed": 3, "suffix": "end",
              "structured_outputs": {"regex": "a"}, "cache_salt": "s", "priority": 2, "new_field": 1}
    assert prefill("completions", **fields) == {
        "prompt": "hi", "model": "m", "max_tokens": 1, "stream": False, "temperature": 0, "suffix": "end",
        "cache_salt": "s",
        "priority": 2, "new_field": 1}


def test_max_tokens_may_be_absent() -> None:
    assert prefill("completions", prompt="hi")["max_tokens"] == 1
    assert json.loads(decode_body(parse("completions", b'{"prompt":"hi"}'), None)) == {"prompt": "hi"}


def test_max_completion_tokens_becomes_one_only_where_it_was_sent() -> None:
    assert "max_completion_tokens" not in prefill("chat", messages=[])
    assert prefill("chat", messages=[], max_completion_tokens=99) == {
        "messages": [], "max_completion_tokens": 1, "max_tokens": 1, "stream": False, "temperature": 0}


def test_decode_gets_the_request_as_it_came() -> None:
    fields = {"prompt": [1, 2, 3], "n": 1, "stream": True, "x": {"deep": [1, {"y": "ü \u2028 \"q\""}]}}
    request = parse("completions", json.dumps(fields).encode())
    assert json.loads(decode_body(request, None)) == fields
    body = json.loads(decode_body(request, D_LEG))
    assert body[legs.FIELD][legs.REMOTE] is True
    assert legs.decode(body.pop(legs.FIELD)) == D_LEG
    assert body == fields


@pytest.mark.parametrize(("api", "fields", "field"), [
    ("completions", {"prompt": "a", "n": 2}, "n"),
    ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": [[1], [2]]}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
    ("completions", {"prompt": "a", "echo": True, "logprobs": 0}, "echo"),
    ("completions", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ("completions", {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    ("completions", {"prompt": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ("completions", {"prompt": "a", "truncate_prompt_tokens": "-1"}, "truncate_prompt_tokens"),
    ("completions", {"prompt": "a", "echo": 1, "logprobs": 0}, "echo"),
    ("completions", {"prompt": "a", "use_beam_search": "yes"}, "use_beam_search"),
    ("chat", {"messages": [], "echo": True}, "echo"),
    ("chat", {"messages": [], "n": 2}, "n"),
])
def test_requests_whose_kv_cannot_be_shared_skip_prefill(api: Api, fields: dict[str, Any], field: str) -> None:
    assert parse(api, json.dumps(fields).encode()).skips == field


@pytest.mark.parametrize(("api", "fields"), [
    ("completions", {"prompt": ["a"]}),
    ("completions", {"prompt": [[1, 2]]}),
    ("completions", {"prompt": [1, 2]}),
    ("completions", {"prompt": " [\"a\", \"b\"]"}),
    ("completions", {"prompt": "a", "n": 1, "best_of": 1}),
    ("completions", {"prompt": "a", "n": None, "prompt_logprobs": None, "use_beam_search": False, "prompt_embeds": None}),
    ("completions", {"prompt": "a", "echo": True}),
    ("completions", {"prompt": "a", "echo": True, "logprobs": None}),
    ("completions", {"prompt": "a", "truncate_prompt_tokens": 100}),
    ("chat", {"messages": [], "echo": False, "logprobs": True, "top_logprobs": 3}),
])
def test_all_others_are_split(api: Api, fields: dict[str, Any]) -> None:
    assert parse(api, json.dumps(fields).encode()).skips == ""


@pytest.mark.parametrize(("body", "param", "words"), [
    (b"", None, "not a JSON object"),
    (b"null", None, "not a JSON object"),
    (b"[1]", None, "not a JSON object"),
    (b'{"prompt": "a"', None, "not a JSON object"),
    (b'{"prompt": "a"} x', None, "not a JSON object"),
    (b"\xff\xfe", None, "not a JSON object"),
    (b'{"a":' * 50_000, None, "nested"),
    (b'{"stream": "maybe"}', "stream", "bool"),
    (b'{"stream": 2}', "stream", "bool"),
    (b'{"model": 7}', "model", "str"),
    (b'{"model": ""}', "model", "empty"),
    (b'{"kv_transfer_params": {"transfer": "x"}}', "kv_transfer_params", "set by the router"),
    (b'{"kv_transfer_\\u0070arams": {}}', "kv_transfer_params", "set by the router"),
    (b'{"ec_transfer_params": {}}', "ec_transfer_params", "not served"),
    (b'{"vllm_xargs": {"kv_transfer_params": "x"}}', "vllm_xargs.kv_transfer_params", "set by the router"),
])
def test_bad_bodies_are_refused_with_the_field(body: bytes, param: str | None, words: str) -> None:
    fault = fault_of("completions", body)
    assert (fault.status, fault.param) == (400, param)
    assert words in fault.message


def test_a_null_of_a_refused_field_never_reaches_an_engine() -> None:
    request = parse("completions", b'{"prompt":"a","kv_transfer_params":null}')
    assert json.loads(decode_body(request, None)) == {"prompt": "a"}


def test_of_a_repeated_name_router_and_engine_see_the_same_value() -> None:
    request = parse("completions", b'{"prompt":"a","n":3,"n":1,"kv_transfer_params":null}')
    assert request.skips == ""
    assert decode_body(request, None) == b'{"prompt":"a","n":1}'


def test_the_prompt_is_shown_undecoded() -> None:
    assert bytes(parse("completions", b'{"prompt":"h\\u0069"}').prompt) == b'"h\\u0069"'
    assert bytes(parse("chat", b'{"messages":[{}]}').prompt) == b"[{}]"
    assert bytes(parse("chat", b"{}").prompt) == b""


def test_a_prefill_leg_always_has_parameters() -> None:
    with pytest.raises(OurFault):
        body_of(parse("chat", b"{}"), Role.PREFILL, None)
