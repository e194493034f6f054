"""TTFT by prompt length, and where the time of one request goes, as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

WIDTH, ROW, LEFT, BAR = 900, 18, 230, 560
COLOURS = {"single": "#57606a", "two_plain": "#9a6700", "1p1d": "#1f6feb", "1p3d": "#2da44e", "one_of_it": "#8c959f",
           "nixl": "#bf3989"}


def draw(result: Mapping[str, Any], trace: Mapping[str, Any] | None) -> str:
    """Bars of each stage, and below them the lanes of a traced request."""
    parts: list[str] = []
    y = 20
    for stage in ("one", "two", "three"):
        found = result.get(f"stage_{stage}", {}).get("idle")
        if found:
            y = _bars(parts, found, y)
    if trace is not None:
        y = _lanes(parts, trace["found"][0], y + 10)
    size = f'width="{WIDTH}" height="{y + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect {size} fill="white"/>', *parts, "</svg>"]) + "\n"


def _bars(parts: list[str], found: Mapping[str, Any], y: int) -> int:
    most = max(one["ttft_ms"]["p75"] for lengths in found.values() for one in lengths.values())
    for length in next(iter(found.values())):
        parts.append(f'<text x="10" y="{y + 12}" font-size="13">TTFT, idle, {length} tokens</text>')
        for name, lengths in sorted(found.items()):
            y += ROW
            taken = lengths[length]["ttft_ms"]
            parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
                         f'<rect x="{LEFT}" y="{y + 2}" width="{BAR * taken["median"] / most:.1f}" height="13" '
                         f'fill="{COLOURS.get(name, "#57606a")}"/>'
                         f'<text x="{LEFT + BAR * taken["median"] / most + 6:.1f}" y="{y + 12}">{taken["median"]:.0f} ms '
                         f'({taken["p25"]:.0f} to {taken["p75"]:.0f})</text>')
        y += ROW + 6
    return y


def _lanes(parts: list[str], timeline: Mapping[str, Any], y: int) -> int:
    events = [one for one in timeline["events"] if (one["row"], one["name"]) not in {
        ("router", "request"), ("router", "decode leg")}]
    end = max(one["at"] + one["seconds"] for one in events)
    parts.append(f'<text x="10" y="{y}" font-size="13">One request of {timeline["prompt_tokens"]} tokens through 1P1D, '
                 f'{1000 * end:.0f} ms</text>')
    lanes: dict[tuple[str, str], list[Any]] = {}
    for one in events:
        lanes.setdefault((one["row"], one["name"]), []).append(one)
    ordered = sorted(lanes.items(), key=lambda lane: (lane[0][0] != "router", lane[0][0], lane[1][0]["at"]))
    for (row, name), spans in ordered:
        y += ROW
        parts.append(f'<text x="{LEFT - 8}" y="{y + 10}" text-anchor="end">{escape(row)} {escape(name)}</text>')
        for one in spans:
            width = max(1.5, BAR * one["seconds"] / end)
            x = LEFT + BAR * one["at"] / end
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="12" fill="#1f6feb"/>')
    return y + ROW
