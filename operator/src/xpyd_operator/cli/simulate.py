"""``xpyd simulate``: replay a trace against a service and a service level, before any GPU is paid for."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from rich.console import Console

from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.cli import report
from xpyd_operator.cli.documents import load_service
from xpyd_operator.cli.follow import print_answer
from xpyd_operator.cli.instances import instances, rules_of
from xpyd_operator.cli.traces import duration, load_trace, positive, write
from xpyd_operator.errors import XpydError
from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.plan.planner.run import bounds_of, goals_of
from xpyd_operator.plan.planner.worth import RemovalPatience
from xpyd_operator.simulation import families, study
from xpyd_operator.simulation.hardware import GPUS, MODELS, PRESETS
from xpyd_operator.simulation.statics import limits
from xpyd_operator.simulation.trace import UNITS, Trace, scale_trace

LONG = 2
"""A trace is so many times as long as the planner's first removal and a start take, or nothing is to be seen."""


def add_parser(subparsers: Any) -> None:
    """Add the command ``simulate`` and its arguments to the command line of ``xpyd``."""
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace: what planner, HPA and fixed counts would make of it",
        description="Replay a trace on a model of the instances, with xpyd's planner, autoscalers at their best targets, "
        "fixed counts, plain engines and perfect foresight, compared at equal GPU-hours.",
        epilog="Exit codes: 0 done, 2 trace, document or model are wrong.",
    )
    parser.add_argument("trace", help="CSV or JSON lines, .gz too; or a family of traffic, as square:period=18m: "
                        f"{', '.join(families.DEFAULTS)}")
    parser.add_argument("-f", "--file", metavar="FILE", help="a DisaggService: model and sizes, bounds, routers, goals")
    parser.add_argument("--ttft", metavar="DURATION", help="goal for TTFT p95 (default: the document's, else 3s)")
    parser.add_argument("--tpot", metavar="DURATION", help="goal for TPOT p95 (default: the document's, else 60ms)")
    parser.add_argument("--model", metavar="NAME", help=f"{', '.join(MODELS)}, each with -fp8 too, or a hub id (default: "
                        "the document's, else qwen3-8b)")
    parser.add_argument("--gpu", metavar="NAME", help=f"{', '.join(GPUS)} (default: the document's node selector, or h200)")
    parser.add_argument("--tp", metavar="N[,N]", help="tensor-parallel size, of prefill and decode (default: the "
                        "document's, else 1)")
    parser.add_argument("--link", metavar="RATE", help="out of and into an instance, as 100Gb or 12.5GB (default 200Gb)")
    parser.add_argument("--engine", metavar="MODEL", help=f"in their place: {', '.join(PRESETS)}, or a JSON file with the "
                        "figures of an instance")
    parser.add_argument("--load", type=positive, default=1.0, metavar="F", help="F times the requests (default 1)")
    parser.add_argument("--time-unit", choices=tuple(UNITS), help="of times that are numbers (default: s; ms in JSON)")
    parser.add_argument("--cold-start", metavar="DURATION", help="until a new instance serves, or between two, as 2m..5m "
                        "(default: 3m)")
    parser.add_argument("--max", type=int, default=16, metavar="N", help="most of a role, without -f (default 16)")
    parser.add_argument("--seed", type=int, default=1, help="of families, of --load, and of starts that vary (default 1)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (SVG)")


