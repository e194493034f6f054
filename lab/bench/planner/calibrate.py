"""The simulation against real engines of this host: fitted on a part of each run's requests, checked on the others.

A real 1P1D (a random model whose prefill and steps take far longer than what is done around them, on CPU) is warmed up and
asked one request after the other, which tells how many a second it can take. Then come several runs of Poisson arrivals at
a fixed part of that, in an open loop. Every second request of a run is a probe: from the probes the engine model is fitted,
a decode step over the requests in the batch, a prefill over the length of its prompt, both by medians of slopes, so that
single hiccups of the machine do not count. The whole run is then simulated with that model, and TTFT and TPOT of the other
requests are compared, medians and 95th percentiles. Each error is the median over the runs; ``calibration_error`` is the
greatest.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
from make_model import ensure_wide

from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.trace import Arrival, Trace
from xpyd_operator.simulation.world import World
from xpyd_operator.traffic.drive import TrafficTarget, drive
from xpyd_operator.traffic.measures import RequestOutcome, percentile

SERVICE = "calibrate"
PORT, MEMBERS = 18801, 18802
DOCUMENT = """
apiVersion: xpyd.dev/v1beta1
kind: DisaggService
metadata: {{name: {name}}}
spec:
  model: {{source: {model}, servedName: demo}}
  engine:
    args: [--enforce-eager, --dtype, float32, --max-model-len, "1024", --no-enable-prefix-caching]
    env:
      - {{name: VLLM_CPU_KVCACHE_SPACE, value: "1"}}
      - {{name: VLLM_CPU_OMP_THREADS_BIND, value: nobind}}
      - {{name: OMP_NUM_THREADS, value: "1"}}
  router: {{ports: {{http: {port}, members: {members}}}}}
"""
KV_TOKENS = 10**6
RUNS, REQUESTS, RUN_S = 3, (40, 100), 45.0
"""Requests of a run: so many as come in that time, within bounds."""
USED = 0.3
"""Share of the time that prefill works: below saturation, yet some wait for others."""
SLOWEST_RATE = 0.5
"""Requests a second at least, so that a run ends within some minutes."""
PROMPTS, OUTPUTS = (64, 640), (16, 64)
ALONE, LEAST = 10, 5
"""Requests one after the other; prefills without another beside them from which a line can be drawn."""
RELATIVE = ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")


def load(rate: float, count: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int) -> Trace:
    """Poisson arrivals with lengths drawn evenly between bounds."""
    draw, at, found = Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        found.append(Arrival(at, draw.randint(*prompts), draw.randint(*outputs)))
    return found


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A and b of y = a + b x: b is the median of all slopes (Theil 1950), at least 0, a the median of what is left."""
    slopes = [(q - s) / (p - r) for index, (p, q) in enumerate(points) for r, s in points[:index] if p != r]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    return median(q - slope * p for p, q in points), slope


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Seconds that both have in common."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def fit(outcomes: Sequence[RequestOutcome], every: int = 1) -> EngineModel:
    """The engine model that explains every second, say, of the outcomes best; batches are those of all.

    Raises:
        ValueError: too few prefills had the instance for themselves.
    """
    decodes = [(each.first, each.ended) for each in outcomes]
    probes = range(0, len(outcomes), every)
    prefills = [(each.started, each.first) for each in outcomes]
    steps, alone = [], []
    for index in probes:
        each, mine = outcomes[index], decodes[index]
        batch = sum(overlap(mine, other) for other in decodes) / (mine[1] - mine[0])
        steps.append((batch, (mine[1] - mine[0]) / (each.output_tokens - 1)))
        if sum(overlap(prefills[index], other) > 0 for other in prefills) == 1:  # its own
            alone.append((float(each.prompt_tokens), each.ttft))
    if len(alone) < LEAST:
        raise ValueError(f"{len(alone)} of {len(probes)} prefills were alone; {LEAST} are needed")
    base, per_request = line(steps)
    fixed, per_token = line(alone)
    fixed = max(0.002, fixed - base - per_request)
    return EngineModel(
        prefill_start=fixed / 2, prefill_rate=1 / max(per_token, 1e-7), step_base=max(1e-4, base),
        step_per_request=per_request, kv_tokens=KV_TOKENS, handover=fixed / 2,
    )


