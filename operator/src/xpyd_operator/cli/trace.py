"""``xpyd trace``: where the time of single requests went, over router, prefill and decode."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from typing import Any

import aiohttp
import msgspec

from xpyd_operator.cli.choose import choose
from xpyd_operator.cli.follow import out
from xpyd_operator.cli.timeline import chrome, text
from xpyd_operator.errors import LocalError, NotFound, XpydError
from xpyd_operator.local import store
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.router import LocalRouter
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.timeline import ASK_MAX, HEADER, PATH, Traces
from xpyd_sidecar.whole_answer import whole

TIMEOUT_S = 10.0
TOKEN = "XPYD_ADMIN_TOKEN"  # noqa: S105 (the name of a variable)
ANSWER_MAX = 16 << 20
"""Bytes of a router's answer."""
PIPE_WIDTH = 160
"""Columns where there is no terminal that has some."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "trace",
        help="show where the time of single requests went",
        description="Timelines of the last requests over router, prefill and decode. WHERE is a service of this host, or "
        "the URL of a router (in a cluster: kubectl port-forward svc/NAME-members 10002), whose admin token is read from "
        f"the variable {TOKEN}.",
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
    url, token = _router(args.where)
    question = f"id {args.id}" if args.id else f"slowest {args.slowest}" if args.slowest else f"last {args.last or 1}"
    traces = asyncio.run(ask(url, token, question))
    if args.output == "json":
        out(json.dumps(chrome(traces)))
    else:
        out(text(traces, shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH))
    return 0 if traces.found else 1


def _router(where: str | None) -> tuple[str, str]:
    """URL and admin token."""
    if where is None or "://" not in where:
        return _local(choose(where))
    token = os.environ.get(TOKEN, "")
    if not token:
        raise XpydError(f"{TOKEN} is not set: python -m xpyd_sidecar.admin_token KEYFILE makes it of a service's key")
    return where.rstrip("/"), token


def _local(folder: ServiceFolder) -> tuple[str, str]:
    settings = store.load_settings(folder)
    port = LocalRouter(folder, settings).admin_port()
    if port is None:
        raise LocalError(f"no router of {folder.service} runs on this host")
    try:
        token = keys.admin_token(keys.read(folder.key))
    except (OSError, ValueError) as error:
        raise LocalError(f"the key of {folder.service}: {error}") from None
    return f"http://{join_host_port(settings.host, port)}", token


async def ask(url: str, token: str, question: str) -> Traces:
    """One question to a router.

    Raises:
        NotFound: it knows of no such request.
        XpydError: it cannot be asked, or its answer cannot be read.
    """
    headers = {"Authorization": f"Bearer {token}", HEADER: question}
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url + PATH, headers=headers, allow_redirects=False) as answer,
        ):
            status, body = answer.status, await whole(answer.content, ANSWER_MAX)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise XpydError(f"{url}{PATH}: {str(error) or type(error).__name__}") from None
    if status == 404:
        raise NotFound(f"{url}: {_words(body)}")
    if status != 200:
        raise XpydError(f"{url}{PATH}: {status} {_words(body)}")
    try:
        return msgspec.json.decode(body, type=Traces)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise XpydError(f"{url}{PATH}: not the answer of a router: {error}") from None


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
