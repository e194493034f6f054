"""Reading lists of engine arguments: which options are given where, with which values.

vLLM's parser is not at hand where documents are judged, so an item counts as a value of the option before it unless it
looks like an option itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec


class GivenOption(msgspec.Struct, frozen=True):
    """One option as it stands in a list."""

    index: int
    name: str
    """With ``-`` for ``_``, and without what follows a dot (a field of an object)."""
    values: tuple[str, ...]


def given_options(args: Sequence[str]) -> Iterator[GivenOption]:
    """Every option of a list of arguments, in its order."""
    for index, argument in enumerate(args):
        name, joined, value = argument.partition("=")
        if not is_option(name):
            continue
        values = [value] if joined else []
        for following in args[index + 1:] if not joined else ():
            if is_option(following):
                break
            values.append(following)
        yield GivenOption(index, name.partition(".")[0].replace("_", "-"), tuple(values))


def surplus(args: Sequence[str]) -> Iterator[int]:
    """Items that surely are no value: the first of a list, and those after ``--option=value`` or ``--no-option``."""
    free = True
    for index, argument in enumerate(args):
        if not is_option(argument):
            if free:
                yield index
            continue
        free = "=" in argument or argument.startswith("--no-")


def is_option(argument: str) -> bool:
    """Whether it begins like an option; a negative number does not."""
    return re.match(r"--?[A-Za-z]", argument) is not None


def ends_with_option(args: Sequence[str]) -> bool:
    """Whether the last item is an option that may still want a value."""
    return bool(args) and is_option(args[-1]) and "=" not in args[-1] and not args[-1].startswith("--no-")
