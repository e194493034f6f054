"""Finds engine arguments that the parser of vLLM's server would refuse, by the table of its options (``tables.vllm``).

The tag of ``engine.image`` says which version is meant; where it does not, an argument is reported only if no known
version takes it. As in vLLM, a name may be shortened as long as it fits one option alone, and may have ``_`` for ``-``.
Of an option with a dot into an object (``--kv-events-config.topic``) only what stands before the dot is checked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from xpyd_operator.api import owned, tables
from xpyd_operator.api.arguments import GivenOption, given_options
from xpyd_operator.api.tables import Option

_TAG: Final = re.compile(r":v?(\d+\.\d+)(?:[.\-+_]|$)")
_LEVEL: Final = re.compile(r"-O.*")
"""vLLM's own parser reads these before argparse does."""
_SIZE: Final = re.compile(r"-?\d+(\.\d+)?[kKmMgGtT]?")
INSTEAD: Final = {
    "--disable-log-requests": "leave it out: requests are logged with --enable-log-requests alone",
    "--use-v2-block-manager": "leave it out",
    "--num-scheduler-steps": "leave it out",
    "--multi-step-stream-outputs": "leave it out",
    "--swap-space": "leave it out; a host's memory is spec.kv.offload.memory",
    "--task": "leave it out, or write --runner and --convert",
    "--guided-decoding-backend": "write --structured-outputs-config.backend",
    "--enable-reasoning": "write --reasoning-parser alone",
    "--max-seq-len-to-capture": "write --max-cudagraph-capture-size",
    "--speculative-model": "write --speculative-config",
    "--num-speculative-tokens": "write --speculative-config",
    "--worker-use-ray": "leave it out: workers are processes of their pod",
    "--preemption-mode": "leave it out",
    "--disable-async-output-proc": "leave it out",
    "--num-lookahead-slots": "leave it out",
    "--cpu-offload": "write --cpu-offload-gb",
    "--cuda-graph-sizes": "write --cudagraph-capture-sizes",
    "--device": "leave it out; what runs follows from engine.image",
}
"""Options that guides have and that these versions have no more, or never had."""


def versions(image: str) -> tuple[str, ...]:
    """The versions of vLLM (``0.33``) that an image may have: that of its tag if it is known, else all that are known."""
    known = tables.vllm().versions
    tag = _TAG.search(image.partition("@")[0].rpartition("/")[2])
    return (tag[1],) if tag is not None and tag[1] in known else known


def versions_in_words(found: Sequence[str]) -> str:
    """Versions in words: ``vLLM 0.32 and 0.33``."""
    return f"vLLM {' and '.join(found)}"


def faults(args: Sequence[str], image: str, *, ends: bool = True) -> Iterator[tuple[int, str]]:
    """Every argument that the parser of each version of vLLM that the image may have refuses: its index in the list, and
    what is wrong with it, in words. Options that xpyd sets itself are left to ``owned``.

    Args:
        args: a list of engine arguments.
        image: the engine's image.
        ends: whether nothing follows the list, so that its last option has all its values.
    """
    meant = versions(image)
    for one in given_options(args):
        if owned.option_of(args[one.index]) or _LEVEL.fullmatch(args[one.index]):
            continue  # refused elsewhere, with what to write; vLLM's own spelling
        last = one.index + len(one.values) + (0 if "=" in args[one.index] else 1) >= len(args)
        words = [_wrong(one, args[one.index], version, open_end=last and not ends) for version in meant]
        if all(words):
            at, text = words[0] or (0, "")
            yield at, f"{text} ({versions_in_words(meant)})"


def _wrong(one: GivenOption, argument: str, version: str, *, open_end: bool) -> tuple[int, str] | None:
    found = _find(one.name, version)
    if isinstance(found, str):
        return one.index, f"{one.name} {found}"
    if "." in argument.partition("=")[0]:
        return None
    joined = "=" in argument
    if found.value == "none":
        if joined:
            return one.index, f"{one.name} is a switch and takes no value; leave {argument[argument.index('='):]} out"
        surplus = bool(one.values) and not one.name.startswith("--no-")  # what follows --no-… is said of all versions
        return (one.index + 1, _second(one.values[0])) if surplus else None
    if not one.values:
        needs = found.value != "perhaps" and not open_end
        return (one.index, f"{one.name} needs a value") if needs else None
    if found.value in ("one", "perhaps") and len(one.values) > 1:
        return one.index + 2, _second(one.values[1])
    for place, value in enumerate(one.values):
        if words := _value(found, value):
            return one.index + (0 if joined else place + 1), f"{one.name} {words}"
    return None


def _second(value: str) -> str:
    return f"{value} belongs to no option, so it is a second model; an engine serves the one of spec.model.source"


def _value(option: Option, value: str) -> str:
    """What is wrong with one value of an option, in words; empty where vLLM takes it."""
    if value in option.words:
        return ""
    if option.choices:
        near = difflib.get_close_matches(value, option.choices, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(option.choices)}"
        return "" if value in option.choices else f"has no value {value}; {hint}"
    if option.type == "json":
        right = value.lstrip()[:1] in ("{", "[", '"') or value in ("null", "true", "false") or _SIZE.fullmatch(value)
        return "" if right else f"takes JSON, not {value}"
    if option.type in ("int", "number", "size"):
        return _number(option, value)
    return ""


def _number(option: Option, value: str) -> str:
    also = f", or {' or '.join(option.words)}" if option.words else ""
    if option.type == "size":
        if not _SIZE.fullmatch(value):
            return f"takes a number, e.g. 8192 or 8k{also}, not {value}"
        if value[-1].isalpha():
            return ""
    try:
        number = float(value) if option.type == "number" else int(value)
    except ValueError:
        return f"takes a {'' if option.type == 'number' else 'whole '}number{also}, not {value}"
    inside = (
        (option.above is None or number > option.above) and (option.least is None or number >= option.least)
        and (option.below is None or number < option.below) and (option.most is None or number <= option.most)
    )
    return "" if inside else f"must be {_bounds(option)}, not {value}"


def _bounds(option: Option) -> str:
    parts = (("above", option.above), ("at least", option.least), ("below", option.below), ("at most", option.most))
    return " and ".join(f"{word} {bound:g}" for word, bound in parts if bound is not None)


def _find(name: str, version: str) -> Option | str:
    """The option of a version of vLLM that a name, shortened or not, stands for; or, in words, why it stands for none."""
    named = _named(version)
    if name in named:
        return named[name]
    started = [full for full in named if full.startswith(name)] if name.startswith("--") else []
    if len({named[full].names[0] for full in started}) == 1:
        return named[started[0]]
    if started:
        return f"may be {' or '.join(sorted(started)[:4])}; write one of them"
    if name in INSTEAD:
        return f"is no option; {INSTEAD[name]}"
    near = difflib.get_close_matches(name, named, 1, 0.7)
    return f"is no option; did you mean {near[0]}?" if near else "is no option"


@cache
def _named(version: str) -> dict[str, Option]:
    return {name: one for one in tables.vllm().of_version(version) for name in one.names}
