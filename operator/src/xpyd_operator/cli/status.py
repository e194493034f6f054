"""``xpyd status``: what runs, in a table or as JSON, live on request."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from xpyd_operator.cli.choose import add_name, choose
from xpyd_operator.cli.follow import print_answer, to_json
from xpyd_operator.cli.table import render
from xpyd_operator.local.view import Viewer

REFRESH_S = 1.0
PIPE_WIDTH = 200
"""Columns where there is no terminal that has some."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "status", help="show what runs on this host", epilog="Exit codes: 0 ready, 1 not ready, 2 no such service."
    )
    add_name(parser)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="form of the answer")
    parser.add_argument("-w", "--watch", action="store_true", help="go on until Ctrl-C; JSON: one object per line")


def run(args: argparse.Namespace) -> int:
    """0: ready; 1: not ready."""
    viewer = Viewer(choose(args.name))
    return asyncio.run(_watch(viewer, args.output) if args.watch else _once(viewer, args.output))


async def _once(viewer: Viewer, output: str) -> int:
    snapshot = await viewer.take_snapshot(time.time())
    if output == "json":
        print_answer(to_json(snapshot))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        console.print(render(snapshot))
    return 0 if snapshot.ready else 1


async def _watch(viewer: Viewer, output: str) -> int:
    with Live(auto_refresh=False) as live:
        while True:
            snapshot = await viewer.take_snapshot(time.time())
            if output == "json":
                print_answer(" ".join(to_json(snapshot).split()))
            else:
                live.update(render(snapshot), refresh=True)
            await asyncio.sleep(REFRESH_S)
