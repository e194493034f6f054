"""Tables that are made from others' sources, not written here: the fields of Kubernetes' objects and vLLM's options.

``scripts/kubernetes_fields.py`` and ``scripts/vllm_options.py`` make them; tests hold them against what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

Word = str | int | float


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of Kubernetes' objects."""

    version: str
    """The newest Kubernetes that they are of."""
    parts: Mapping[str, Mapping[str, str]]
    """By part: its fields, and what each holds: ``text``, ``int``, ``number``, ``bool``, ``quantity``, ``any``, or a part;
    ``[x]`` is a list of it, ``{x}`` a map to it.
    """


class Option(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"versions": "in"}):
    """One option of vLLM's server."""

    names: tuple[str, ...]
    """Every spelling, the full name first."""
    value: str
    """How many values follow: none, one, some, or perhaps one."""
    type: str = "text"
    """Of each value: text, int, number, size (a number that may end with k, m, g) or json."""
    words: tuple[str, ...] = ()
    """What else a value may be."""
    choices: tuple[str, ...] = ()
    """All that a value may be; empty: anything of the type."""
    above: float | None = None
    """Bound of a number, which it must not be itself; so ``below``."""
    least: float | None = None
    """Bound of a number; so ``most``."""
    below: float | None = None
    most: float | None = None
    versions: tuple[str, ...] = ()
    """Those that have it so; empty: all."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of vLLM's server."""

    versions: tuple[str, ...]
    """Those that are known, e.g. 0.32."""
    options: tuple[Option, ...]

    def of_version(self, version: str) -> tuple[Option, ...]:
        """The options that one version has."""
        return tuple(one for one in self.options if not one.versions or version in one.versions)


@cache
def kubernetes() -> Fields:
    """The fields of what a document preserves of Kubernetes."""
    return msgspec.json.decode(_read("kubernetes_fields.json"), type=Fields)


@cache
def vllm() -> Options:
    """The options of the versions of vLLM that are known."""
    return msgspec.json.decode(_read("vllm_options.json"), type=Options)


def _read(name: str) -> bytes:
    return (files("xpyd_operator.api") / "data" / name).read_bytes()
