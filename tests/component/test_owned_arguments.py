"""The table of owned arguments against the parser of the vLLM that is installed."""

from __future__ import annotations

import argparse

from vllm_places import MODULE

from xpyd_operator.api import notes, owned

ELSEWHERE = {"v032": {"--disable-ssl-refresh"}, "v033": {"--no-enable-ssl-refresh"}}[MODULE]
"""What other versions call an option."""


def meant(parser: argparse.ArgumentParser, argument: str) -> set[str]:
    """Every option that argparse would take an argument for, abbreviations included."""
    found = parser._parse_optional(argument)  # the only place that tells abbreviations apart
    if found is None:
        return set()
    action = found[0][0] if isinstance(found, list) else found[0]
    return set(action.option_strings) if action else set()


def names(parser: argparse.ArgumentParser) -> list[str]:
    return sorted({name for action in parser._actions for name in action.option_strings})


def test_every_owned_option_exists(parser: argparse.ArgumentParser) -> None:
    """A renamed option would no longer be refused."""
    known = names(parser)
    for option, _ in owned.listing():
        assert option in ELSEWHERE or option in known or any(name.startswith(option.rstrip("*")) for name in known), option
    for alias, option in owned.SHORT.items():
        assert option in meant(parser, alias), alias


def test_options_that_address_processes_are_owned(parser: argparse.ArgumentParser) -> None:
    words = ("--data-parallel", "--no-data-parallel", "--tensor-parallel", "--pipeline-parallel", "--master", "--port")
    for name in names(parser):
        if name.startswith(words):
            assert owned.option_of(name), name


def test_an_abbreviation_is_refused_exactly_when_its_option_is(parser: argparse.ArgumentParser) -> None:
    """For every prefix that argparse takes for one option."""
    checked = 0
    for name in names(parser):
        for length in range(3, len(name) + 1) if name.startswith("--") else (len(name),):
            try:
                options = meant(parser, name[:length])
            except ValueError:
                continue  # ambiguous: vLLM refuses it
            if options:
                checked += 1
                is_owned = any(owned.option_of(option) for option in options)
                assert (owned.option_of(name[:length]) is not None) == is_owned, (name[:length], options)
    assert checked > 1000


def test_the_key_in_the_environment_is_still_called_so() -> None:
    """A renamed variable would no longer be refused."""
    from vllm import envs

    assert "VLLM_API_KEY" in envs.environment_variables
    named = {name for name in envs.environment_variables if "API_KEY" in name}
    assert all(owned.env(name) for name in named), named


def test_arguments_that_judge_requests_are_still_called_so(parser: argparse.ArgumentParser) -> None:
    assert set(names(parser)) >= notes.JUDGING
