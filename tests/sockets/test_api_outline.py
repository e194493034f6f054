from __future__ import annotations

import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from fuzz.bodies import outline
from router_fleet import fleet

from xpyd_sidecar.router.api import bodies, hidden
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.hidden import MAX_DEPTH, MAX_NAMES, MAX_TURNS
from xpyd_sidecar.router.serving.profiles import Profiles
from xpyd_sidecar.router.stream import continuation

LOOPS = ("uvloop",)
LARGE = 30_000_000


def names(count: int, value: bytes = b"1") -> bytes:
    return b"{%b}" % b",".join(b'"f%d":%b' % (number, value) for number in range(count))


def nested(depth: int, opening: bytes = b'{"a":', inner: bytes = b"1", closing: bytes = b"}") -> bytes:
    """An object and what is in it, so many brackets deep."""
    return b'{"x":%b%b%b}' % (opening * (depth - 1), inner, closing * (depth - 1))


def grown(act: Callable[[], object]) -> int:
    """Bytes of Python's memory that an act took at its worst."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        act()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def refused(act: Callable[[], object]) -> HttpFault:
    with pytest.raises(HttpFault) as caught:
        act()
    return caught.value


@pytest.mark.parametrize(("body", "found"), [
    (names(MAX_NAMES), "within"),
    (names(MAX_NAMES + 1), "names"),
    (names(MAX_NAMES, b'[1,{"a":1,"b":2},","]'), "within"),
    (b'{"one":%b}' % names(5000), "within"),
    (b'{"one":[%b]}' % b",".join([b"1"] * 5000), "within"),
    (b'{"one":"%b"}' % (b"," * 5000), "within"),
    (b'{"one":"\\"%b"}' % (b"," * 5000), "within"),
    (b'{"one":"\\\\"%b}' % (b',"a":1' * 5000), "names"),
    (nested(MAX_DEPTH), "within"),
    (nested(MAX_DEPTH + 1), "depth"),
    (nested(MAX_DEPTH, b"[", b"", b"]"), "within"),
    (nested(MAX_DEPTH + 1, b"[", b"", b"]"), "depth"),
    (b'{"x":"%b"}' % (b"[{" * 5000), "within"),
    (b'{"x":%b1%b}' % (b"[" * 100_000, b"]" * 100_000), "depth"),
    (b"[" * 100_000, "within"),  # no object: that is refused at its first character
    (b" \r\n\t" + names(MAX_NAMES + 1), "names"),
    (b'{"x":[%b1]}' % (b"[[]]," * 100_000), "within"),
    (b'{"x":[%b1]}' % (b'{"a":[{"b":"["}]},' * 100_000), "within"),
    (b'{"x":[%b1]}' % (b"[[[[]]]]," * (MAX_TURNS // 2 + MAX_NAMES)), "turns"),
    (b'{"x":[%b1]}' % (b"[[[[]]]]," * (MAX_TURNS // 2 - 2)), "within"),
    (b"", "within"), (b"{", "within"), (b'{"a', "within"), (b'{"a\\', "within"),
])
def test_bounds_are_exact_and_what_a_string_holds_does_not_count(body: bytes, found: str) -> None:
    assert outline(body, MAX_NAMES, MAX_DEPTH) == found


@pytest.mark.parametrize("long", [0, 24, hidden.LONG])
def test_of_json_exactly_what_is_within_bounds_is_within(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it is judged by its outline alone."""
    monkeypatch.setattr(hidden, "LONG", long)
    rng = random.Random(7)

    def value(room: int) -> object:
        kind = rng.randrange(4) if room else 0
        if kind < 2:
            return rng.choice((1, None, True, "a", '"', "\\", '\\"', "[{,:", "é"))
        if kind == 2:
            return [value(room - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(("a", '"b', "c\\")): value(room - 1) for _ in range(rng.randrange(3))}

    def depth(of: object) -> int:
        inner = of.values() if isinstance(of, dict) else of if isinstance(of, list) else ()
        return isinstance(of, dict | list) + max(map(depth, inner), default=0)

    for _ in range(3000):
        body = {f"{number},{{": value(4) for number in range(rng.randrange(8))}
        raw = json.dumps(body, ensure_ascii=False, indent=rng.choice((None, 1))).encode()
        assert (outline(raw, 5, 99) == "names") is (len(body) > 5)
        for most in (1, 3, 4):
            assert (outline(raw, 99, most) == "depth") is (depth(body) > most)


def test_a_chat_of_a_million_tokens_is_judged_within_a_turn_of_the_loop() -> None:
    said = [{"role": "user", "content": 'text with "quotes"\n and a few words more ' * 220} for _ in range(400)]
    body = json.dumps({"model": "m", "messages": said}).encode()
    assert len(body) > 3_800_000
    spent = []
    for _ in range(5):
        began = time.process_time()
        assert outline(body, MAX_NAMES, MAX_DEPTH) == "within"
        spent.append(time.process_time() - began)
    assert min(spent) < 0.05, spent  # a fifth of it on a machine that does nothing else; a look at each byte takes longer


# ---- who asks


def test_a_large_body_of_names_is_refused_before_anything_is_built() -> None:
    body = b'{"prompt":"hi"%b}' % b"".join(b',"%07d":1' % number for number in range(2_500_000))
    assert len(body) > LARGE
    known = Profiles(goes_on=True, speaks=False)
    acts: list[Callable[[], object]] = [lambda: bodies.parse("completions", body),
                                        lambda: bodies.passed_body("/tokenize", body),
                                        lambda: known.parse("completions", body)]
    for act in acts:
        blocks = sys.getallocatedblocks()
        fault = refused(act)
        assert (fault.status, fault.code) == (400, "too_many_fields")
        assert sys.getallocatedblocks() - blocks < 1000
        assert grown(lambda act=act: refused(act)) < 100_000  # type: ignore[misc]


def test_a_deep_body_is_refused_and_one_that_is_less_deep_is_not() -> None:
    fault = refused(lambda: bodies.parse("chat", nested(MAX_DEPTH + 1)))
    assert (fault.status, fault.code, str(MAX_DEPTH) in fault.message) == (400, "nested_too_deeply", True)
    assert bodies.parse("chat", nested(MAX_DEPTH)).fields.keys() == {"x"}


def test_a_body_of_brackets_is_refused_after_so_many_turns_however_long_it_is() -> None:
    fault = refused(lambda: bodies.parse("chat", b'{"messages":[%b1]}' % (b"[[[[]]]]," * 3_000_000)))
    assert (fault.status, fault.code, str(MAX_TURNS) in fault.message) == (400, "nested_too_deeply", True)


def test_prompts_are_counted_without_being_built() -> None:
    body = b'{"prompt":[%b]}' % b",".join([b'"a"'] * 6_000_000)
    request = bodies.parse("completions", body)
    assert request.skips == "prompt"
    assert grown(lambda: bodies.parse("completions", body)) < 2 * len(body)
    assert grown(lambda: continuation.position_of(request, goes_on=True)) < len(body)


@pytest.mark.parametrize(("prompt", "several"), [
    (b'["a"]', False), (b'["a","b"]', True), (b"[]", True), (b"[[1,2]]", False), (b"[[1],[2]]", True), (b'[""]', False),
    (b'["",""]', True), (b"[1,2]", False), (b"[null]", False), (b"[null,null]", True), (b'[ "a" ]', False),
])
def test_one_prompt_in_a_list_is_one(prompt: bytes, several: bool) -> None:
    assert (bodies.parse("completions", b'{"prompt":%b}' % prompt).skips == "prompt") is several


@pytest.mark.parametrize("field", [b"vllm_xargs", b"stream_options", b"response_format"])
def test_names_within_a_field_are_not_built(field: bytes) -> None:
    inner = names(300_000)
    body = b'{"prompt":"hi","temperature":0,"stream":true,"%b":%b}' % (field, inner)

    def act() -> None:
        continuation.position_of(bodies.parse("completions", body), goes_on=True)

    assert grown(act) < 4 * len(body)  # names of a dict are 25 times as large


def test_stop_strings_and_tools_are_read_up_to_a_bound() -> None:
    stops = b'["%b"]' % b'","'.join([b"x"] * 100_000)
    request = bodies.parse("completions", b'{"prompt":"hi","stop":%b}' % stops)
    assert continuation._lag(request) is None
    assert grown(lambda: continuation._lag(request)) < 10_000
    tools = msgspec.Raw(b"[%b]" % b",".join([b"{}"] * 500_000))
    asked = bodies.PassedBody(None, {"tools": tools}, b"")
    assert bodies.in_dialect("responses", asked).skips == "tools"
    assert grown(lambda: bodies.in_dialect("responses", asked)) < 10_000


def test_a_refused_name_is_found_however_it_is_written() -> None:
    for name in (b"kv_transfer_params", b"kv_transfer\\u005fparams", b"ec_transfer_params"):
        for value in (b"{}", b'{"a":1}'):
            body = b'{"prompt":"hi","vllm_xargs":{"a":1,"%b":%b}}' % (name, value)
            assert refused(lambda body=body: bodies.parse("completions", body)).code == "refused_field"  # type: ignore[misc]


async def test_clients_are_told_in_the_form_of_openai() -> None:
    async with fleet(1, 1) as f:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
            answer = await f.post(path, {f"f{number}": 1 for number in range(MAX_NAMES + 1)})
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["code"], error["type"]) == (400, "too_many_fields", "invalid_request_error")
