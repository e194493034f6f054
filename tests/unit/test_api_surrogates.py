"""Halves of characters in bodies are named, and nothing else is."""

from __future__ import annotations

import time

import pytest

from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.surrogates import lone_surrogate


@pytest.mark.parametrize(("body", "found"), [
    (rb'"\ud83d"', (1, rb"\ud83d")),
    (rb'"\uDE00 \ud83d\ude00"', (1, rb"\uDE00")),
    (rb'"\ud83d\ude00 \ud83d x"', (14, rb"\ud83d")),
    (rb'"\ud83d\ud83d\ude00"', (1, rb"\ud83d")),
    (rb'"\ude00\ude00"', (1, rb"\ude00")),
    (rb'"\\\ud83d"', (3, rb"\ud83d")),
    (rb'"\ud83d\ude00"', None),
    (rb'"\\ud83d"', None),
    (rb'"\\\\ud83d \u00e9 \ud7ff \ue000"', None),
    (b'"\\ud83', None),
    (b"", None),
])
def test_halves_of_characters(body: bytes, found: tuple[int, bytes] | None) -> None:
    assert lone_surrogate(body) == found


def test_a_body_with_one_is_refused_by_its_name() -> None:
    with pytest.raises(HttpFault) as refused:
        bodies.parse("completions", rb'{"model": "t", "prompt": "cut \ud83d"}')
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")
    assert refused.value.message == (
        r"the body is not a JSON object: \ud83d at byte 30 is half of a surrogate pair: a character was cut in two")


def test_a_body_that_is_wrong_otherwise_says_so() -> None:
    with pytest.raises(HttpFault) as refused:
        bodies.parse("completions", rb'{"prompt": "\ud83d\ude00",')
    assert "surrogate" not in refused.value.message


@pytest.mark.parametrize("body", [b"\\" * (8 << 20) + b"\\ud83d", b"\\\\ud83d" * (1 << 20), b"\\ud83d\\ude00" * (1 << 19)])
def test_it_takes_no_longer_than_a_body_may(body: bytes) -> None:
    began = time.thread_time()
    lone_surrogate(body)
    assert time.thread_time() - began < 0.2
