"""``xpyd simulate``: replay a trace against a service and a service level, before any GPU is paid for."""

from __future__ import annotations

import argparse
from random import Random
from typing import Any

import msgspec
from rich.console import Console

from xpyd_operator.api.rule import Target
from xpyd_operator.cli import report
from xpyd_operator.cli.documents import load_service
from xpyd_operator.cli.follow import out
from xpyd_operator.cli.traces import duration, load_model, load_trace, positive, write
from xpyd_operator.errors import XpydError
from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.plan.planner.run import bounds_of, goals_of
from xpyd_operator.simulation import study
from xpyd_operator.simulation.engine import PRESETS
from xpyd_operator.simulation.trace import Trace, scaled, sinusoid

SYNTHETIC = "sinusoid"


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace: what planner, HPA and fixed counts would make of it",
        description="Replay a trace on a model of one instance, with xpyd's planner, Kubernetes' HPA at its best targets, "
        "every fixed choice and perfect foresight, and recommend xPyD.",
        epilog="Exit codes: 0 done, 2 trace, document or model are wrong.",
    )
    parser.add_argument("trace", help=f"CSV or JSON lines, .gz too; or {SYNTHETIC}, two hours from prefill-heavy to "
                        "decode-heavy and back")
    parser.add_argument("-f", "--file", metavar="FILE", help="a DisaggService: its bounds, limits, planner and goals")
    parser.add_argument("--ttft", metavar="DURATION", help="goal for TTFT p95 (default: the document's, else 3s)")
    parser.add_argument("--tpot", metavar="DURATION", help="goal for TPOT p95 (default: the document's, else 60ms)")
    parser.add_argument("--engine", default="h200-8b", metavar="MODEL",
                        help=f"{', '.join(PRESETS)}, or a JSON file with the fields of one (default h200-8b)")
    parser.add_argument("--load", type=positive, default=1.0, metavar="F", help="F times the requests (default 1)")
    parser.add_argument("--cold-start", metavar="DURATION", help="until a new instance serves (default: the model's)")
    parser.add_argument("--max", type=int, default=16, metavar="N", help="most of a role, without -f (default 16)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (SVG)")


def run(args: argparse.Namespace) -> int:
    """See the epilog."""
    model = load_model(args.engine)
    if args.cold_start:
        model = msgspec.structs.replace(model, cold_start=duration(args.cold_start))
    draw = Random(args.seed).random
    trace: Trace = sinusoid(draw) if args.trace == SYNTHETIC else load_trace(args.trace)
    trace = scaled(trace, args.load, draw)
    goals, bounds = _asked(args, model.cold_start)
    console = Console(stderr=True)
    with console.status("") as status:
        found = study.study(trace, model, goals, bounds, tell=lambda words: status.update(f"simulating: {words}"))
    ttft_s, tpot_s = study.limits(goals)
    if args.output == "json":
        out(msgspec.json.format(msgspec.json.encode(report.as_json(found)), indent=1).decode())
    else:
        out(f"{len(trace)} requests in {trace[-1].at / 60:.0f} minutes")
        out(report.table(found, ttft_s, tpot_s))
    if args.plot:
        write(args.plot, report.picture(f"{args.trace}: planner and rivals", found, ttft_s, tpot_s).encode())
    return 0


def _asked(args: argparse.Namespace, cold_start_s: float) -> tuple[Goals, Bounds]:
    """From the document, and from arguments where they say more."""
    if args.max < 1:
        raise XpydError("--max must be at least 1")
    goals, bounds = Goals(cold_start_s=cold_start_s), Bounds((1, args.max), (1, args.max))
    if args.file:
        service = load_service(args.file, Target.KUBERNETES)
        goals, bounds = goals_of(service, cold_start_s), bounds_of(service)
        if bounds.prefill[0] == bounds.prefill[1] and bounds.decode[0] == bounds.decode[1]:
            raise XpydError(f"{args.file}: nothing is to choose; write scaling (min, max) for prefill or decode")
    ttft = duration(args.ttft) if args.ttft else goals.ttft_s
    tpot = duration(args.tpot) if args.tpot else goals.tpot_s
    if ttft is None and tpot is None:
        ttft, tpot = 3.0, 0.06
    return msgspec.structs.replace(goals, ttft_s=ttft, tpot_s=tpot), bounds
