from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Literal

import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.failover_modes import SamplingTerms
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.serving import shapes
from xpyd_sidecar.router.serving.shapes import MAX_SHAPES, Shapes, params_of
from xpyd_sidecar.router.stream import continuation
from xpyd_sidecar.router.stream.position import Position

Api = Literal["completions", "chat"]
PEER = legs.Peer(InstanceName('d"1%b%'), Incarnation("i"), HostPort("h:1"))
LEGS = [legs.Leg(1, Role.PREFILL, TransferId("ab" * 16), Attempt(1), 60.0, PEER),
        legs.Leg(1, Role.PREFILL, TransferId("cd" * 16), Attempt(3), 1.25, PEER, 599.125),
        legs.Leg(1, Role.DECODE, TransferId("ef" * 16), Attempt(1), 60.0, None),
        legs.Leg(1, Role.DECODE, TransferId("ef" * 16), Attempt(1), 60.0, None, 660.0)]
VALUES: dict[str, list[Any]] = {
    "model": ["tiny", "tiny", "tiny", None, "", 7], "stream": [True, True, True, False, None, "yes", 1, 0.0, "off", 2],
    "prompt": ["hi", "100 %b %d %%", "é", "x" * 2000, [1, 2, 3], ["a", "b"], None, ""],
    "messages": [[{"role": "user", "content": "hi %s"}], [{"role": "user", "content": [{"type": "image_url"}]}], [], "text",
                 None],
    "max_tokens": [1, 8, 999_999_999, 1_000_000_000, -1, 1.5, None, "8", True], "max_completion_tokens": [1, 20, None],
    "temperature": [0, 0, 0, 1, None], "seed": [1, 2, -5, None, 1.5], "user": ["ann", "bob", None, 7, "%"], "n": [1, 2],
    "stop": ["%", ["a", "b"]], "stream_options": [{"include_usage": True}, None], "return_token_ids": [True, False],
    "logprobs": [1, True, None], "echo": [True, False], "best_of": [1, 3], "tools": [[], [{"type": "function"}]],
    "presence_penalty": [0, 0.5], "kv_transfer_params": [None, {}], "vllm_xargs": [{}, {"kv_transfer_params": 1}],
    "new": [{"a": "%b"}],
    "priority": [1], "request_id": ["r"], "prompt_logprobs": [1], "truncate_prompt_tokens": [-1, 5],
}


def made_up(api: Api, dice: random.Random) -> bytes:
    names = ["model", "prompt" if api == "completions" else "messages", "max_tokens", "temperature", "stream"]
    rare = [name for name in VALUES if name not in names]
    names += dice.sample(rare, dice.choice([0, 0, 0, 1, 1, 2, 3]))
    if dice.random() < 0.2:
        dice.shuffle(names)
    odd = dice.random() < 0.4
    fields = {name: dice.choice(VALUES[name]) if odd else dice.choice(VALUES[name][:3]) for name in names}
    pretty = dice.random() < 0.2
    return json.dumps(fields, indent=1 if pretty else None, separators=None if pretty else (",", ":"),
                      ensure_ascii=dice.random() < 0.5).encode()


def parsed(parse: Callable[[Api, bytes], bodies.GenerationRequest], api: Api, body: bytes,
           ) -> bodies.GenerationRequest | str:
    try:
        return parse(api, body)
    except HttpFault as fault:
        return f"{fault.status} {fault}"


def attributes(position: Position | None) -> tuple[Any, ...] | None:
    return position and (position.api, position.way, position.asked_ids, position.wants_usage, position.choices,
                         position.shows_logprobs, position.replays)


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_what_is_kept_of_a_shape_is_what_the_tables_say_of_each_of_its_requests(api: Api, goes_on: bool) -> None:
    dice, known, shaped = random.Random(5), Shapes(goes_on=goes_on), 0
    for _ in range(2000):
        body = made_up(api, dice)
        expected, found = parsed(bodies.parse, api, body), parsed(known.parse, api, body)
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected
            continue
        assert (found.api, found.fields, found.model, found.stream, found.skips, found.prompt_ids) == (
            expected.api, expected.fields, expected.model, expected.stream, expected.skips, None)
        if shapes.shape_of(found) is None:
            continue
        shaped += 1
        position = continuation.position_of(expected, goes_on=goes_on)
        assert attributes(found.shape.position()) == attributes(position)
        asked = continuation.first_request(expected, position)
        looked = shapes.looked(body)
        assert looked is not None
        names = dict(zip(*looked[0], strict=True))
        assert list(names) == list(expected.fields)
        assert found.shape.plain == (bool(expected.stream) and not expected.skips and "priority" not in expected.fields
                                     and names[bodies.PROMPT[api][0]] is None)
        if found.shape.prompt_at >= 0:
            assert found.slots[found.shape.prompt_at] == bytes(expected.prompt)
        for leg in LEGS:
            assert found.shape.body(leg, found.slots) == bodies.body_of(asked, leg.role, leg)
    assert shaped > 200


