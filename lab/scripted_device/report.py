"""What a run of the scripted device says: figures by prompt length, beside those of a real GPU. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from lab.scripted_device import counting, parameters

Counts = Mapping[str, Mapping[str, float]]
"""By side, what has come of each counter."""
THREADS: Final = {"prefill engine": ("prefill", "engine"), "prefill sender": ("prefill", "xpyd-sender"),
                  "prefill copies": ("prefill", "xpyd-copies"), "decode receiver": ("decode", "xpyd-receiver"),
                  "decode arrivals": ("decode", "xpyd-arrivals"), "decode engine": ("decode", "engine")}
WITHIN: Final = 0.25
"""Of what was measured: how far off a prediction may be."""


class Handed(NamedTuple):
    """A prompt that was handed over."""

    began: float
    """By the monotonic clock."""
    times: Sequence[float]
    """Seconds from there to each token."""
    counts: Counts


def length_figures(tokens: int, plain: Sequence[Sequence[float]], handed: Sequence[Handed]) -> dict[str, Any]:
    """Of prompts of one length. ``plain``: seconds to each token, by prompt."""
    counts = [each.counts for each in handed]
    one, two = (statistics.median(times[0] for times in answers)
                for answers in (plain, [each.times for each in handed]))
    size = tokens * parameters.TOKEN_BYTES
    links = [each["decode"]["ended place"] - each["decode"]["began in"] for each in counts
             if "ended place" in each["decode"]]
    measured = {run: times[tokens] for run, times in parameters.MEASURED_TTFT.items() if tokens in times}
    out = {
        "kv_mib": size >> 20,
        "plain_ttft_ms": ms(one), "ttft_ms": ms(two), "ratio": round(two / one, 2),
        "ttft_rounds_ms": [ms(each.times[0]) for each in handed],
        "second_token_ms": ms(statistics.median(each.times[1] - each.times[0] for each in handed)),
        "when_ms": moments(handed),
        "link_gb_s": round(size / statistics.median(links) / 1e9, 2) if links else None,
        "measured_ttft_ms": {run: ms(value) for run, value in measured.items()},
        "off": {run: off(two, value) for run, value in measured.items()},
    }
    return out | {name: mean(counts, pick) for name, pick in COUNTED.items()}


def moments(handed: Sequence[Handed]) -> dict[str, float]:
    """Milliseconds after the request, the median of prompts: when each part of a hand-over began or ended."""
    out = {}
    for name, (side, moment) in MOMENTS.items():
        found = [each.counts[side][moment] - each.began for each in handed if moment in each.counts[side]]
        if found:
            out[name] = ms(statistics.median(found))
    return out


def ms(seconds: float) -> float:
    """Milliseconds."""
    return round(seconds * 1e3, 1)


def off(value: float, measured: float) -> float:
    """How far a value is from what was measured, as a share of that."""
    return round(value / measured - 1, 2)


def mean(counts: Sequence[Counts], names: Sequence[tuple[str, str]]) -> float:
    """Of a sum of counters, over prompts. ``names``: (side, what its name begins with)."""
    total = sum(value for each in counts for side, begin in names for name, value in each[side].items()
                if name.startswith(begin) and name not in counting.BY_TIME)
    return round(total / len(counts), 1) if counts else 0.0


MOMENTS: Final = {
    "forward_began": ("prefill", "began forward"), "out_began": ("prefill", "began out"),
    "forward_ended": ("prefill", "ended forward"), "out_ended": ("prefill", "ended out"),
    "in_began": ("decode", "began in"), "in_ended": ("decode", "ended in"), "place_ended": ("decode", "ended place"),
    "decode_began": ("decode", "began forward")}
"""Of a prompt: the step on prefill's device, copies out, copies into decode's ring and into its blocks, its step."""
COUNTED: Final = {
    "bytes_copied_by_cores": (("prefill", "bytes copied"), ("decode", "bytes copied")),
    "bytes_summed_by_cores": (("prefill", "bytes summed"), ("decode", "bytes summed")),
    "bytes_first_touched": (("prefill", "bytes touched"), ("decode", "bytes touched")),
    "manifests": (("prefill", "frames MANIFEST"),),
    "gathers": (("prefill", "calls gather"),),
    "presses": (("prefill", "frames PRESS"),),
    "fetches": (("decode", "calls bring"),),
    "frames_to_decode": (("prefill", "frames "),),
    "frames_to_prefill": (("decode", "frames "),),
    "control_messages": (("prefill", "control "), ("decode", "control ")),
    "wakes_prefill_sender": (("prefill", "wakes xpyd-sender"),),
    "wakes_prefill_copies": (("prefill", "wakes xpyd-copies"),),
    "wakes_receiver": (("decode", "wakes xpyd-receiver"),),
    "wakes_decode_arrivals": (("decode", "wakes xpyd-arrivals"),),
    "wakes_control": (("prefill", "wakes xpyd-control"), ("decode", "wakes xpyd-control")),
    "naps_prefill_engine": (("prefill", "naps engine"),),
    "naps_decode_engine": (("decode", "naps engine"),),
    "empty_steps_prefill": (("prefill", "steps empty"),),
    "empty_steps_decode": (("decode", "steps empty"),),
    "launches_prefill": (("prefill", "launches"),),
    "launches_decode": (("decode", "launches"),),
}
"""Per prompt: the name in the results, and the counters that make it up."""


def shares(counts: Counts, seconds: float, prompts: int) -> dict[str, dict[str, float]]:
    """Of a core, by thread: what the kernel has seen of it, how much of that was scripted Python, and byte work."""
    out = {}
    for name, (side, thread) in THREADS.items():
        found = counts[side]
        ran, work = found.get(f"cpu {thread}", 0.0), found.get(f"bytes_s {thread}", 0.0)
        held = found.get(f"launch_s {thread}", 0.0) + found.get(f"runner_s {thread}", 0.0)
        out[name] = {"processor": round(ran / seconds, 3), "of_it_scripted": round(held / seconds, 3),
                     "byte_work": round(work / seconds, 3), "share": round((ran + work) / seconds, 3),
                     "prompt_ms": ms((ran + work) / prompts)}
        if (real := parameters.MEASURED_SHARES.get(name)) is not None:
            measured_s = real * parameters.PROFILED_PROMPT_S
            out[name] |= {"measured": real, "off": off((ran + work) / seconds, real),
                          "measured_prompt_ms": ms(measured_s),
                          "off_prompt": off((ran + work) / prompts, measured_s)}
    return out


def gaps(streams: Sequence[Sequence[float]], began: float, ended: float) -> dict[str, float]:
    """Milliseconds between tokens of streams, of those that came between two moments."""
    found = sorted((after - before) * 1e3 for times in streams for before, after in itertools.pairwise(times)
                   if began <= after <= ended)
    return {"count": len(found), "p50_ms": round(percentile(found, 0.50), 2), "p99_ms": round(percentile(found, 0.99), 2),
            "most_ms": round(found[-1], 2)}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least of ordered values that so many are not above."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def verdict(result: Mapping[str, Any]) -> list[str]:
    """What of the run that is predicted is not predicted within a quarter."""
    run = parameters.RUN
    wrong = [f"{tokens} tokens: {row['ttft_ms']} ms, measured {row['measured_ttft_ms'][run]} ({row['off'][run]:+.0%})"
             for tokens, row in result.get("lengths", {}).items() if abs(row["off"].get(run, 0.0)) > WITHIN]
    return wrong + [f"{name}: {row['share']:.0%} of a core, measured {row['measured']:.0%} ({row['off']:+.0%})"
                    for name, row in result.get("shares", {}).items() if abs(row.get("off", 0.0)) > WITHIN]


def messages(row: Mapping[str, Any]) -> float:
    """Of a length's figures: those of the session and of the control channel, both ways."""
    return float(row["frames_to_decode"] + row["frames_to_prefill"] + row["control_messages"])


