"""What is measured, and how it becomes a figure.

Theory: on a machine that others use too, times wander, and so does what a request costs. So every round asks each router
the same, one right after the other, and what counts is the ratio within a round; the figure is the median of the rounds'
ratios, its spread their quartiles.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_CPUCLOCK_SCHED = 2


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time so far of some processes with all their threads, also those that ended; seconds, to the nanosecond.

    The clock id of another process is ``~pid << 3 | CPUCLOCK_SCHED`` (clock_getcpuclockid(3), as glibc makes it).
    """
    return sum(time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED) for pid in pids)


def peak_rss_mb(pids: Iterable[int]) -> float:
    """The most memory that one of the processes ever had, in units of 10^6 bytes."""
    peaks = [0.0]
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            peaks += [int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmHWM")]
    return max(peaks)


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name``, ``name_p25`` and ``name_p75``: median and quartiles.

    Raises:
        ValueError: there are fewer than three values, which have no quartiles.
    """
    if len(values) < 3:
        raise ValueError(f"{name}: {len(values)} values; at least 3 rounds are needed for a spread")
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {name: round(middle, 4), f"{name}_p25": round(low, 4), f"{name}_p75": round(high, 4)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round.

    Raises:
        ValueError: the rounds do not pair, or a divisor is not above 0.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds of one against {len(theirs)} of the other")
    if min(theirs, default=1.0) <= 0:
        raise ValueError(f"a ratio to {min(theirs)}")
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def added(through: Sequence[float], direct: Sequence[float]) -> list[float]:
    """What a router adds to a time, round by round. Raises ValueError where the rounds do not pair."""
    if len(through) != len(direct):
        raise ValueError(f"{len(through)} rounds of one against {len(direct)} of the other")
    return [one - other for one, other in zip(through, direct, strict=True)]


def figures(cpu_ms: Mapping[int, Mapping[str, Sequence[float]]],
            first_us: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Every ratio and absolute figure of the rounds.

    ``cpu_ms``: chunks of an answer → router → milliseconds of processor per request, one of each round.
    ``first_us``: router → median time to the first event of each round in µs, ``direct`` without any router.
    """
    out: dict[str, float] = {}
    for chunks, rounds in cpu_ms.items():
        for name in rounds:
            if name not in {"xpyd", "xpyd_error"}:
                out |= spread(f"cpu_vs_{name}_{chunks}", ratios(rounds["xpyd"], rounds[name]))
    out |= spread("continue_cpu_vs_error", [ratio for rounds in cpu_ms.values()
                                            for ratio in ratios(rounds["xpyd"], rounds["xpyd_error"])])
    more = {name: added(times, first_us["direct"]) for name, times in first_us.items() if name != "direct"}
    if "xpyd_before" in more:
        out |= spread("ttft_us_vs_xpyd_before", ratios(first_us["xpyd"], first_us["xpyd_before"]))
        pairs = [pair for pair in zip(more["xpyd"], more["xpyd_before"], strict=True) if min(pair) > 0]
        out |= spread("ttft_added_p50_vs_xpyd_before", [one / other for one, other in pairs])
    # Where the machine held up the clients that need no router, nothing was measured of what one adds.
    sound = [pair for pair in zip(more["xpyd"], more["vllm_router"], strict=True) if min(pair) > 0]
    out |= spread("ttft_added_p50_vs_vllm_router", [one / other for one, other in sound])
    out["ttft_rounds_left_out"] = len(more["xpyd"]) - len(sound)
    for chunks, rounds in cpu_ms.items():
        for name, values in rounds.items():
            out |= spread(f"cpu_ms_{name}_{chunks}", values)
    for name, values in more.items():
        out |= spread(f"ttft_added_us_{name}", values)
    return out | spread("ttft_us_direct", first_us["direct"])
