"""The planner beside HPA, static choices and perfect foresight on three loads, and how far the simulation is from real
engines.

    python -m lab bench-planner [--traces FOLDER] [--write] [--parts sinusoid,azure,mooncake,calibration]

FOLDER holds azure_conv_2023.csv.gz and mooncake_conversation.jsonl.gz. Results: bench/results/planner.json, into which each
part is merged as soon as it is done; pictures: docs/pictures/planner-*.svg. Seeds are fixed; only the calibration depends
on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from calibrate import measure_real

from xpyd_operator.cli import report
from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation import study
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.families import sinusoid
from xpyd_operator.simulation.hardware import preset
from xpyd_operator.simulation.trace import Trace, read, scale_trace

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "bench/results/planner.json"
PICTURES = ROOT / "docs/pictures"
TTFT_S, TPOT_S = 3.0, 0.06
BOUNDS = Bounds((1, 16), (1, 12))
SIMULATED = ("sinusoid", "azure", "mooncake")
PARTS = (*SIMULATED, "calibration")


def real(folder: Path, name: str, factor: float) -> Trace:
    """A trace with ``factor`` times its requests."""
    with gzip.open(folder / name, "rt") as lines:
        return scale_trace(read(lines, name), factor, Random(1).random)


def loads(folder: Path | None) -> dict[str, tuple[Callable[[], Trace], str]]:
    """What is replayed, on which engine."""
    folder = folder or Path()
    return {
        "sinusoid": (lambda: sinusoid(Random(1).random), "h200-32b"),
        "azure": (partial(real, folder, "azure_conv_2023.csv.gz", 4.0), "h200-70b-fp8"),
        "mooncake": (partial(real, folder, "mooncake_conversation.jsonl.gz", 2.0), "h200-8b"),
    }


def ceiling(trace: Trace, model: EngineModel) -> float:
    """The share of requests that an idle fleet would answer within the goals: the others' prompts are too long for TTFT."""
    first = (model.prefill_s(each.prompt) + model.handover_s(each.prompt) + model.step_s(1, each.prompt) for each in trace)
    return round(sum(seconds <= TTFT_S for seconds in first) / len(trace), 5)


def measure(name: str, trace: Trace, model: EngineModel, *, write: bool) -> dict[str, Any]:
    """One load: the figures of every choice at equal hours."""
    goals = Goals(ttft_s=TTFT_S, tpot_s=TPOT_S, cold_start_s=model.cold_start)
    begun = time.monotonic()
    found = study.study(trace, model, goals, BOUNDS, tell=lambda words: _say(f"{name}: {words}"), thorough=True)
    _say(report.table(found, TTFT_S, TPOT_S))
    results: dict[str, Any] = {f"requests_{name}": len(trace), f"attainable_{name}": ceiling(trace, model)}
    for choice_name, each in report.rivals(found).items():
        choice = choice_name.replace("+", "_")
        if each is None:
            dear = report.cheapest(found, choice_name)
            results |= {f"attainment_{name}_{choice}": None, f"hours_{name}_{choice}": dear.hours}
            continue
        results |= {
            f"attainment_{name}_{choice}": each.attained, f"hours_{name}_{choice}": each.hours,
            f"changes_per_h_{name}_{choice}": each.changes_per_h, f"detail_{name}_{choice}": each.detail,
        }
    best = results[f"attainment_{name}_foresight"] or 0.0
    results[f"regret_{name}"] = round(max(0.0, best - found.planner.attained), 5)
    results[f"switches_per_h_{name}"] = round(found.planner.switches / (found.planner_run.ends_at / 3600), 2)
    results[f"recommended_{name}"] = found.recommended.choice
    kinds = {"static": found.statics, "hpa": [each for each, _ in found.hpa],
             "hpa_switch": [each for each, _ in found.hpa_switching]}
    for kind, points in kinds.items():
        equal = [each.hours for each in points if each.attained >= found.planner.attained]
        results[f"hours_{name}_{kind}_as_good"] = min(equal, default=None)
    results[f"seconds_{name}"] = round(time.monotonic() - begun, 1)
    if write:
        PICTURES.mkdir(parents=True, exist_ok=True)
        picture = report.picture(f"{name}: the planner and its rivals", found, TTFT_S, TPOT_S)
        (PICTURES / f"planner-{name}.svg").write_text(picture)
    return results


def parts(text: str) -> list[str]:
    """Names of parts; ``simulated`` stands for all that need no engines.

    Raises:
        argparse.ArgumentTypeError: there is none of a name.
    """
    found = [part for name in text.split(",") for part in (SIMULATED if name == "simulated" else (name,))]
    wrong = [name for name in found if name not in PARTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"no part {', '.join(wrong)}; there are {', '.join(PARTS)} and simulated")
    return found


def merged(results: dict[str, Any], path: Path) -> None:
    """Into what the file holds already."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | results, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write every request of the calibration")
    parser.add_argument("--parts", type=parts, default=list(PARTS))
    args = parser.parse_args()
    if args.traces is None and {"azure", "mooncake"} & set(args.parts):
        parser.error("azure and mooncake need --traces FOLDER")
    known = loads(args.traces)
    for name in args.parts:
        load_before = round(os.getloadavg()[0], 2)
        if name == "calibration":
            results: dict[str, Any] = measure_real(args.keep) | {"calibration_load_before": load_before}
        else:
            make, model = known[name]
            results = measure(name, make(), preset(model), write=args.write)
            if name == "sinusoid":
                results["goodput_sinusoid"] = results["attainment_sinusoid_planner"]
        if args.write:
            merged(results, RESULTS)


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
