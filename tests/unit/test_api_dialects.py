"""What the legs of generation in other dialects are asked: pure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.router.api import paths
from xpyd_sidecar.router.api.bodies import GenerationRequest, decode_body, in_dialect, passed_body, prefill_body
from xpyd_sidecar.router.api.fields import FORCED

PEER = legs.Peer(InstanceName("d"), Incarnation("i"), HostPort("127.0.0.1:1"))
PUSH = legs.Leg(1, Role.PREFILL, TransferId("0" * 32), Attempt(2), 3.0, PEER)
WAIT = legs.Leg(1, Role.DECODE, TransferId("0" * 32), Attempt(1), 3.0)


def split(path: str, body: dict[str, Any]) -> GenerationRequest | None:
    route = paths.find(path)
    assert route is not None
    return None if route.api is None else in_dialect(route.api, passed_body(path, json.dumps(body).encode()))


@pytest.mark.parametrize(("path", "body", "kept"), [
    ("/v1/messages",
     {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "stream": True, "top_k": 4, "top_p": 0.5,
      "stop_sequences": ["a"], "thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": [{"name": "f"}]},
     {"messages", "thinking", "tools"}),
    ("/v1/responses",
     {"input": "hi", "instructions": "be brief", "max_output_tokens": 40, "stream": True, "store": True, "stop": ["a"],
      "top_logprobs": 2, "tools": [{"type": "function", "name": "f"}], "reasoning": {"effort": "low"}, "ignore_eos": True},
     {"input", "instructions", "tools", "reasoning"}),
])
def test_a_prefill_leg_has_the_prompt_and_nothing_of_the_answer(path: str, body: dict[str, Any], kept: set[str]) -> None:
    request = split(path, body)
    assert request is not None
    prefill = json.loads(prefill_body(request, PUSH))
    forced = {name: json.loads(bytes(raw)) for name, raw in FORCED[request.api].items()}
    params = prefill.pop(legs.FIELD)
    assert prefill == {**{name: body[name] for name in kept}, **forced}
    assert (legs.decode(params), params[legs.REMOTE_DECODE]) == (PUSH, True)
    decode = json.loads(decode_body(request, WAIT))
    assert legs.decode(decode.pop(legs.FIELD)) == WAIT
    assert decode == body, "the client's own"


@pytest.mark.parametrize(("body", "field"), [
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}]}, "tools"),
    ({"tools": 5}, "tools"), ({"truncation": "auto"}, "truncation"),
])
def test_requests_that_are_one_engines_say_for_which_field(body: dict[str, Any], field: str) -> None:
    request = split("/v1/responses", {"input": "hi", **body})
    assert request is not None
    assert request.skips == field


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions/batch", "/v1/messages/count_tokens"])
def test_other_paths_are_no_dialects(path: str) -> None:
    assert split(path, {"messages": []}) is None


@pytest.mark.parametrize(("body", "stream"), [({}, False), ({"stream": False}, False), ({"stream": True}, True)])
def test_whether_the_answer_comes_in_events(body: dict[str, Any], stream: bool) -> None:
    request = split("/v1/messages", {"messages": [], **body})
    assert request is not None
    assert request.stream is stream


@pytest.mark.parametrize("more", [{}, {"tools": None}, {"truncation": None}, {"truncation": "disabled"}])
def test_what_says_nothing_is_split(more: dict[str, Any]) -> None:
    request = split("/v1/responses", {"input": "hi", **more})
    assert request is not None
    assert not request.skips
    assert bytes(request.prompt).endswith(b'"hi"')


def test_the_prompt_is_all_that_it_is_made_of_in_order() -> None:
    request = split("/v1/messages", {"messages": [1], "system": "be brief", "tools": [{"name": "f"}], "max_tokens": 5})
    assert request is not None
    assert bytes(request.prompt) == b'"be brief"[{"name": "f"}][1]'
