"""How a check tells what it has found. Free of torch, like the runner."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]


class NotHeldError(Exception):
    """Something that must hold does not; with the figures that show it."""

    def __init__(self, why: str, figures: Figures) -> None:
        super().__init__(why)
        self.figures = figures


class LeftOutError(Exception):
    """It cannot be shown on this device."""


def require(figures: Figures, *faults: str | None) -> Figures:
    """The figures, if there are no faults.

    Raises:
        NotHeldError: there are some.
    """
    if found := [each for each in faults if each]:
        raise NotHeldError("; ".join(found), figures)
    return figures
