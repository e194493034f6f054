"""Options and their values in lists of arguments."""

from __future__ import annotations

import pytest

from xpyd_operator.api.arguments import Given, ends_with_option, given, surplus


@pytest.mark.parametrize(("args", "expected"), [
    ([], []),
    (["--dtype", "half"], [Given(0, "--dtype", ("half",))]),
    (["--dtype=half"], [Given(0, "--dtype", ("half",))]),
    (["--block_size=16", "--lora-modules", "a=/x", "b=/y", "-O3"],
     [Given(0, "--block-size", ("16",)), Given(1, "--lora-modules", ("a=/x", "b=/y")), Given(4, "-O3", ())]),
    (["--speculative-config.method=ngram"], [Given(0, "--speculative-config", ("ngram",))]),
    (["--seed", "-1"], [Given(0, "--seed", ("-1",))]),
    (["stray", "--enforce-eager"], [Given(1, "--enforce-eager", ())]),
])
def test_options_with_their_values(args: list[str], expected: list[Given]) -> None:
    assert list(given(args)) == expected


@pytest.mark.parametrize(("args", "expected"), [
    (["a/b"], [0]),
    (["a/b", "c"], [0, 1]),
    (["--dtype=half", "a/b"], [1]),
    (["--no-enable-prefix-caching", "a/b"], [1]),
    (["--dtype", "half"], []),
    (["--enforce-eager", "perhaps its value"], []),
    (["--seed", "-1", "--x=y"], []),
])
def test_what_surely_is_no_value(args: list[str], expected: list[int]) -> None:
    assert list(surplus(args)) == expected


def test_a_list_that_may_go_on_in_the_next_one() -> None:
    assert ends_with_option(["--dtype"])
    assert not any(map(ends_with_option, ([], ["--dtype=half"], ["--dtype", "half"], ["--no-x"])))
