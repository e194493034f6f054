"""``xpyd doctor``: what is wrong with this host or a service, most harmful first, with evidence and what to do."""

from __future__ import annotations

import argparse
import asyncio
from random import Random
from typing import Any, TypeVar

import msgspec

from xpyd_operator.cli.choose import choose
from xpyd_operator.cli.follow import print_answer, to_json
from xpyd_operator.cli.host_facts import host_facts
from xpyd_operator.cli.routers import WHERE, read_of, router_of
from xpyd_operator.doctor.examine import Diagnosis, examine
from xpyd_operator.doctor.finding import any_broken
from xpyd_operator.doctor.reading import Examination, ServiceReading
from xpyd_operator.doctor.worth import words_of
from xpyd_operator.errors import NotFound, XpydError
from xpyd_operator.local import store
from xpyd_operator.local.backend import LocalBackend
from xpyd_operator.local.paths import ServiceFolder
from xpyd_sidecar.contract import sample
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.sample import PackedSample, Sample

FLEET = "/fleet"
_Told = TypeVar("_Told", Fleet, PackedSample)


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what is wrong with this host or a service, and what to do",
        description="What is wrong, most harmful first, with evidence and what to do. Without WHERE this host. "
        f"{WHERE} "
        "Of a service: what does not work, which link or role is short, whether P/D pays, and what the same GPUs would do "
        "as plain engines on the last hour's traffic.",
        epilog="Exit codes: 0 nothing is broken, 1 something is, 2 nobody could be asked.",
    )
    parser.add_argument("where", nargs="?", metavar="WHERE", help="a service of this host, or the URL of a router")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the answer")


def run(args: argparse.Namespace) -> int:
    """0: nothing is broken; 1: something is."""
    diagnosis = examine(asyncio.run(_read(args.where)))
    print_answer(to_json(diagnosis) if args.output == "json" else "\n".join(lines(diagnosis)))
    return 1 if any_broken(diagnosis.findings) else 0


async def _read(where: str | None) -> Examination:
    """Read this host, and a service if one is named. Of a service elsewhere this host says nothing."""
    if where is None:
        return Examination(host_facts())
    url, token = router_of(where)
    elsewhere = "://" in where
    wanted = elsewhere or await _prefill_wanted(choose(where))
    fleet = _decoded(url + FLEET, await read_of(url, token, FLEET), Fleet)
    return Examination(None if elsewhere else host_facts(), ServiceReading(fleet, await _sample(url, token), wanted))


async def _prefill_wanted(folder: ServiceFolder) -> bool:
    """Whether the document in force asks for prefill instances."""
    desired = await LocalBackend(folder, store.load_settings(folder), Random(0)).desired_service()
    return desired.prefill.replicas > 0


async def _sample(url: str, token: str) -> Sample | None:
    try:
        return sample.unpack(_decoded(url + sample.PATH, await read_of(url, token, sample.PATH), PackedSample))
    except NotFound:
        return None  # a router of an earlier version
    except ValueError as error:
        raise XpydError(f"{url}{sample.PATH}: {error}") from None


def _decoded(what: str, body: bytes, kind: type[_Told]) -> _Told:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise XpydError(f"{what}: not the answer of a router: {error}") from None


def lines(diagnosis: Diagnosis) -> list[str]:
    """For people."""
    told = diagnosis.disaggregation
    said = [f"{diagnosis.service}: disaggregating: {told.holds}, {told.message}"] if told is not None else []
    for number, one in enumerate(diagnosis.findings, 1):
        said += ["", f"{number}. {one.what} ({one.level}: {one.name})", *(f"   {words}" for words in one.evidence),
                 f"   → {one.do}"]
    if not diagnosis.findings:
        said.append("nothing is wrong that can be seen from here")
    if diagnosis.compared is not None:
        said += ["", words_of(diagnosis.compared)]
    return said