def wakes(row: Mapping[str, Any]) -> float:
    """Of a length's figures: wake-ups of all threads but the engines'."""
    return float(sum(value for name, value in row.items() if name.startswith("wakes_")))


def touched(row: Mapping[str, Any]) -> float:
    """Of a length's figures: bytes that a core has touched, once for each time."""
    return float(sum(value for name, value in row.items() if name.startswith("bytes_")))


def length_table(rows: Mapping[str, Any]) -> list[str]:
    """Lines for a person."""
    beside = "".join(f"  {run} 1P1D   off" for run in parameters.MEASURED_TTFT)
    lines = [f"prompt   KV  plain   1P1D  ratio{beside}   2nd  GB/s  manifests fetches messages  wakes  launches  touched"]
    for tokens, row in rows.items():
        found = "".join(f" {row['measured_ttft_ms'][run]:>9.0f} {row['off'][run]:>+5.0%}" if run in row["off"] else " " * 16
                        for run in parameters.MEASURED_TTFT)
        lines.append(f"{tokens:>6} {row['kv_mib']:>4} {row['plain_ttft_ms']:>6.0f} {row['ttft_ms']:>6.0f} {row['ratio']:>6}"
                     f"{found} {row['second_token_ms']:>5.1f} {row['link_gb_s'] or 0:>5} {row['manifests']:>9.1f} "
                     f"{row['fetches']:>7.1f} {messages(row):>8.1f} {wakes(row):>6.0f} "
                     f"{row['launches_prefill'] + row['launches_decode']:>9.0f} {touched(row):>8.0f}")
    return [*lines, ""]


def table(result: Mapping[str, Any]) -> str:
    """For a person."""
    lines = length_table(result.get("lengths", {}))
    if "with_room" in result:
        lines += ["with as much of the device's memory as is asked for:", *length_table(result["with_room"])]
    for name, row in result.get("shares", {}).items():
        real = (f", measured {row['measured']:.0%} ({row['off']:+.0%}; of a prompt {row['prompt_ms']:.0f} ms, "
                f"measured {row['measured_prompt_ms']:.0f}, {row['off_prompt']:+.0%})") if "measured" in row else ""
        lines.append(f"{name:16} {row['share']:>5.0%} of a core: processor {row['processor']:.0%} (scripted Python "
                     f"{row['of_it_scripted']:.0%}), byte work {row['byte_work']:.0%}{real}")
    for name, row in result.get("beside", {}).items():
        real = f", measured {parameters.MEASURED_BESIDE[name]}" if name in parameters.MEASURED_BESIDE else ""
        lines.append(f"streams beside prompts, {name}: {row}{real}")
    return "\n".join([*lines, *(f"off: {line}" for line in verdict(result))])
