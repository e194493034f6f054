"""``xpyd trace``: where the time of single requests went, over router, prefill and decode."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from typing import Any

import msgspec

from xpyd_operator.cli.follow import print_answer
from xpyd_operator.cli.routers import WHERE, read_of, router_of
from xpyd_operator.cli.timeline import chrome, text
from xpyd_operator.errors import XpydError
from xpyd_sidecar.contract.timeline import ASK_MAX, HEADER, PATH, Traces

PIPE_WIDTH = 160
"""Columns where there is no terminal that has some."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "trace",
        help="show where the time of single requests went",
        description=f"Timelines of the last requests over router, prefill and decode. {WHERE}",
        epilog="Exit codes: 0 shown, 1 there was no request yet, 2 no such request, or nobody could be asked.",
    )
    parser.add_argument("where", nargs="?", metavar="WHERE", help="not needed where there is one service on this host")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=_number, metavar="N", help=f"the last N requests (default 1, at most {ASK_MAX})")
    which.add_argument("--slowest", type=_number, metavar="N", help="the N with the greatest TTFT of those remembered")
    which.add_argument("--id", metavar="ID", help="the one with this request id or transfer id")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text",
                        help="json: Chrome's trace events, for https://ui.perfetto.dev")


def _number(word: str) -> int:
    if not word.isdecimal() or not 0 < int(word) <= ASK_MAX:
        raise argparse.ArgumentTypeError(f"a number from 1 to {ASK_MAX}, not {word!r}")
    return int(word)


def run(args: argparse.Namespace) -> int:
    """0: shown; 1: there is none."""
    url, token = router_of(args.where)
    question = f"id {args.id}" if args.id else f"slowest {args.slowest}" if args.slowest else f"last {args.last or 1}"
    traces = asyncio.run(ask(url, token, question))
    if args.output == "json":
        print_answer(json.dumps(chrome(traces)))
    else:
        print_answer(text(traces, shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH))
    return 0 if traces.found else 1


async def ask(url: str, token: str, question: str) -> Traces:
    """One question to a router.

    Raises:
        NotFound: it knows of no such request.
        XpydError: it cannot be asked, or its answer cannot be read.
    """
    body = await read_of(url, token, PATH, {HEADER: question})
    try:
        return msgspec.json.decode(body, type=Traces)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise XpydError(f"{url}{PATH}: not the answer of a router: {error}") from None
