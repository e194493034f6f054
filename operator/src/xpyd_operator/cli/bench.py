"""``xpyd bench``: drive an OpenAI endpoint and measure TTFT, TPOT, ITL and E2EL."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from random import Random
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from xpyd_operator.cli.follow import print_answer
from xpyd_operator.cli.plot import panels
from xpyd_operator.cli.traces import duration, load_trace, positive, write
from xpyd_operator.errors import XpydError
from xpyd_operator.simulation.trace import UNITS, Arrival, Trace
from xpyd_operator.traffic.drive import TrafficTarget, drive, models
from xpyd_operator.traffic.measures import RequestOutcome, measure, table


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="drive an OpenAI endpoint and measure it",
        description="Send requests at their times, whether or not earlier ones were answered, and measure TTFT, TPOT, ITL "
        "and E2EL as `vllm bench serve` does. Prompts are random token ids of the lengths asked for.",
        epilog="Exit codes: 0 all were answered, 1 some failed, 2 nothing could be measured.",
    )
    parser.add_argument("url", help="of the endpoint, e.g. http://127.0.0.1:10001")
    parser.add_argument("--model", help="default: the one that is served")
    parser.add_argument("--trace", metavar="FILE", help="lengths and times of a trace (CSV or JSON lines, .gz too)")
    parser.add_argument("--time-unit", choices=tuple(UNITS), help="of its times that are numbers (default: s; ms in JSON)")
    parser.add_argument("--rate", type=positive, default=1.0, metavar="R", help="requests a second, Poisson (default 1)")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="how many (default 100), also of a trace")
    parser.add_argument("--input-len", type=int, default=256, metavar="TOKENS", help="prompt length (default 256)")
    parser.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="answer length (default 64)")
    parser.add_argument("--load", type=positive, default=1.0, metavar="F", help="a trace's times divided by F")
    parser.add_argument("--max-len", type=int, default=0, metavar="TOKENS", help="cut lengths so that both fit this")
    parser.add_argument("--vocabulary", type=int, default=1000, metavar="N", help="token ids below N (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft", metavar="DURATION", help="goal, e.g. 3s: shows the share within")
    parser.add_argument("--tpot", metavar="DURATION", help="goal, e.g. 60ms")
    parser.add_argument("--timeout", default="10m", metavar="DURATION", help="deadline of a request (default 10m)")
    parser.add_argument("--json", metavar="FILE", help="write the result, each request included")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (SVG)")


def run(args: argparse.Namespace) -> int:
    """See the epilog. The API key is read from OPENAI_API_KEY."""
    url = args.url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    draw = Random(args.seed)
    requests = fit_lengths(plan_trace(args, draw), args.max_len)
    goals = [duration(each) if each else None for each in (args.ttft, args.tpot)]
    outcomes = asyncio.run(_drive(args, url, requests, draw))
    found = measure(outcomes, ttft_s=goals[0], tpot_s=goals[1])
    print_answer(table(found))
    if args.json:
        write(args.json, msgspec.json.format(msgspec.json.encode({"result": found, "requests": outcomes}), indent=1))
    if args.plot:
        write(args.plot, picture(outcomes).encode())
    return 1 if found.failed else 0


def plan_trace(args: argparse.Namespace, draw: Random) -> Trace:
    """The requests to send, each with its time in seconds and its lengths in tokens.

    Raises:
        XpydError: the trace cannot be read, or a number or length is below 1.
    """
    if args.requests < 1:
        raise XpydError("--requests must be at least 1")
    if args.trace:
        trace = load_trace(args.trace, args.time_unit)[: args.requests]
        return [each._replace(at=each.at / args.load) for each in trace]
    if min(args.input_len, args.output_len) < 1:
        raise XpydError("--input-len and --output-len must be at least 1")
    found, at = [], 0.0
    for _ in range(args.requests):
        found.append(Arrival(at, args.input_len, args.output_len))
        at += draw.expovariate(args.rate)
    return found


def fit_lengths(trace: Trace, most: int) -> Trace:
    """The trace with lengths cut so that prompt and answer fit ``most`` tokens together; 0: as they are."""
    if not most:
        return trace
    if most < 2:
        raise XpydError("--max-len must be at least 2")
    found = []
    for each in trace:
        output = min(each.output, most // 2)
        found.append(Arrival(each.at, min(each.prompt, most - output), output))
    return found


async def _drive(args: argparse.Namespace, url: str, requests: Trace, draw: Random) -> list[RequestOutcome]:
    key = os.environ.get("OPENAI_API_KEY", "")
    served = await models(url, key)
    model = args.model or (served[0] if served else "")
    if model not in served:
        raise XpydError(f"--model {model}: {url} serves {', '.join(served) or 'nothing'}")
    target = TrafficTarget(url, model, key, args.vocabulary, duration(args.timeout))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[failed]} failed"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests), failed=0)
        failed = 0

        def told(outcome: RequestOutcome) -> None:
            nonlocal failed
            failed += not outcome.ok
            progress.update(task, advance=1, failed=failed)

        return await drive(target, requests, draw.random, told)


def picture(outcomes: list[RequestOutcome]) -> str:
    """TTFT, TPOT and open requests over time."""
    good = [each for each in outcomes if each.ok]
    begun = min((each.started for each in outcomes), default=0.0)
    steps = sorted([(each.started, 1) for each in good] + [(each.ended, -1) for each in good])
    level, open_ = 0, []
    for at, change in steps:
        level += change
        open_.append((at - begun, float(level)))
    tpot = [(each.started - begun, each.tpot * 1e3) for each in good if each.tpot is not None and math.isfinite(each.tpot)]
    return panels("xpyd bench", [
        ("TTFT, ms", {"requests": [(each.started - begun, each.ttft * 1e3) for each in good]}),
        ("TPOT, ms", {"requests": tpot}),
        ("open requests", {"open": open_}),
    ], x="seconds")


