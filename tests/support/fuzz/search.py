"""The search: inputs that took a new way, or came to a new outcome, are kept and changed further."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fuzz.mutate import mutated

MAX_KEPT = 4096
MAX_OUTCOMES = 4096


class Counted(Protocol):
    """Who knows which ways were taken (``edges.Edges``)."""

    def begin(self) -> None:
        """The next input begins."""

    def news(self) -> int:
        """How much of what was taken since then is new."""

    def known(self) -> int:
        """How many ways have been taken."""


@dataclass
class Figures:
    """How far a search came."""

    inputs: int = 0
    edges: int = 0
    outcomes: int = 0
    kept: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (f"{self.inputs:,} inputs in {self.seconds:.0f} s, {self.edges:,} edges, {self.outcomes:,} outcomes, "
                f"{self.kept:,} inputs kept")


class Search:
    """A search from seeds on. What it does depends on its seed, and on what each input was found to do."""

    def __init__(self, check: Callable[[bytes], Hashable], counted: Counted, seeds: Sequence[bytes],
                 tokens: Sequence[bytes], seed: int, *, about: Callable[[bytes], None] = lambda _: None) -> None:
        """``about``: told of each input before it is tried, since the process may end with it."""
        self._check = check
        self._counted = counted
        self._tokens = tokens
        self._seeds = list(seeds) or [b""]
        self._dice = random.Random(seed)
        self._about = about
        self._outcomes: set[Hashable] = set()
        self.kept: list[bytes] = []
        self.figures = Figures()

    def run(self, seconds: float, *, inputs: int = 1 << 62) -> Figures:
        """Try the seeds, then as many inputs as the time allows, at most ``inputs``. Raises what the check raises."""
        began = time.monotonic()
        for data in self._seeds:
            self.try_(data)
        if not self.kept:
            self.kept.append(self._seeds[0])
        while time.monotonic() < began + seconds and self.figures.inputs < inputs:
            self.try_(mutated(self._chosen(), self._dice.choice(self.kept), self._tokens, self._dice))
        figures = self.figures
        figures.edges, figures.outcomes, figures.kept = self._counted.known(), len(self._outcomes), len(self.kept)
        figures.seconds += time.monotonic() - began
        return figures

    def try_(self, data: bytes) -> None:
        """One input; kept if it shows something new."""
        self._about(data)
        self._counted.begin()
        outcome = self._check(data)
        news = self._counted.news()
        if outcome not in self._outcomes and len(self._outcomes) < MAX_OUTCOMES:
            self._outcomes.add(outcome)
            news += 1
        self.figures.inputs += 1
        if news and len(self.kept) < MAX_KEPT:
            self.kept.append(data)

    def _chosen(self) -> bytes:
        """Late ones and short ones more often: the first lead on, the second are quick and easily changed."""
        dice, kept = self._dice, self.kept
        if dice.random() < 0.3:
            return kept[-1 - int(len(kept) * dice.random() ** 3)]
        return min(dice.choice(kept), dice.choice(kept), key=len)
