from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from xpyd_sidecar.router.api import hidden
from xpyd_sidecar.router.api.bodies import parse, passed_body
from xpyd_sidecar.router.api.faults import HttpFault

DEEP = '{"a":' * 60 + '{"kv_transfer_params":1}' + "}" * 60
SMUGGLED = [
    ('{"kv_transfer_params": {"a": 1}}', "kv_transfer_params"),
    ('{"kv_transfer_params": "x"}', "kv_transfer_params"),
    ('{"kv_transfer_params": null, "kv_transfer_params": {}}', "kv_transfer_params"),
    ('{"k\\u0076_transfer_params": {}}', "kv_transfer_params"),
    ('{"ec_transfer_params": {}}', "ec_transfer_params"),
    ('{"vllm_xargs": {"kv_transfer_params": "x"}}', "vllm_xargs.kv_transfer_params"),
    ('{"vllm_xargs": {"kv_transfer_params": "x", "kv_transfer_params": null}}', "vllm_xargs.kv_transfer_params"),
    ('{"vllm_xargs": {"\\u006b\\u0076\\u005ftransfer\\u005Fparams": "x"}}', "vllm_xargs.kv_transfer_params"),
    ('{"vllm_xargs": {"kv\\u005Ftransfer_param\\u0073": "x"}}', "vllm_xargs.kv_transfer_params"),
    ('{"sampling_params": {"extra_args": {"kv_transfer_params": "x"}}}', "sampling_params.extra_args.kv_transfer_params"),
    ('{"sampling_params": {"extra_args": {}, "extra_args": {"ec_transfer_params": 1}}}',
     "sampling_params.extra_args.ec_transfer_params"),
    ('{"sampling_params": {"extra_args": {"ec_transfer_params": 1}, "extra_args": {}}}',
     "sampling_params.extra_args.ec_transfer_params"),
    ('{"extra_body": {"kv_transfer_params": {}}}', "extra_body.kv_transfer_params"),
    ('{"not_yet": [0, [{"x": {"kv_transfer_params": {}}}]]}', "not_yet.1.0.x.kv_transfer_params"),
    (f'{{"not_yet": {DEEP}}}', "not_yet" + ".a" * 60 + ".kv_transfer_params"),
]


@pytest.mark.parametrize(("body", "param"), SMUGGLED)
def test_what_only_the_router_may_send_is_refused_wherever_it_hides(body: str, param: str) -> None:
    for read in (lambda: parse("completions", body.encode()), lambda: parse("chat", body.encode()),
                 lambda: passed_body("/inference/v1/generate", body.encode())):
        with pytest.raises(HttpFault) as caught:
            read()
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "refused_field", param)


@pytest.mark.parametrize("body", [
    {"kv_transfer_params": None}, {"chat_request": {"kv_transfer_params": None}},
    {"prompt": "kv_transfer_params"}, {"messages": [{"kv_transfer_params": 1}]},
    {"tools": [{"function": {"parameters": {"properties": {"kv_transfer_params": {}}}}}]},
    {"user": '{"kv_transfer_params": 1}'},
    {"vllm_xargs": {"a": "the kv_transfer_params of a user"}}, {"sampling_params": {"extra_args": {"mine": "\\u0066"}}},
    {"generate_response": {"kv_transfer_params": None}}, {"metadata": {"about": "ec_transfer_params"}},
])
def test_words_of_a_client_are_no_parameters(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    parse("chat", raw)
    assert json.loads(passed_body("/inference/v1/generate", raw).body) == body


def test_a_field_said_twice_reaches_engines_once() -> None:
    body = b'{"sampling_params":{"extra_args":{"kv_transfer_params":1}},"prompt":"x","sampling_params":{}}'
    assert passed_body("/inference/v1/generate", body).body == b'{"sampling_params":{},"prompt":"x"}'
    usual = b'{ "prompt" : "x", "prompt": "y" }'
    assert passed_body("/inference/v1/generate", usual).body is usual


def test_what_is_too_long_to_be_searched_is_refused() -> None:
    long = b'{"x": ["%b", "_transfer_params"]}' % (b"a" * hidden.MAX_SEARCHED)
    with pytest.raises(HttpFault) as caught:
        passed_body("/pooling", long)
    assert (caught.value.status, caught.value.param) == (400, "x")
    assert passed_body("/pooling", long.replace(b"_transfer_params", b"_transfer_parameters_")).model is None


PART = b'--x\r\ncontent-disposition: form-data; %b\r\n\r\n{"kv_transfer_params": "x"}\r\n--x--\r\n'
FORMS = [
    (b"multipart/form-data; boundary=x", b'name="vllm_xargs"'),
    (b"multipart/form-data; boundary=x", b"name=vllm_xargs"),
    (b"multipart/form-data; boundary=x", b"name*=utf-8''vllm%5Fxargs"),
    (b"multipart/form-data; boundary=x", b'name*0="vllm_"; name*1="xargs"'),
    (b"multipart/form-data; boundary=x", b'name="vllm\\_xargs"'),
    (b"multipart/form-data; boundary=x; charset=utf-7", b'name="vllm+AF8-xargs"'),
    (b'multipart/form-data; boundary=x; CHARSET="UTF-7"', b'name="vllm+AF8-xargs"'),
    (b"multipart/form-data; boundary=x; charset*=utf-8''utf-7", b'name="vllm+AF8-xargs"'),
    (b"multipart/form-data; boundary=x; charset=utf-16", b"name=\"%b\"" % "vllm_xargs".encode("utf-16-le")),
    (b"multipart/form-data; boundary=x; charset=rot13", b'name="iyyz_knetf"'),
    (b"multipart/form-data; boundary=x; charset=unicode_escape", b'name="vllm\\x5fxargs"'),
    (b"application/x-www-form-urlencoded", b""),
]


def _names(kind: bytes, body: bytes) -> set[str]:
    """The names of a form, as vLLM's server reads it."""
    from starlette.requests import Request

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def read() -> set[str]:
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind)]}
        async with Request(scope, receive).form() as form:
            return set(form)

    try:
        return asyncio.run(read())
    except Exception:  # noqa: BLE001 (whatever a form that is wrong raises there, no field of it is read)
        return set()


@pytest.mark.parametrize(("kind", "name"), FORMS)
def test_no_form_hides_the_names_from_the_router_that_an_engine_reads(kind: bytes, name: bytes) -> None:
    pytest.importorskip("starlette")
    body = PART % name if name else b"vllm%5Fxargs=%7B%7D"
    refused = False
    try:
        hidden.refuse_form_type(kind)
        hidden.refuse_in_form(body)
    except HttpFault as fault:
        refused = fault.status in {400, 415}
    assert refused or "vllm_xargs" not in _names(kind, body)


def test_an_honest_form_is_taken() -> None:
    for kind in (b"multipart/form-data; boundary=x", b'multipart/form-data; boundary="a; b"; charset=UTF-8', b""):
        hidden.refuse_form_type(kind)
    hidden.refuse_in_form(PART.replace(b"kv_transfer_params", b"x") % b'name="prompt"')
