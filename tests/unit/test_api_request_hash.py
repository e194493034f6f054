"""The hash of a request: what makes two of them the same work, and what does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from xpyd_sidecar.router.api.bodies import ASIDE, HASH_SIZE, hash_of
from xpyd_sidecar.router.api.fields import TABLE

BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "temperature": 0, "seed": 1}


def made(kind: str = "completions", **fields: Any) -> bytes:
    body = BODY | fields
    return hash_of(kind, {name: Raw(msgspec.json.encode(value)) for name, value in body.items()})


@pytest.mark.parametrize("fields", [
    {"user": "me"}, {"stream": True}, {"stream_options": {"include_usage": True}}, {"request_id": "r1"}, {"priority": 3},
    {"session_id": "s"}, {"cache_salt": "s"}, {"metadata": {"a": 1}}, {"no_such_field": 7}, {"logprobs": None},
], ids=str)
def test_who_asks_and_how_it_is_shown_make_no_difference(fields: dict[str, Any]) -> None:
    assert made(**fields) == made()
    assert len(made()) == HASH_SIZE


@pytest.mark.parametrize("fields", [
    {"model": "other"}, {"prompt": "ho"}, {"max_tokens": 9}, {"temperature": 1}, {"seed": 2}, {"logit_bias": {"5": 1}},
    {"stop": ["x"]}, {"n": 2}, {"structured_outputs": {"regex": "a"}}, {"vllm_xargs": {"a": 1}},
], ids=str)
def test_model_prompt_and_sampling_do(fields: dict[str, Any]) -> None:
    assert made(**fields) != made()


def test_the_api_and_where_a_value_stands_do_as_well() -> None:
    assert made("chat", messages=[]) != made("completions", messages=[])
    one, other = {"stop": Raw(b'"a"'), "suffix": Raw(b'"b"')}, {"stop": Raw(b'"b"'), "suffix": Raw(b'"a"')}
    assert hash_of("completions", one) != hash_of("completions", other)
    assert hash_of("/x", {"a": Raw(b"1\0b\0001\x002")}) != hash_of("/x", {"a": Raw(b"1"), "b": Raw(b"2")})


def test_the_order_of_fields_does_not() -> None:
    fields = {name: Raw(msgspec.json.encode(value)) for name, value in BODY.items()}
    assert hash_of("completions", dict(reversed(fields.items()))) == hash_of("completions", fields)


def test_of_an_api_without_a_table_all_other_fields_count() -> None:
    assert made("/v1/messages", system="a") != made("/v1/messages", system="b")
    assert made("/v1/messages", user="a", metadata={"b": 1}) == made("/v1/messages")


def test_every_field_that_an_api_has_counts_but_those_aside() -> None:
    for api, table in TABLE.items():
        empty = hash_of(api, {})
        for name in table:
            assert (hash_of(api, {name: Raw(b"1")}) == empty) == (name in ASIDE), name


def test_a_name_that_is_no_unicode_has_one() -> None:
    assert hash_of("/x", {"\ud800": Raw(b"1")}) != hash_of("/x", {})
