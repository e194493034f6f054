"""Many spans in bounded memory: the resolution is halved where there are too many. Pure.

Laws
1. No byte and no piece is forgotten: sizes and counts add up to what was added.
2. At most ``MOST`` spans are kept; neighbours are merged where one more would come.
3. The earliest beginning and the latest end stay.
"""

from __future__ import annotations

from typing import Final

from xpyd_sidecar.contract.timeline import Span

MOST: Final = 64


class Pieces:
    """Spans in the order in which they ended."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, at: float, until: float, size: int, link: str = "") -> None:
        """One more piece."""
        if len(self._spans) == MOST:
            spans = self._spans
            self._spans = [_joined(one, other) for one, other in zip(spans[::2], spans[1::2], strict=True)]
        self._spans.append(Span(at, until, size, 1, link))

    def take(self) -> list[Span]:
        """All of them."""
        return self._spans


def _joined(one: Span, other: Span) -> Span:
    link = one.link if other.link in {one.link, ""} else other.link if not one.link else "several"
    return Span(min(one.at, other.at), max(one.until, other.until), one.size + other.size, one.count + other.count, link)