def test_a_shape_is_known_from_the_third_request_on_and_they_are_bounded() -> None:
    known = Shapes(goes_on=True)
    seen = [shapes.shape_of(known.parse("completions", b'{"prompt":"%d","max_tokens":%d}' % (n, n))) for n in range(4)]
    assert [one is not None for one in seen] == [False, False, True, True]
    assert seen[2] is seen[3]
    for number in range(3 * MAX_SHAPES):
        known.parse("completions", b'{"prompt":"a","top_k":%d}' % number)
        assert len(known._known) <= MAX_SHAPES
    for _ in range(3):
        long = b'{"prompt":"a","stop":"%b"}' % (b"s" * shapes.MAX_BYTES)
        assert shapes.shape_of(known.parse("completions", long)) is None
    for _ in range(3):
        assert known.parse("chat", b'{"prompt":"a","max_tokens":1}').model is None


def test_parameters_of_a_leg_are_as_the_contract_writes_them() -> None:
    for leg in LEGS:
        assert json.loads(leg.transfer.encode().join(params_of(leg))) == legs.encode(leg)


BODIES = [b'{"model":"tiny","prompt":"hi","max_tokens":8,"temperature":0,"stream":true}',
          b'{"seed":7,"model":"tiny","prompt":"hi","max_tokens":8,"stream":true}',
          b'{ "max_tokens": 8, "stop": ["max_tokens"],\n "prompt": "hi", "temperature": 0 }',
          b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":8,"stream":true}']
TEXTS = [b"\"" + b"x" * 5000 + b"\"", b"\"h\\\"i\"", b"\"h\"i\"", b"\"hi", b"'hi'", b'"a","max_tokens":9,"user":"b"',
         b'"hi" ', b'"\xff"',
         b'"a\nb"', b'""', b'"hi","prompt":"ho"', b"[1,2]", b"null", b"", b'"' + b"[" * 70 + b'"', b"[" * 70 + b"]" * 70,
         b'"a"}],"max_tokens":3,"tools":[{"b":"c"', b'[{"type":"image_url"}]']
NUMBERS = [b":123456789", b":1234567890", b":08", b":", b":-8", b": 8", b":\xb2", b":0", b':8,"n":2']
TWISTS = [(b'"hi"', text) for text in TEXTS] + [(b":8", number) for number in NUMBERS] + [
    (b"tiny", b"other"), (b"}", b"}}"), (b"}", b"} "), (b"{", b"\xef\xbb\xbf{"), (b":7", b":70")]


@pytest.mark.parametrize("body", BODIES)
def test_what_is_found_by_its_layout_is_what_would_be_read(body: bytes) -> None:
    api: Api = "chat" if b"messages" in body else "completions"
    known, found = Shapes(goes_on=True), 0
    for _ in range(3):
        known.parse(api, body)
    assert known.known(api, body) is not None
    [layout] = known._layouts[api]
    assert layout.slots(body) == shapes.looked(body)[1]  # type: ignore[index]
    for first, second in [(one, two) for one in TWISTS for two in TWISTS]:
        twisted = body.replace(*first).replace(*second)
        slots, read = layout.slots(twisted), shapes.looked(twisted)
        if slots is not None:
            found += 1
            assert read is not None, twisted
            assert (slots, layout.shape) == (read[1], known._known[api, read[0]]), twisted
    assert found > 20


def test_layouts_are_bounded_and_go_with_what_engines_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = [SamplingTerms()]
    known = Shapes(goes_on=True, terms=lambda: terms[0])
    for number in range(9):
        for _ in range(4):
            known.parse("completions", b'{"prompt":"a","top_k":%d}' % number)
            known.known("completions", b'{"prompt":"a","top_k":%d}' % number)
    assert len(known._layouts["completions"]) == shapes.MAX_LAYOUTS
    made = []
    monkeypatch.setattr(shapes, "layout_of", lambda *args: made.append(args))
    for number in range(2 * shapes.MISSES):
        assert known.known("completions", b'{"prompt":"a","top_k":%d}' % (number % 9)) is not None
    assert len(made) <= 2 * shapes.MAX_LAYOUTS, "many that come in turn are not made again and again"
    two = b'{"prompt":"a","user":"b"}'
    for _ in range(3):
        known.parse("completions", two)
    assert known.known("completions", two) is not None
    assert all(one.slots(two) is None for one in known._layouts["completions"]), "where one of two ends is not sure"
    terms[0] = SamplingTerms(sampled=True)
    known.doubt()
    assert known.known("completions", b'{"prompt":"a","top_k":8}') is None
    assert not known._layouts
