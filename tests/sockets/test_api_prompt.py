"""Keys of prefixes, and how many tokens a prompt has."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.router.api.prompt import BLOCK_BYTES, CUTS, MAX_BYTES, PromptPrefix, key_of, tokens


def test_cuts_grow_with_the_prompt() -> None:
    assert CUTS[:12] == (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
    assert CUTS[-1] == MAX_BYTES
    assert all(b - a <= max(BLOCK_BYTES, a / 4) for a, b in itertools.pairwise(CUTS))


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_equal_keys_mean_an_equal_prefix(common: int, one: int, two: int) -> None:
    a, b = b"x" * common + b"a" * one, b"x" * common + b"b" * two
    shared = {cut for cut, key in PromptPrefix(a).keys if (cut, key) in PromptPrefix(b).keys}
    assert shared == {cut for cut in CUTS if cut <= common} | ({common} if one == two == 0 and common else set())


def test_the_whole_prompt_is_the_last_key_unless_it_is_too_long() -> None:
    assert [cut for cut, _ in PromptPrefix(b"x" * 300).keys] == [256, 300]
    assert [cut for cut, _ in PromptPrefix(b"x" * 256).keys] == [256]
    assert PromptPrefix(b"").keys == []
    assert PromptPrefix(b"x" * (MAX_BYTES + 1)).keys[-1][0] == MAX_BYTES


def test_raw_fields_of_a_body_are_taken_as_they_are() -> None:
    raw = msgspec.json.decode(b'{"prompt": "' + b"y" * 600 + b'"}', type=dict[str, msgspec.Raw])["prompt"]
    assert (len(PromptPrefix(raw)), [cut for cut, _ in PromptPrefix(raw).keys]) == (602, [256, 512, 602])


def test_the_first_key_is_the_same_in_another_process() -> None:
    code = "from xpyd_sidecar.router.api.prompt import PromptPrefix; print(PromptPrefix(b'abc' * 99).first_key(200))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(said) == PromptPrefix(b"abc" * 99).first_key(200) == key_of((b"abc" * 99)[:200])


@pytest.mark.parametrize(("prompt", "expected"), [
    ([5, 6, 7], 3),
    (list(range(1000)), 1000),
    ("x" * 398, 100),  # and two quotes
    ("", 1),
    ([{"role": "user", "content": "hi"}], 9),
])
def test_tokens_are_counted_for_ids_and_estimated_for_text(prompt: object, expected: int) -> None:
    assert tokens(json.dumps(prompt).encode()) == expected


def test_ids_are_counted_however_they_are_laid_out() -> None:
    for indent in (None, 1, 4):
        assert tokens(json.dumps([5, 6, 7], indent=indent).encode()) == 3


def test_no_prompt_has_no_tokens() -> None:
    assert tokens(b"") == 0
