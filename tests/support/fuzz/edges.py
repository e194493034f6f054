"""The ways that extensions count (``edges.c``), read from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module


class NotCounted(Exception):
    """An extension was not built for the fuzz, or not at all."""


class Edges:
    """What several extensions count, together."""

    def __init__(self, modules: Sequence[str]) -> None:
        """``modules``: names of extensions.

        Raises:
            NotCounted: one of them counts nothing.
        """
        try:
            libraries = [ctypes.CDLL(import_module(name).__file__) for name in modules]
            self._begin = [one.coverage_begin for one in libraries]
            self._news = [one.coverage_news for one in libraries]
            self._edges = [one.coverage_edges for one in libraries]
        except (ImportError, AttributeError) as error:
            raise NotCounted(f"{error}: build with scripts/sanitize.py") from error

    def begin(self) -> None:
        """The next input begins."""
        for begin in self._begin:
            begin()

    def news(self) -> int:
        """How much was taken since then for the first time ever."""
        return sum([news() for news in self._news])

    def known(self) -> int:
        """How many ways have been taken at all."""
        return sum([edges() for edges in self._edges])
