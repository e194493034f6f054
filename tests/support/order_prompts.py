"""The requests of ``session_orders``: what prefill ranks make for them, and how their loads end at each decode rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from xpyd_sidecar.kv.keys import Key, Outcome


@dataclass
class Try:
    """What a prefill rank makes for a key."""

    key: Key
    p: int
    left: list[tuple[int, int, int]]
    """Pieces that are not copied: region, first, count."""
    expected: bool = False
    released: bool = False


@dataclass
class Prompt:
    """One request."""

    letter: str
    blocks: int
    base: int
    """The first of its blocks' numbers at decode."""
    ranks: int
    """Of decode."""
    tries: list[Try] = field(default_factory=list)
    first: int = -1
    """Where its load begins; below 0: it has not begun."""
    asked: int = -1
    """The newest try that was ordered."""
    ended: dict[int, tuple[Key, Outcome]] = field(default_factory=dict)
    """By decode rank: how its load has ended, and of which try."""
    settled: set[int] = field(default_factory=set)
    """Decode ranks that write nothing more into its blocks."""
    dropped: bool = False
    """Its request ended before its load began."""
    excuses: set[str] = field(default_factory=set)
    late: bool = False
    """Prefill begins to compute it when all others are done."""

    @property
    def request(self) -> str:
        return f"r{self.letter}"

    @property
    def finished(self) -> bool:
        """Whether all ranks have reported its load."""
        return len(self.ended) == self.ranks

    @property
    def waits(self) -> bool:
        """Whether it has no blocks yet."""
        return self.first < 0 and not self.dropped

    @property
    def loading(self) -> bool:
        """Whether newer tries would be ordered."""
        return self.first >= 0 and not self.finished and "abandoned" not in self.excuses

    @property
    def whole(self) -> Key | None:
        """The try that all ranks have loaded, and confirmed."""
        keys = {key for key, _ in self.ended.values()}
        well = all(outcome is Outcome.OK for _, outcome in self.ended.values())
        return keys.pop() if self.finished and well and len(keys) == 1 else None
