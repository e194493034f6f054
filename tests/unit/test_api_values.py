"""Values of documents in words."""

from __future__ import annotations

from typing import Any

import pytest

from xpyd_operator.api.values import advice, describe


@pytest.mark.parametrize(("value", "words"), [
    (None, "empty"), (True, "true"), (False, "false"), ("a" * 99, f"the text '{'a' * 60}'"), (3, "the number 3"),
    (1.5, "the number 1.5"), ({}, "an object"), ([1], "a list"), ((), "a list"), (b"", "a bytes"),
])
def test_what_stands_there(value: Any, words: str) -> None:
    assert describe(value) == words


@pytest.mark.parametrize(("value", "wanted", "words"), [
    (False, "text", '; put it in quotes: "false"'), (8, "text", '; put it in quotes: "8"'), ("8", "text", ""),
    ("8", "a whole number", "; write it without quotes"), ("eight", "a whole number", ""), ([], "a list", ""),
])
def test_what_to_do_about_it(value: Any, wanted: str, words: str) -> None:
    assert advice(value, wanted) == words
