"""A picture of the distributions: a row for each family, a dot for each scenario."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from planner_scenarios import FAMILIES

WIDTH, ROW, LEFT, HEAD, FOOT = 860, 30, 110, 46, 34
LEAST, MOST = -4.0, 8.0
"""Points; what is beyond stands at the edge."""
FONT = 'font-family="sans-serif" font-size="12"'
TITLE = "attainment over the best mix of fixed counts at equal hours, in points"


def picture(rows: list[dict[str, Any]]) -> str:
    """SVG: the planner's attainment less that of fixed counts at equal hours, in points."""
    height = HEAD + ROW * len(FAMILIES) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(TITLE)}</text>',
    ]
    for mark in range(round(LEAST), round(MOST) + 1):
        across = _across(mark)
        parts.append(f'<line x1="{across}" y1="{HEAD - 8}" x2="{across}" y2="{height - FOOT}" '
                     f'stroke="{"#24292f" if mark == 0 else "#d0d7de"}"/>')
        parts.append(f'<text x="{across}" y="{height - 14}" text-anchor="middle">{mark:+d}</text>')
    for at, family in enumerate(FAMILIES):
        down = HEAD + ROW * at + ROW / 2
        parts.append(f'<text x="{LEFT - 14}" y="{down + 4}" text-anchor="end">{escape(family)}</text>')
        alike = sorted(each["over_hull"] * 100 for each in rows if each["family"] == family)
        parts += [f'<circle cx="{_across(value)}" cy="{down + (index % 3 - 1) * 5}" r="3" fill="#1f6feb" '
                  'fill-opacity="0.55"/>' for index, value in enumerate(alike)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _across(points: float) -> float:
    inside = min(MOST, max(LEAST, points))
    return round(LEFT + (inside - LEAST) / (MOST - LEAST) * (WIDTH - LEFT - 20), 1)
