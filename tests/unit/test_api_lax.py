from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw

from xpyd_sidecar.router.api.bodies import in_dialect, parse, passed_body
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.fields import integer_of, is_true, strip_mark, truth
from xpyd_sidecar.router.serving.profiles import Profiles

BOOLS = [
    "true", "false", "null", "0", "1", "2", "-1", "-0", "0.0", "1.0", "-0.0", "1e0", "0.5", "10e-1", "1.0000000000000002",
    "1e400", "100000000000000000000000000000000", '"true"', '"TRUE"', '"tRuE"', '"false"', '"t"', '"F"', '"yes"', '"No"',
    '"y"', '"n"', '"on"', '"OFF"', '"1"', '"0"', '"1.0"', '" true"', '"true "', '""', '"2"', '"\\u0074rue"',
    '"\\uff34rue"', '"none"', '"null"', "[]", "[true]", "{}", '{"a":1}', "[1]"]
INTS = ["16", "-1", "16.0", "1.5", '"16"', '" 16 "', '"+16"', '"1_0"', '"16.0"', '"1e1"', '"016"', '"x"', '""', "true",
        "null", "[1]", "{}", "1e1", "1e300", '"16.5"', '"\\u0663"']


def pydantic(kind: Any, raw: str) -> Any:
    """What pydantic makes of a value; ValueError: it takes none such."""
    return pytest.importorskip("pydantic").TypeAdapter(kind).validate_python(json.loads(raw))


def taken(read: Callable[[], Any]) -> Any:
    """What a reader makes of it."""
    try:
        return read()
    except ValueError:
        return ValueError


@pytest.mark.parametrize("raw", BOOLS)
def test_a_boolean_is_what_pydantic_takes_for_one(raw: str) -> None:
    value = Raw(raw.encode())
    expected = taken(lambda: pydantic(bool | None, raw))
    assert taken(lambda: truth(value)) is expected
    assert is_true(value) is (expected is True)


@pytest.mark.parametrize("raw", INTS)
def test_a_whole_number_is_what_pydantic_takes_for_one(raw: str) -> None:
    try:
        expected = pydantic(int, raw)
    except ValueError:
        expected = None
    assert integer_of(Raw(raw.encode())) == expected


@pytest.mark.parametrize("raw", BOOLS)
def test_what_streams_is_the_same_for_every_reader(raw: str) -> None:
    body = f'{{"prompt":"a","stream":{raw}}}'.encode()
    profiles = Profiles(goes_on=True, speaks=False)
    try:
        expected = bool(pydantic(bool | None, raw))
    except ValueError:
        for read in (lambda: parse("completions", body), lambda: profiles.parse("completions", body)):
            with pytest.raises(HttpFault) as caught:
                read()
            assert (caught.value.status, caught.value.param) == (400, "stream")
        return
    assert parse("completions", body).stream is expected
    for _ in range(3):
        found, profile = profiles.parse("completions", body)
        assert found.stream is profile.stream is expected
    assert profile.known
    assert in_dialect("messages", passed_body("/v1/messages", body)).stream is expected


def test_one_byte_order_mark_is_no_fault_and_two_are() -> None:
    body = b'{"prompt": "a", "model": "m"}'
    marked = b"\xef\xbb\xbf" + body
    assert json.loads(marked) == json.loads(body)
    assert parse("completions", marked) == parse("completions", body)
    assert passed_body("/pooling", marked).model == "m"
    assert strip_mark(body) is body
    known = Profiles(goes_on=True, speaks=False)
    assert known.parse("completions", marked)[1] is known.parse("completions", body)[1]
    for read in (lambda raw: parse("chat", raw), lambda raw: passed_body("/pooling", raw)):
        with pytest.raises(HttpFault) as caught:
            read(b"\xef\xbb\xbf" + marked)
        assert caught.value.code == "invalid_json"
