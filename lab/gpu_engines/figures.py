"""What is made of what was seen: medians, ratios, counters, shares of threads. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

SAMPLE: Final = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
DROPPED: Final = ("engine", "model_name", "le")
COUNTED: Final = re.compile(r"xpyd_|vllm:(prompt_tokens_by_source|request_success|num_requests|kv_cache_usage|num_preempt)")
HELD: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "xpyd_kv_sends_open",
               "xpyd_kv_receives_open")
"""Gauges that are 0 where nothing runs, waits or moves."""
TICKS: Final = 100
"""Of a second: what /proc counts processor time in on Linux."""


class Seen(NamedTuple):
    """What a client saw of one stream, in seconds from its request: when each token came."""

    tokens: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.tokens[0]

    @property
    def second(self) -> float | None:
        """From the first token to the second one; None where there was one alone."""
        return self.tokens[1] - self.tokens[0] if len(self.tokens) > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between tokens."""
        return [late - early for early, late in zip(self.tokens, self.tokens[1:], strict=False)]


class Thread(NamedTuple):
    """Processor time of a thread, in ticks, as /proc tells it."""

    name: str
    user: int
    system: int
    faults: int


def milliseconds(values: Sequence[float]) -> dict[str, Any]:
    """Of seconds: the median, the least and the greatest, and how many there were."""
    return {"median": round(1e3 * statistics.median(values), 2), "least": round(1e3 * min(values), 2),
            "most": round(1e3 * max(values), 2), "n": len(values)}


def compared(rounds: Mapping[str, Sequence[Seen]], base: str) -> dict[str, Any]:
    """By contender: first and second token in milliseconds, and the ratio of its median TTFT to that of ``base``."""
    out: dict[str, Any] = {}
    for name, seen in rounds.items():
        seconds = [one.second for one in seen if one.second is not None]
        out[name] = {"ttft_ms": milliseconds([one.ttft for one in seen])}
        if seconds:
            out[name]["second_ms"] = milliseconds(seconds)
        if base in rounds and name != base:
            mid, other = (statistics.median([one.ttft for one in part]) for part in (seen, rounds[base]))
            out[name] |= {"ttft_ratio": round(mid / other, 3), "ttft_more_ms": round(1e3 * (mid - other), 2)}
    return out


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` of them lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def unlike(plain: Sequence[str], again: Sequence[str], routed: Sequence[str]) -> dict[str, int]:
    """How many answers differ: the plain engine from itself, and the routed ones from both of its answers."""
    return {"answers": len(plain), "plain_unlike_itself": sum(a != b for a, b in zip(plain, again, strict=True)),
            "routed_unlike_plain": sum(r not in (a, b) for a, b, r in zip(plain, again, routed, strict=True))}


def samples(text: str) -> dict[str, float]:
    """Of a page of metrics: what tells of hand-overs, by name with the labels that matter; no zeros, no histograms."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found is None or not COUNTED.match(found["name"]) or found["name"].endswith(("_bucket", "_created")):
            continue
        labels = [part for part in (found["labels"] or "").split(",") if part]
        kept = [part for part in labels if part.split("=", 1)[0] not in DROPPED]
        name = found["name"] + (f"{{{','.join(kept)}}}" if kept else "")
        out[name] = out.get(name, 0.0) + float(found["value"])
    return {name: value for name, value in out.items() if value}


def held(counted: Mapping[str, float]) -> dict[str, float]:
    """What an engine still holds, of its samples; empty where nothing is left."""
    return {name: value for name, value in counted.items() if name.split("{", 1)[0] in HELD}


def shares(before: Mapping[int, Thread], after: Mapping[int, Thread], seconds: float, *,
           least: float = 0.02) -> list[dict[str, Any]]:
    """Threads by the share of a core that they took, the busiest first; those under ``least`` are left out."""
    out = []
    for number, now in after.items():
        then = before.get(number, Thread(now.name, 0, 0, 0))
        user, system = ((a - b) / TICKS / seconds for a, b in ((now.user, then.user), (now.system, then.system)))
        if user + system >= least:
            out.append({"thread": now.name, "user": round(user, 3), "system": round(system, 3),
                        "faults": now.faults - then.faults})
    return sorted(out, key=lambda row: -(row["user"] + row["system"]))


def folded(text: str, most: int = 6) -> dict[str, dict[str, Any]]:
    """Of stacks as py-spy writes them (``thread;frame;…;frame count``): per thread its samples, and the functions that
    stood at the end most often.
    """
    whole: Counter[str] = Counter()
    last: dict[str, Counter[str]] = {}
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if not count.isdigit() or len(frames) < 2:
            continue
        thread = next((frame for frame in frames if frame.startswith("thread")), frames[0])
        whole[thread] += int(count)
        last.setdefault(thread, Counter())[re.sub(r":\d+\)$", ")", frames[-1])] += int(count)
    return {thread: {"samples": count, "in": dict(last[thread].most_common(most))} for thread, count in whole.most_common()}


def expected_ttft(plain_s: float, last_group_bytes: float, *, fixed_s: float = 0.012, rate: float = 44e9) -> float:
    """The bound of a hand-over's first token: a plain engine's, a fixed part, and the last group's KV out and in again."""
    return plain_s + fixed_s + 2 * last_group_bytes / rate
