"""GB/s over block size, both axes logarithmic, as SVG."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 360, 48, 150, 34, 40
COLOURS = {"ours_tcp+xxh3": "#1f6feb", "ours_tcp": "#79b8ff", "ours_shm+xxh3": "#2da44e",
           "ours_shm": "#85e89d", "ours_nixl": "#56d4dd", "ours_nixl+xxh3": "#1b7c83", "nixl_read_tcp": "#ff80bf",
           "memcpy": "#24292f", "raw_tcp": "#57606a",
           "nixl_tcp": "#bf3989", "nixl_host": "#e36209", "gloo_packed": "#9a6700", "gloo_blocks": "#d4a72c",
           "mooncake_tcp": "#cf222e"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Two charts side by side: idle, and beside a busy thread."""
    size = f'width="{2 * WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
             f'<rect {size} fill="white"/>']
    for index, condition in enumerate(("idle", "busy")):
        title = "idle" if condition == "idle" else "beside a thread that computes in each process"
        parts += [f'<g transform="translate({index * WIDTH},0)">', *_chart(title, result[condition]), "</g>"]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _chart(title: str, lines: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    blocks = [int(block) for block in next(iter(lines.values()))]
    values = [row["gb_per_s"] for line in lines.values() for row in line.values()]
    low, high = math.log10(max(min(values), 0.01)), math.log10(max(values))

    def down(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(max(value, 0.01)) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def across(block: int) -> float:
        return LEFT + math.log2(block / blocks[0]) / math.log2(blocks[-1] / blocks[0]) * (WIDTH - LEFT - RIGHT)

    parts = [f'<text x="{LEFT}" y="18" font-size="13">GB/s, {escape(title)}</text>']
    for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20):
        if low <= math.log10(tick) <= high:
            at = down(tick)
            parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#eee"/>'
                         f'<text x="{LEFT - 6}" y="{at:.1f}" dy="4" text-anchor="end">{tick:g}</text>')
    parts += [f'<text x="{across(block):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{block >> 10} KiB</text>'
              for block in blocks]
    ends: list[float] = []
    for name, line in sorted(lines.items(), key=lambda one: -list(one[1].values())[-1]["gb_per_s"]):
        points = " ".join(f"{across(int(block)):.1f},{down(row['gb_per_s']):.1f}" for block, row in line.items())
        colour = COLOURS.get(name, "#999")
        at = max(down(list(line.values())[-1]["gb_per_s"]), ends[-1] + 13 if ends else TOP)
        ends.append(at)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
                     f'<text x="{WIDTH - RIGHT + 6}" y="{at:.1f}" dy="4" fill="{colour}">{escape(name)}</text>')
    return parts
