"""Line charts as SVG, one above the other over the same time, so that nothing needs to be installed for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 900, 170, 64, 150, 44, 46
COLOURS = ("#1f6feb", "#2da44e", "#bf3989", "#9a6700", "#57606a", "#cf222e")
POINTS_MAX = 900
Line = Sequence[tuple[float, float]]
Panel = tuple[str, Mapping[str, Line]]
"""What the panel shows, and its lines by name."""


def panels(title: str, shown: Sequence[Panel], x: str = "minutes") -> str:
    """The whole document. Lines are thinned to what can be seen."""
    height = TOP + len(shown) * (PANEL + GAP) + 10
    size = f'width="{WIDTH}" height="{height}"'
    most_x = max((at for _, lines in shown for line in lines.values() for at, _ in line), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>', f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for index, (name, lines) in enumerate(shown):
        parts += _panel(name, lines, TOP + index * (PANEL + GAP), most_x)
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 12}" text-anchor="end">{escape(x)}</text></svg>')
    return "\n".join(parts) + "\n"


def _panel(name: str, lines: Mapping[str, Line], top: float, most_x: float) -> list[str]:
    most_y = max((value for line in lines.values() for _, value in line if math.isfinite(value)), default=1.0) or 1.0
    bottom, step_x, step_y = top + PANEL, _step(most_x, 10), _step(most_y, 4)
    across, down = (WIDTH - LEFT - RIGHT) / most_x, (PANEL - 22) / most_y
    parts = [f'<text x="{LEFT}" y="{top + 12}">{escape(name)}</text>']
    for mark in range(int(most_x / step_x) + 1):
        at = LEFT + mark * step_x * across
        parts.append(f'<line x1="{at:.1f}" y1="{top + 20}" x2="{at:.1f}" y2="{bottom}" stroke="#eee"/>'
                     f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{mark * step_x:g}</text>')
    for mark in range(int(most_y / step_y) + 1):
        at = bottom - mark * step_y * down
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#eee"/>'
                     f'<text x="{LEFT - 6}" y="{at:.1f}" dy="4" text-anchor="end">{mark * step_y:g}</text>')
    for index, (label, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(
            f"{LEFT + at * across:.1f},{bottom - min(value, most_y) * down:.1f}" for at, value in _thin(line)
        )
        down_to = top + 18 * (index + 1) + 8
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
                     f'<text x="{WIDTH - RIGHT + 10}" y="{down_to}" fill="{colour}">{escape(label)}</text>')
    return parts


def _thin(line: Line) -> Line:
    every = max(1, len(line) // POINTS_MAX)
    return [*line[::every], *line[-1:]]


def _step(most: float, marks: int) -> float:
    """1, 2 or 5 times a power of ten, for about so many marks."""
    power = 10.0 ** math.floor(math.log10(most / marks))
    return next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= marks)
