from __future__ import annotations

import json

from xpyd_sidecar.router.api.faults import Fault, bad_request, unavailable, unknown_model, upstream


def test_errors_have_openais_form() -> None:
    assert json.loads(bad_request("wrong", "n").body()) == {
        "error": {"message": "wrong", "type": "invalid_request_error", "param": "n", "code": 400}}
    error = json.loads(unknown_model("x", ["tiny"]).body())["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]


def test_an_event_is_the_same_error() -> None:
    fault = upstream("gone")
    assert fault.event() == b"data: " + fault.body() + b"\n\n"
    assert (fault.status, upstream("late", 504).code) == (502, "engine_timeout")


def test_headers_say_when_to_come_again_what_is_allowed_and_who_may() -> None:
    assert (b"retry-after", b"3") in unavailable("full", 3).headers()
    assert (b"allow", b"GET") in Fault(405, "no", allow="GET").headers()
    assert (b"www-authenticate", b"Bearer") in Fault(401, "who").headers()
    assert bad_request("x").headers() == [(b"content-type", b"application/json")]
