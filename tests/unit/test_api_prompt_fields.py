"""Whether a request has a prompt, by how the field of its API begins."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from xpyd_sidecar.router.api.bodies import split
from xpyd_sidecar.router.api.paths import TABLE
from xpyd_sidecar.router.api.prompt_fields import has_prompt

CHAT = [{"role": "user", "content": "x"}]


def prompted(api: str, path: str, body: Any) -> bool:
    return has_prompt(api, path, split(msgspec.json.encode(body)))


@pytest.mark.parametrize(("api", "path", "right"), [
    ("completions", "", [{"prompt": "x"}, {"prompt": ["x"]},
                         {"prompt": [1, 2]}, {"prompt": [[1]]}, {"prompt_embeds": "AA=="}]),
    ("chat", "", [{"messages": CHAT}]),
    ("messages", "", [{"messages": CHAT}]),
    ("responses", "", [{"input": "x"}, {"input": CHAT}]),
    ("", "/v1/chat/completions/batch", [{"messages": [CHAT]}]),
    ("", "/cohere/v2/chat", [{"messages": CHAT}]),
    ("", "/invocations", [{"messages": CHAT}, {"prompt": "x"}]),
    ("", "/inference/v1/generate", [{"token_ids": [1]}]),
    ("", "/v1/systemone", [{"questions": {"a": {}}, "state": "x"}]),
])
def test_what_generates_is_known_by_its_prompt_and_what_has_none_is_not(api: str, path: str, right: list[Any]) -> None:
    for body in right:
        assert prompted(api, path, body), body
        for name in body.keys() - {"state"}:
            for empty in (None, "", [], {}, 5, True):
                assert not prompted(api, path, {name: empty}), (name, empty)
    assert not prompted(api, path, {})


def test_spaces_are_no_prompt() -> None:
    assert not has_prompt("chat", "", split(b'{"messages": [ \n ]}'))
    assert has_prompt("chat", "", split(b'{"messages": [ \n {}]}'))


def test_every_path_that_generates_from_json_has_a_prompt_that_is_known() -> None:
    for route in TABLE:
        if route.generates and not route.path.startswith("/v1/audio/"):
            fields = {name: [1] for name in ("prompt", "messages", "token_ids", "input")} | {"questions": {"a": 1}}
            assert prompted(route.api or "", route.path, fields), route.path