def run(args: argparse.Namespace) -> int:
    """Simulate the trace, and print the comparison as a table or as JSON; with ``--plot``, draw it as SVG, too. Returns 0.

    Raises:
        XpydError: trace, document, engine model or an option is wrong, or a file cannot be read or written.
    """
    service = load_service(args.file, Target.KUBERNETES) if args.file else None
    played = instances(args, service)
    pools = played.pools
    goals, bounds = _asked(args, service, pools.cold_start, alike=pools.are_alike)
    trace = _trace(args)
    _check_length(args.trace, trace, goals)
    console = Console(stderr=True)
    with console.status("") as status:
        found = study.study(
            trace, pools, goals, bounds, tell=lambda words: status.update(f"simulating: {words}"), rules=rules_of(service),
            seed=args.seed)
    ttft_s, tpot_s = limits(goals)
    if args.output == "json":
        told = {"instances": played.words, **report.as_json(found)}
        print_answer(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
    else:
        print_answer(f"{len(trace)} requests in {trace[-1].at / 60:.0f} minutes; {played.words}")
        print_answer(_cached(found.planner_run.cached_tokens, found.planner_run.computed_tokens, trace))
        print_answer(report.table(found, ttft_s, tpot_s))
    if args.plot:
        write(args.plot, report.picture(f"{args.trace}: planner and rivals", found, ttft_s, tpot_s).encode())
    return 0


def _trace(args: argparse.Namespace) -> Trace:
    """The requests to simulate, generated by a family of traffic or read from a file, and multiplied by ``--load``.

    Raises:
        XpydError: there is no such family or file, it cannot be read, or it has no requests.
    """
    if families.is_family(args.trace) and not Path(args.trace).exists():
        trace = families.make_trace(args.trace, args.seed)
        if not trace:
            raise XpydError(f"{args.trace}: no request comes; raise rate or hours")
    elif not Path(args.trace).exists() and not Path(args.trace).suffix:
        raise XpydError(f"{args.trace}: no such file and no such family; there are {', '.join(families.DEFAULTS)}")
    else:
        trace = load_trace(args.trace, args.time_unit)
    return scale_trace(trace, args.load, Random(args.seed).random)


def _check_length(name: str, trace: Trace, goals: Goals) -> None:
    """Refuse a trace in which the planner could hardly act.

    Raises:
        XpydError: ``trace`` is shorter than ``LONG`` times the planner's first removal and one cold start.
    """
    patience = RemovalPatience().seconds(goals.late_cost, goals.cold_start_s)
    least = LONG * (patience + goals.cold_start_s)
    length_s = trace[-1].at if trace else 0.0  # of a short trace --load may leave no request
    if length_s < least:
        raise XpydError(
            f"{name}: {len(trace)} requests in {length_s / 60:.1f} minutes are too short for a planner, whose first "
            f"removal takes {patience / 60:.1f} and a start {goals.cold_start_s / 60:.1f}: give at least {least / 60:.1f} "
            "minutes, or a shorter --cold-start")


def _cached(cached: int, computed: int, trace: Trace) -> str:
    if not any(each.hashes for each in trace):
        return "prefix caches: nothing is known of what prompts share (no hash_ids), so every token is computed"
    return f"prefix caches: {cached / max(1, cached + computed):.1%} of the prompt tokens were there"


def _asked(
    args: argparse.Namespace, service: DisaggService | None, cold_start_s: float, *, alike: bool
) -> tuple[Goals, Bounds]:
    """Latency goals (p95, seconds) and bounds of instance counts: the document's or defaults; ``--ttft``, ``--tpot`` win.

    ``alike``: an instance of one role can take the other.

    Raises:
        XpydError: ``--max`` is below 1, a duration is malformed, or the document leaves no count to choose.
    """
    if args.max < 1:
        raise XpydError("--max must be at least 1")
    goals, bounds = Goals(cold_start_s=cold_start_s), Bounds((1, args.max), (1, args.max))
    if service is not None:
        goals, bounds = goals_of(service, cold_start_s), bounds_of(service)
        if bounds.prefill[0] == bounds.prefill[1] and bounds.decode[0] == bounds.decode[1]:
            raise XpydError(f"{args.file}: nothing is to choose; write scaling (min, max) for prefill or decode")
    ttft = duration(args.ttft) if args.ttft else goals.ttft_s
    tpot = duration(args.tpot) if args.tpot else goals.tpot_s
    if ttft is None and tpot is None:
        ttft, tpot = 3.0, 0.06
    return msgspec.structs.replace(goals, ttft_s=ttft, tpot_s=tpot, switching=goals.switching and alike), bounds
