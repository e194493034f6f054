"""Bars with their spread, and lines over logarithmic axes, as SVG, so that nothing needs to be installed for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 860, 18, 6, 150, 90, 46
COLOURS = {"xpyd": "#1f6feb", "xpyd_error": "#79a8f2", "nginx": "#2da44e", "vllm_router": "#bf3989",
           "sglang_router": "#9a6700"}
PANEL_WIDTH, PANEL_HEIGHT, MARGIN, LABELS, HEAD, FOOT = 560, 350, 56, 150, 40, 30
PALETTE = ("#1f6feb", "#bf3989", "#2da44e", "#9a6700", "#57606a", "#cf222e", "#1b7c83", "#e36209", "#79b8ff", "#ff80bf",
           "#85e89d", "#d4a72c", "#24292f", "#56d4dd")
LEAST = 0.01
"""What is less is drawn so."""
Line = Sequence[tuple[float, float]]


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
    return _document(WIDTH, down, [f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>', *parts])


def log_lines(charts: Sequence[tuple[str, Mapping[str, Line]]], marks: Mapping[float, str]) -> str:
    """The whole document: charts in two columns, each with a title and lines by name; ``marks``: those across."""
    parts: list[str] = []
    names = sorted({name for _, lines in charts for name in lines})
    colours = dict(zip(names, itertools.cycle(PALETTE), strict=False))
    for index, (title, lines) in enumerate(charts):
        parts += [f'<g transform="translate({index % 2 * PANEL_WIDTH},{index // 2 * PANEL_HEIGHT})">',
                  f'<text x="{MARGIN}" y="20" font-size="13">{escape(title)}</text>',
                  *_lines(lines, marks, colours), "</g>"]
    return _document(2 * PANEL_WIDTH, -(-len(charts) // 2) * PANEL_HEIGHT, parts)


def _document(width: int, height: int, parts: Sequence[str]) -> str:
    size = f'width="{width}" height="{height}"'
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
            f'<rect {size} fill="white"/>')
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _lines(lines: Mapping[str, Line], marks: Mapping[float, str], colours: Mapping[str, str]) -> list[str]:
    values = [max(value, LEAST) for line in lines.values() for _, value in line]
    low, high = math.log10(min(values)), math.log10(max(values) * 1.01)
    right, bottom = PANEL_WIDTH - LABELS, PANEL_HEIGHT - FOOT

    def across(at: float) -> float:
        return MARGIN + math.log(at / min(marks)) / math.log(max(marks) / min(marks)) * (right - MARGIN)

    def down(value: float) -> float:
        return bottom - (math.log10(max(value, LEAST)) - low) / (high - low) * (bottom - HEAD)

    ticks = [factor * 10.0 ** power for power in range(math.floor(low), math.ceil(high)) for factor in (1, 2, 5)]
    parts = [f'<line x1="{MARGIN}" y1="{down(tick):.1f}" x2="{right}" y2="{down(tick):.1f}" stroke="#eee"/>'
             f'<text x="{MARGIN - 6}" y="{down(tick):.1f}" dy="4" text-anchor="end">{tick:g}</text>'
             for tick in ticks if low <= math.log10(tick) <= high]
    parts += [f'<text x="{across(at):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(name)}</text>'
              for at, name in marks.items()]
    beside = 0.0
    for name, line in sorted(lines.items(), key=lambda one: -one[1][-1][1]):
        points = " ".join(f"{across(at):.1f},{down(value):.1f}" for at, value in line)
        beside = max(down(line[-1][1]), beside + 13)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.6"/>'
                     f'<text x="{right + 6}" y="{beside:.1f}" dy="4" fill="{colours[name]}">{escape(name)}</text>')
    return parts


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
