"""Bars with their spread as SVG, so that nothing needs to be installed for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 860, 18, 6, 150, 90, 46
COLOURS = {"xpyd": "#1f6feb", "xpyd_error": "#79a8f2", "nginx": "#2da44e", "vllm_router": "#bf3989",
           "sglang_router": "#9a6700"}


class Bar(NamedTuple):
    """One router's figure and its quartiles."""

    name: str
    middle: float
    low: float
    high: float


def bars(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """The whole document: groups below each other, each with a scale of its own that begins at 0."""
    parts: list[str] = []
    down = TOP
    for heading, group in groups:
        most = max((bar.high for bar in group), default=1.0) or 1.0
        parts.append(f'<text x="{LEFT}" y="{down}" font-weight="bold">{escape(heading)}</text>')
        down += 10
        for bar in group:
            parts.append(_bar(bar, most, down))
            down += BAR + GAP
        down += 26
    size = f'width="{WIDTH}" height="{down}"'
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
            f'<rect {size} fill="white"/><text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>')
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _bar(bar: Bar, most: float, down: int) -> str:
    def across(value: float) -> float:
        return LEFT + value / most * (WIDTH - LEFT - RIGHT)

    middle = down + BAR / 2
    return (f'<text x="{LEFT - 8}" y="{middle}" dy="4" text-anchor="end">{escape(bar.name)}</text>'
            f'<rect x="{LEFT}" y="{down}" width="{across(bar.middle) - LEFT:.1f}" height="{BAR}"'
            f' fill="{COLOURS.get(bar.name, "#57606a")}"/>'
            f'<line x1="{across(bar.low):.1f}" y1="{middle}" x2="{across(bar.high):.1f}" y2="{middle}" stroke="black"/>'
            f'<text x="{across(bar.high) + 6:.1f}" y="{middle}" dy="4">{_figure(bar.middle)}</text>')


def _figure(value: float) -> str:
    """Three digits that say something."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
