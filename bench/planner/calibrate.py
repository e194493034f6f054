"""The simulation against real engines: fitted on one run, checked on another.

A real 1P1D of this host (the example's model, on CPU) answers two Poisson loads that differ in rate and lengths. From
the first one the engine model is fitted: a decode step over the requests in the batch, a prefill over the length of its
prompt. The second is then simulated with that model, and the means of TTFT, TPOT and E2EL are compared. The error is the
greatest of the three.
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

from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.trace import Arrival, Trace
from xpyd_operator.simulation.world import World
from xpyd_operator.traffic.drive import Target, drive
from xpyd_operator.traffic.measures import Outcome, measure

SERVICE = "calibrate"
PORT, MEMBERS = 18801, 18802
DOCUMENT = """
apiVersion: xpyd.dev/v1alpha1
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


def load(rate: float, count: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int) -> Trace:
    """Poisson arrivals with lengths drawn evenly between bounds."""
    draw, at, found = Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        found.append(Arrival(at, draw.randint(*prompts), draw.randint(*outputs)))
    return found


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: y = a + b x; a flat line where x does not vary."""
    n = len(points)
    x, y = sum(p for p, _ in points) / n, sum(q for _, q in points) / n
    varied = sum((p - x) ** 2 for p, _ in points)
    slope = sum((p - x) * (q - y) for p, q in points) / varied if varied else 0.0
    slope = max(0.0, slope)
    return y - slope * x, slope


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Seconds that both have in common."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def fit(outcomes: Sequence[Outcome]) -> EngineModel:
    """The engine model that explains a run best."""
    good = [each for each in outcomes if each.ok and each.output_tokens > 1]
    decodes = [(each.first, each.ended) for each in good]
    steps = []
    for each, mine in zip(good, decodes, strict=True):
        batch = sum(overlap(mine, other) for other in decodes) / (mine[1] - mine[0])
        steps.append((batch, (mine[1] - mine[0]) / (each.output_tokens - 1)))
    base, per_request = line(steps)
    alone = []
    for each in good:
        mine = (each.started, each.first)
        if not any(overlap(mine, (other.started, other.first)) for other in good if other is not each):
            alone.append((float(each.prompt_tokens), each.ttft))
    fixed, per_token = line(alone)
    fixed = max(0.002, fixed - base)
    return EngineModel(
        prefill_start=fixed / 2, prefill_rate=1 / max(per_token, 1e-7), step_base=max(1e-4, base),
        step_per_request=per_request, kv_tokens=KV_TOKENS, handover=fixed / 2,
    )


def simulate(trace: Trace, model: EngineModel) -> dict[str, float]:
    """Means of a run with one prefill and one decode instance, milliseconds."""
    run = World(trace, model, (1, 1), Static()).play()
    whole = [a + b * (each.output - 1) for a, b, each in zip(run.ttft, run.tpot, trace, strict=True)]
    return {"ttft": _mean(run.ttft), "tpot": _mean(run.tpot), "e2el": _mean(whole)}


def compare(real: Sequence[Outcome], model: EngineModel, trace: Trace) -> dict[str, float]:
    """Measured and simulated means, and the greatest relative difference."""
    found = measure(real)
    measured = {"ttft": found.ttft_ms.mean, "tpot": found.tpot_ms.mean, "e2el": found.e2el_ms.mean}
    simulated = simulate(trace, model)
    results = {f"calibration_{name}_ms_real": round(value, 2) for name, value in measured.items()}
    results |= {f"calibration_{name}_ms_simulated": round(value, 2) for name, value in simulated.items()}
    results["calibration_error"] = round(max(abs(simulated[name] / measured[name] - 1) for name in measured), 4)
    return results


def measure_real() -> dict[str, float]:
    """Start the service, drive both loads, end it."""
    root = Path(__file__).resolve().parent.parent.parent
    with tempfile.TemporaryDirectory(prefix="xpyd-calibrate-") as folder:
        path = Path(folder) / "service.yaml"
        path.write_text(DOCUMENT.format(name=SERVICE, model=root / "examples/model/weights", port=PORT, members=MEMBERS))
        env = os.environ | {"XPYD_HOME": folder}
        command = [str(Path(sys.executable).parent / "xpyd")]
        try:
            subprocess.run([*command, "up", "-d", "-f", str(path)], env=env, check=True)
            return asyncio.run(_both())
        finally:
            subprocess.run([*command, "down", SERVICE], env=env, check=False)


async def _both() -> dict[str, float]:
    target = Target(f"http://127.0.0.1:{PORT}/v1", "demo", vocabulary=250, timeout_s=120.0)
    draw = Random(3)
    warm = load(2.0, 12, (50, 400), (8, 32), 1)
    await drive(target, warm, draw.random, lambda _: None)
    first = await drive(target, load(1.5, 90, (32, 640), (16, 96), 2), draw.random, lambda _: None)
    _all_answered(first)
    model = fit(first)
    sys.stdout.write(f"{model}\n")
    second = load(2.2, 110, (100, 500), (24, 72), 4)
    real = await drive(target, second, draw.random, lambda _: None)
    _all_answered(real)
    return compare(real, model, second)


def _all_answered(outcomes: Sequence[Outcome]) -> None:
    """A calibration without some of its requests says nothing."""
    failed = [each.error for each in outcomes if not each.ok]
    if failed or any(each.output_tokens < 2 for each in outcomes):
        why = failed[0] if failed else "no usage was told"
        raise SystemExit(f"{len(failed)} of {len(outcomes)} requests failed: {why}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) * 1e3
