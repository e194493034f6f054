"""Which of the text behind a seam is new."""

from __future__ import annotations

import pytest

from xpyd_sidecar.router.stream.continuation import MAX_NEW, MAX_PLAIN, NOWHERE, Seam

PROMPT, SAID = "Tell me of the sea. ", "日本 is an island"


@pytest.mark.parametrize("new", ["語", "語x", "\ufffda", "日"])
@pytest.mark.parametrize("before", [PROMPT, "<bos>otherwise given back: ", ""])
def test_what_stands_behind_what_the_client_has_is_new(before: str, new: str) -> None:
    for inside in (True, False):
        assert Seam(PROMPT + SAID, SAID, inside=inside).own("text", before + SAID + new) == new


def test_text_that_only_is_new_is_taken_where_nothing_says_that_a_character_is_open() -> None:
    assert Seam(PROMPT + SAID, SAID, inside=False).own("text", " indeed") == " indeed"
    assert Seam(PROMPT + SAID, SAID, inside=True).own("text", " indeed") is None
    assert Seam(PROMPT + SAID, SAID, inside=False).own("text", "x" * (MAX_PLAIN + 1)) is None


def test_two_places_are_none() -> None:
    said = "ababababab"
    assert Seam(said, said, inside=True).own("text", said + "abab") is None
    assert Seam(said, said, inside=True).own("text", said + "a") == "a", "one place"


def test_too_little_and_other_channels_are_not_looked_at() -> None:
    assert Seam("short", "short", inside=True).own("text", "shorter") is None
    assert Seam(SAID, SAID, inside=True).own("reasoning", SAID + "x") is None
    assert Seam(SAID, SAID, inside=True).own("content", SAID + "x" * (MAX_NEW + 1)) is None
    assert NOWHERE.own("text", "x") is None
