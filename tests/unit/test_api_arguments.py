"""Options and their values in lists of arguments."""

from __future__ import annotations

import pytest

from xpyd_operator.api.arguments import GivenOption, ends_with_option, given_options, surplus


@pytest.mark.parametrize(("args", "expected"), [
    ([], []),
    (["--dtype", "half"], [GivenOption(0, "--dtype", ("half",))]),
    (["--dtype=half"], [GivenOption(0, "--dtype", ("half",))]),
    (["--block_size=16", "--lora-modules", "a=/x", "b=/y", "-O3"],
     [GivenOption(0, "--block-size", ("16",)), GivenOption(1, "--lora-modules", ("a=/x", "b=/y")),
      GivenOption(4, "-O3", ())]),
    (["--speculative-config.method=ngram"], [GivenOption(0, "--speculative-config", ("ngram",))]),
    (["--seed", "-1"], [GivenOption(0, "--seed", ("-1",))]),
    (["stray", "--enforce-eager"], [GivenOption(1, "--enforce-eager", ())]),
])
def test_options_with_their_values(args: list[str], expected: list[GivenOption]) -> None:
    assert list(given_options(args)) == expected


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
