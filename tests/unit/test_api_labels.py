"""What requests have in common: labels of prompts, fields, parts, models and paths."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from xpyd_sidecar.router.api import labels as la
from xpyd_sidecar.router.api.labels import Label, labels_of

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=20),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=6))

PINNED = ["575d216418891802", "58ccd027fff55383", "82d8a6783fcdd3a2"]
"""As routers of neighbouring releases know them."""


def labels(kind: str = "chat", **body: Any) -> dict[Label, str]:
    raw = {name: Raw(json.dumps(value).encode()) for name, value in body.items()}
    return labels_of(kind, body.get("model"), raw, raw.get("messages", raw.get("prompt", Raw(b""))))


def shared(one: dict[Label, str], other: dict[Label, str]) -> set[str]:
    return {one[label] for label in one.keys() & other.keys()}


def says(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_prompts_that_begin_alike_share_that_beginning_to_half_of_it_at_least() -> None:
    found = shared(labels("completions", prompt="p" * 300 + "one"), labels("completions", prompt="p" * 300 + "other"))
    assert "the first 256 bytes of the prompt" in found
    assert "the first 512 bytes of the prompt" not in found
    assert shared(labels("completions", prompt="x" + "p" * 300), labels("completions", prompt="p" * 300)) == {
        "the path of completions"}


def test_a_conversation_that_went_on_shares_all_that_was_said_before() -> None:
    system = "s" * 5000
    before, after = says(system, "why?" * 100), says(system, "why?" * 100, "because", "really?")
    longest = max(shared(labels(messages=before), labels(messages=after)), key=lambda words: [
        int(word) for word in words.split() if word.isdigit()] or [0])
    assert longest == f"the first {len(json.dumps(before)) - 1} bytes of the prompt"
    assert longest not in shared(labels(messages=before), labels(messages=says(system, "why not?")))


def test_only_the_last_messages_of_many_have_labels() -> None:
    assert len(labels(messages=says(*map(str, range(1000))))) < la.MESSAGES + 25


def test_fields_are_told_by_name_by_what_is_in_them_and_by_value() -> None:
    one = labels(prompt="a", structured_outputs={"grammar": "root ::= x"}, temperature=0.5)
    assert shared(one, labels(prompt="a", structured_outputs={"grammar": "root ::= x"})) >= {
        "this value of structured_outputs", "structured_outputs.grammar", "the field structured_outputs"}
    other = shared(one, labels(prompt="a", structured_outputs={"grammar": "root ::= y"}, temperature=0.7))
    assert "this value of structured_outputs" not in other
    assert {"structured_outputs.grammar", "the field temperature"} <= other
    assert "response_format.type=json_schema" in labels(response_format={"type": "json_schema"}).values()
    assert not any("stop" in words for words in labels(stop=None).values()), "null is not set"


def test_what_differs_between_tries_of_one_request_is_no_label() -> None:
    assert labels(prompt="a" * 10, user="x", request_id="1", stream=True) == labels(prompt="a" * 10)


def test_an_adapter_an_image_and_a_path_are_labels() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": "?"}]
    image = [{"role": "user", "content": parts}]
    found = labels("/v1/other", model="lora", messages=image).values()
    assert {"the model lora", "parts of type image_url", "the path of /v1/other"} <= set(found)
    quoted = labels(messages=says('{"type": "image_url"}')).values()
    assert not any("parts" in words for words in quoted), "a text that speaks of images is none"


def test_those_that_fewest_requests_have_come_first() -> None:
    found = labels(model="m", prompt="p" * 100, temperature=0.1, tools=[{"type": "function"}], logit_bias={"1": 2})
    order = [found[label] for label in sorted(found)]
    of = {words: order.index(words) for words in order}
    assert of["the first 64 bytes of the prompt"] < of["the first 8 bytes of the prompt"] < of["this value of tools"]
    assert of["this value of tools"] < of["this value of logit_bias"] < of["the field temperature"] < of["the path of chat"]


def test_labels_are_the_same_in_every_process() -> None:
    assert sorted(label.hex() for label in labels("completions", prompt="hello you")) == PINNED


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=80), JSON, max_size=40), JSON, st.text(max_size=20))
def test_whatever_was_sent_has_a_bounded_number_of_labels(fields: dict[str, Any], messages: Any, model: str) -> None:
    raw = {name: Raw(json.dumps(value).encode()) for name, value in (fields | {"messages": messages}).items()}
    found = labels_of("chat", model, raw, raw["messages"])
    assert 0 < len(found) <= la.MOST
    assert all(len(label) == la.LABEL_SIZE for label in found)
    assert found == labels_of("chat", model, dict(raw), bytes(raw["messages"])), "they depend on nothing else"


@pytest.mark.parametrize("body", [b'[{"a": ', b"[{}, 7", b'"', b"{", b"\xff" * 99, b'[{"type": "\xff"}]' * 9])
def test_what_is_no_json_has_labels_too(body: bytes) -> None:
    assert labels_of("/p", "m", {"messages": Raw(body), "x": Raw(body)}, b"")


def test_of_a_prompt_beyond_the_bound_its_beginning_is_looked_at() -> None:
    one, other = ("p" * la.LOOK + more for more in ("a", "b"))
    assert labels("completions", prompt=one) == labels("completions", prompt=other)
