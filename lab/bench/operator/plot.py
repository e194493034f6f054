"""A line chart as SVG, so that nothing needs to be installed for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 360, 60, 190, 40, 45
COLOURS = ("#1f6feb", "#2da44e", "#bf3989", "#9a6700", "#57606a", "#cf222e")
POINTS_MAX = 400
Line = Sequence[tuple[float, float]]


def line_chart(title: str, lines: Mapping[str, Line], x: str = "seconds since apply", y: str = "pods") -> str:
    """The whole document. Points in any number; each line is thinned to what can be seen."""
    most_x = max((at for line in lines.values() for at, _ in line), default=1.0) or 1.0
    most_y = max((value for line in lines.values() for _, value in line), default=1.0) or 1.0
    step_x, step_y = _step(most_x), _step(most_y)

    def at(point: tuple[float, float]) -> str:
        across = LEFT + point[0] / most_x * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - point[1] / most_y * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    size = f'width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
             f'<rect {size} fill="white"/>',
             f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>']
    for index in range(int(most_x / step_x) + 1):
        across = at((index * step_x, 0)).split(",")[0]
        parts.append(f'<line x1="{across}" y1="{TOP}" x2="{across}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
                     f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{index * step_x:g}</text>')
    for index in range(int(most_y / step_y) + 1):
        down = at((0, index * step_y)).split(",")[1]
        parts.append(f'<line x1="{LEFT}" y1="{down}" x2="{WIDTH - RIGHT}" y2="{down}" stroke="#eee"/>'
                     f'<text x="{LEFT - 6}" y="{down}" dy="4" text-anchor="end">{index * step_y:g}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{escape(x)}</text>'
                 f'<text x="{LEFT - 50}" y="{TOP - 8}">{escape(y)}</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(at(point) for point in _thin(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
                     f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 18 * (index + 1)}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _thin(line: Line) -> Line:
    every = max(1, len(line) // POINTS_MAX)
    return [*line[::every], *line[-1:]]


def _step(most: float) -> float:
    """1, 2 or 5 times a power of ten, for about six marks."""
    power = 10.0 ** math.floor(math.log10(most / 6))
    return next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 6)
