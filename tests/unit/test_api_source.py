"""The forms of spec.model.source."""

from __future__ import annotations

import re

import pytest

from xpyd_operator.api.source import SOURCE_PATTERN, Beside, Claim, Folder, Hub, Source, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-8B", Hub(id="Qwen/Qwen3-8B")),
        ("gpt2", Hub(id="gpt2")),
        ("a.b/c_d-1.5", Hub(id="a.b/c_d-1.5")),
        ("/models/qwen", Folder(path="/models/qwen")),
        ("pvc://claim/path/to", Claim(claim="claim", path="path/to")),
        ("pvc://claim", Claim(claim="claim", path="")),
        ("pvc://claim/", Claim(claim="claim", path="")),
        ("./weights", Beside(path="./weights")),
        ("../model/weights", Beside(path="../model/weights")),
    ],
)
def test_forms(text: str, expected: Source) -> None:
    assert parse(text) == expected
    assert re.fullmatch(SOURCE_PATTERN, text)


@pytest.mark.parametrize(
    "text", ["", "a b", "a/b/c", "https://x/y", "pvc://", "pvc:///x", "pvc://Claim/x", "-x", "a/", ".x", "s3://b/k"]
)
def test_what_has_no_form_is_refused_and_all_forms_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"a hub id .* pvc://claim/path"):
        parse(text)
    assert not re.fullmatch(SOURCE_PATTERN, text)
