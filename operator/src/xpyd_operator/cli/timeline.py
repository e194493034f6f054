"""Timelines of requests as text, and in Chrome's trace-event format, which Perfetto opens. Pure.

Chrome's "Trace Event Format": complete events (``X``), instants (``i``) and metadata (``M``), times in microseconds.
"""

from __future__ import annotations

from typing import Any, Final

from xpyd_sidecar.contract.timeline import Event, Timeline, Traces

LONG: Final = frozenset({("router", "request"), ("router", "decode leg")})
"""They last as long as the answer does: the picture ends where the rest ends."""
NAME_MOST: Final = 44
BAR_LEAST: Final = 20
Lanes = dict[tuple[str, str], list[Event]]


def text(traces: Traces, width: int) -> str:
    """All of them, with bars, for a terminal of so many columns."""
    parts = [_text(one, width) for one in traces.found]
    if traces.clocks:
        parts.append("clocks beside the router's: " + ", ".join(
            f"{clock.instance} within {1000 * clock.within_s:.2f} ms" for clock in traces.clocks))
    parts += [f"{name} tells nothing: {why}" for name, why in sorted(traces.silent.items())]
    if not traces.found:
        parts.insert(0, f"router {traces.router} remembers no request that went to engines")
    return "\n\n".join(parts)


def lanes(timeline: Timeline) -> Lanes:
    """Events by (row, name): rows and lanes in the order in which they begin, the router first."""
    rows: dict[str, dict[str, list[Event]]] = {"router": {}}
    for event in timeline.events:
        rows.setdefault(event.row, {}).setdefault(event.name, []).append(event)
    return {(row, name): events for row, names in rows.items() for name, events in names.items()}


def _text(timeline: Timeline, width: int) -> str:
    found = lanes(timeline)
    ends = [event.at + event.seconds for lane, events in found.items() if lane not in LONG for event in events]
    end = max(ends, default=timeline.total_s) or 1e-6
    start = min((event.at for event in timeline.events), default=0.0)
    names = {lane: f"{lane[0]}  {lane[1]}" for lane in found}
    column = min(NAME_MOST, max(map(len, names.values()), default=0))
    bar = max(BAR_LEAST, width - column - 23)
    out = [_head(timeline), f"{'':{column}}  {'ms':>9} {'for':>9} ┌{_scale(start, end, bar)}"]
    for lane, events in found.items():
        first, last = events[0].at, max(event.at + event.seconds for event in events)
        for_ = f"{1000 * (last - first):9.2f}" if last > first else " " * 9
        drawn = _bar(events, start, end, bar)
        out.append(f"{names[lane][:column]:{column}}  {1000 * first:9.2f} {for_} │{drawn}")
        if note := _note(events):
            out[-1] = out[-1].rstrip() + f"  {note}"
    return "\n".join(out)


def _head(timeline: Timeline) -> str:
    words = [f"request {timeline.request}" if timeline.request else "a request of another router",
             f"transfer {timeline.transfer}", timeline.outcome or "open"]
    if timeline.ttft_s is not None:
        words.append(f"TTFT {1000 * timeline.ttft_s:.1f} ms")
    words.append(f"{1000 * timeline.total_s:.1f} ms in all")
    for count, what in ((timeline.prompt_tokens, "tokens in"), (timeline.tokens, "out")):
        if count >= 0:
            words.append(f"{count} {what}")
    return ", ".join(words)


def _scale(start: float, end: float, width: int) -> str:
    left, right = f" {1000 * start:.1f}", f"{1000 * end:.1f} ms"
    return left + "─" * max(1, width - len(left) - len(right) - 1) + " " + right


def _bar(events: list[Event], start: float, end: float, width: int) -> str:
    cells = [" "] * width
    each = (end - start) / width
    for event in events:
        first = min(width - 1, max(0, int((event.at - start) / each)))
        last = min(width - 1, max(first, int((event.at + event.seconds - start) / each)))
        for at in range(first, last + 1):
            cells[at] = "█" if event.seconds else "◆"
    return "".join(cells)


def _note(events: list[Event]) -> str:
    if len(events) == 1:
        return events[0].note
    sizes = sum(event.size for event in events)
    return f"{len(events)} of them" + (f", {sizes} {events[0].note.split()[1]}" if sizes and " " in events[0].note else "")


def chrome(traces: Traces) -> dict[str, Any]:
    """The same for Perfetto: a process per row, a thread per lane; several requests side by side by their arrival."""
    base = min((timeline.arrived_unix for timeline in traces.found), default=0.0)
    out: list[dict[str, Any]] = []
    pids: dict[str, int] = {}
    tids: dict[tuple[int, str], int] = {}
    for timeline in traces.found:
        for (row, name), events in lanes(timeline).items():
            if row not in pids:
                pids[row] = len(pids) + 1
                out.append({"ph": "M", "name": "process_name", "pid": pids[row], "tid": 0, "args": {"name": row}})
            pid = pids[row]
            if (pid, name) not in tids:
                tids[pid, name] = len(tids) + 1
                out.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tids[pid, name], "args": {"name": name}})
            for event in events:
                args = {"request": timeline.request, "transfer": timeline.transfer, "note": event.note, "size": event.size}
                one: dict[str, Any] = {"name": name, "cat": row, "pid": pid, "tid": tids[pid, name], "args": args,
                                       "ts": round(1e6 * (timeline.arrived_unix - base + event.at), 3)}
                out.append({**one, "ph": "X", "dur": round(1e6 * event.seconds, 3)} if event.seconds
                           else {**one, "ph": "i", "s": "t"})
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": {
        "service": traces.service, "router": traces.router, "zero": f"{base:.6f} s since 1970",
        "clocks": {clock.instance: f"within {1e6 * clock.within_s:.0f} us" for clock in traces.clocks},
        "silent": traces.silent}}
