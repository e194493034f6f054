"""Latency and throughput over message size, both axes logarithmic, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 470, 330, 62, 16, 34, 40
LEGEND = 40
COLOURS = ("#1f6feb", "#bf3989", "#9a6700", "#57606a", "#2da44e")
Line = Sequence[tuple[float, float]]


def panels(charts: Sequence[tuple[str, str, Mapping[str, Line]]], marks: Mapping[float, str]) -> str:
    """Charts in two columns. Each: title, unit of its values, and lines by name; ``marks`` name the sizes."""
    rows = -(-len(charts) // 2)
    size = f'width="{2 * WIDTH}" height="{rows * HEIGHT + LEGEND}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
             f'<rect {size} fill="white"/>']
    for index, name in enumerate(charts[0][2]):
        parts.append(f'<text x="{LEFT + index * 150}" y="22" fill="{COLOURS[index]}" font-size="14">{escape(name)}</text>')
    for index, (title, unit, lines) in enumerate(charts):
        parts.append(f'<g transform="translate({index % 2 * WIDTH},{index // 2 * HEIGHT + LEGEND - 8})">')
        parts += [*_panel(title, unit, lines, marks), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, unit: str, lines: Mapping[str, Line], marks: Mapping[float, str]) -> list[str]:
    values = [value for line in lines.values() for _, value in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    left, right = math.log10(min(marks)), math.log10(max(marks))

    def across(size: float) -> float:
        return LEFT + (math.log10(size) - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def down(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - low) / max(high - low, 1) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>',
             f'<text x="4" y="{TOP - 6}">{escape(unit)}</text>']
    for power in range(low, high + 1):
        at = down(10.0 ** power)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#eee"/>'
                     f'<text x="{LEFT - 6}" y="{at:.1f}" dy="4" text-anchor="end">{10.0 ** power:g}</text>')
    for size, name in marks.items():
        parts.append(f'<text x="{across(size):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>')
    for index, line in enumerate(lines.values()):
        points = " ".join(f"{across(size):.1f},{down(value):.1f}" for size, value in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[index]}" stroke-width="1.6"/>')
    return parts