def compare(real: Sequence[RequestOutcome], model: EngineModel, every: int = 1) -> dict[str, tuple[float, float]]:
    """Measured and simulated seconds, by measure; of those that were no probes, of all where all were.

    Arrivals are simulated as they were sent, which on a busy machine is later than planned.
    """
    began = min(each.started for each in real)
    trace = [Arrival(each.started - began, each.prompt_tokens, each.output_tokens) for each in real]
    run = World(trace, model, (1, 1), Static()).play()
    kept = [index for index in range(len(real)) if every == 1 or index % every]
    measured = {"ttft": [real[index].ttft for index in kept], "tpot": [real[index].tpot or 0.0 for index in kept]}
    simulated = {"ttft": [run.ttft[index] for index in kept], "tpot": [run.tpot[index] for index in kept]}
    return {
        f"{name}_p{share}": (percentile(sorted(measured[name]), share), percentile(sorted(simulated[name]), share))
        for name in measured for share in (50, 95)
    }


def summary(runs: Sequence[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Medians over the runs; the error of a measure is the median of what it is off in each."""
    found: dict[str, Any] = {"calibration_runs": len(runs)}
    for name in RELATIVE:
        found[f"calibration_{name}_ms_real"] = round(median(run[name][0] for run in runs) * 1e3, 2)
        found[f"calibration_{name}_ms_simulated"] = round(median(run[name][1] for run in runs) * 1e3, 2)
        found[f"calibration_error_{name}"] = round(median(abs(run[name][1] / run[name][0] - 1) for run in runs), 4)
    found["calibration_error"] = max(found[f"calibration_error_{name}"] for name in RELATIVE)
    return found


def measure_real(keep: Path | None = None) -> dict[str, Any]:
    """Start the service, drive it, end it. ``keep``: a file for every outcome."""
    with tempfile.TemporaryDirectory(prefix="xpyd-calibrate-") as folder:
        path = Path(folder) / "service.yaml"
        path.write_text(DOCUMENT.format(name=SERVICE, model=ensure_wide(), port=PORT, members=MEMBERS))
        env = os.environ | {"XPYD_HOME": folder}
        command = [str(Path(sys.executable).parent / "xpyd")]
        try:
            subprocess.run([*command, "up", "-d", "-f", str(path)], env=env, check=True)
            runs = asyncio.run(_runs())
        finally:
            subprocess.run([*command, "down", SERVICE, "--now"], env=env, check=False)
    if keep is not None:
        keep.write_bytes(msgspec.json.encode(runs))
    return summary([compare(run, fit(run, 2), 2) for run in runs])


async def _runs() -> list[list[RequestOutcome]]:
    target = TrafficTarget(f"http://127.0.0.1:{PORT}/v1", "demo", vocabulary=250, timeout_s=120.0)
    draw = Random(3)

    async def sent(trace: Trace) -> list[RequestOutcome]:
        outcomes = await drive(target, trace, draw.random, lambda _: None)
        _all_answered(outcomes)
        return outcomes

    await sent(load(2.0, 12, PROMPTS, OUTPUTS, 1))
    alone = [(await sent(load(100.0, 1, PROMPTS, OUTPUTS, 10 + index)))[0] for index in range(ALONE)]
    rate = max(SLOWEST_RATE, USED / median(each.ttft for each in alone))
    sys.stdout.write(f"{rate:.2f} requests a second\n")
    count = min(REQUESTS[1], max(REQUESTS[0], round(rate * RUN_S)))
    return [await sent(load(rate, count, PROMPTS, OUTPUTS, 20 + index)) for index in range(RUNS)]


def _all_answered(outcomes: Sequence[RequestOutcome]) -> None:
    """A calibration without some of its requests says nothing."""
    failed = [each.error for each in outcomes if not each.ok]
    if failed or any(each.output_tokens < 2 for each in outcomes):
        why = failed[0] if failed else "no usage was told"
        raise SystemExit(f"{len(failed)} of {len(outcomes)} requests failed: {why}")
