"""The modes against each other with real engines: ``bench-modes``, into ``results/modes.json``."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mode_engines import MODES, Trio, prompt_of

from xpyd_sidecar.contract import metrics

RESULTS = Path(__file__).parents[3] / "bench/results/modes.json"
LENGTHS = (256, 1024, 1900)


def ms(seconds: list[float]) -> float:
    """Median, in milliseconds."""
    return round(1000 * statistics.median(seconds), 2)


def measure(trio: Trio, rounds: int) -> dict[str, Any]:
    """All modes in every round, in turns, each prompt new."""
    draw = random.Random(0)
    ttft: dict[str, dict[int, list[float]]] = {mode: {length: [] for length in LENGTHS} for mode in MODES}
    prefill: dict[str, dict[int, list[float]]] = {mode: {length: [] for length in LENGTHS} for mode in MODES}
    plain: dict[str, dict[int, list[float]]] = {name: {length: [] for length in LENGTHS} for name in "ab"}
    for number in range(rounds + 1):
        for length in LENGTHS:
            for mode in draw.sample(MODES, len(MODES)):
                answer = trio.send(mode, prompt_of(length, draw), 1).result(120)
                trio.wait_empty()
                if number:  # the first round connects
                    ttft[mode][length].append(answer.decode_s)
                    prefill[mode][length].append(answer.prefill_s)
            for engine in (trio.a, trio.b):
                _, took = trio.timed(engine, prompt_of(length, draw), 1)
                if number:
                    plain[engine.name][length].append(took)
        print(f"round {number} of {rounds}", flush=True)
    out: dict[str, Any] = {}
    for length in LENGTHS:
        out[str(length)] = {
            "ttft_ms": {mode: ms(ttft[mode][length]) for mode in MODES},
            "prefill_leg_ms": {mode: ms(prefill[mode][length]) for mode in MODES},
            "plain_ms": {name: ms(took[length]) for name, took in plain.items()},
            "ttft_over_plain": {mode: round(statistics.median(ttft[mode][length]) / statistics.median(
                plain["b" if mode == "put" else "a"][length]), 3) for mode in MODES},
            "prefill_over_plain": {mode: round(statistics.median(prefill[mode][length]) / statistics.median(
                plain["b" if mode == "put" else "a"][length]), 3) for mode in MODES},
        }
    return out


def main() -> None:
    """Start the engines, measure, write."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--write", action="store_true")
    given = arguments.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="xpyd-modes-") as folder, Trio(Path(folder)) as trio:
        trio.wait_ready()
        lengths = measure(trio, given.rounds)
        pushed, seconds = trio.total(trio.a, metrics.PUSHED_BYTES), trio.total(trio.a, metrics.PUSH_SECONDS)
        result = {
            "date": datetime.now(UTC).date().isoformat(), "processors": os.cpu_count(), "load_before": round(load, 1),
            "rounds": given.rounds, "by_prompt_tokens": lengths,
            "order_by_ttft": {length: sorted(MODES, key=lambda mode: one["ttft_ms"][mode])
                              for length, one in lengths.items()},
            "put_wait_ms_per_transfer": round(1000 * trio.total(trio.b, metrics.PUT_WAIT_SECONDS)
                                              / max(1, (given.rounds + 1) * len(LENGTHS)), 2),
            "put_late": trio.total(trio.b, metrics.PUT_LATE),
            "a_push_mb_per_s": round(pushed / seconds / 1e6, 1) if seconds else None,
        }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if given.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
