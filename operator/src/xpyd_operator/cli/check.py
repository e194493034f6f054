"""``xpyd check``: every fault of every document, with file and line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from xpyd_operator.api import devices, judging
from xpyd_operator.api.base import GROUP
from xpyd_operator.api.decode import decode_pool, decode_service
from xpyd_operator.api.load import Document, LoadError, documents
from xpyd_operator.api.recognize import Kind, recognize
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.cli.documents import files, read
from xpyd_operator.errors import Fault, SpecError
from xpyd_operator.render.unsupported import kube_refusals, local_refusals


class Place(msgspec.Struct, frozen=True):
    """One fault or note."""

    line: int
    path: str
    message: str


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was found about one document."""

    file: str
    line: int
    ok: bool
    kind: str = ""
    name: str = ""
    summary: str = ""
    """Wanted instances of a service, or why a document was passed over."""
    faults: tuple[Place, ...] = ()
    notes: tuple[Place, ...] = ()


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("check", help="say what is wrong with documents, without a cluster")
    parser.add_argument(
        "-f", "--file", action="append", required=True, metavar="FILE", help="file, folder, or -; may be repeated"
    )
    parser.add_argument(
        "--for",
        dest="target",
        choices=[str(target) for target in Target],
        help="where it is to run; without this a document is right when one of them can run it",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the answer")


def run(args: argparse.Namespace) -> int:
    """0: all documents are right; 1: at least one is not."""
    target = Target(args.target) if args.target else None
    reports = [report for name in files(args.file) for report in check(name, target)]
    if args.output == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(reports), indent=2).decode() + "\n")
    else:
        for report in reports:
            sys.stdout.write(_text(report))
    return 0 if all(report.ok for report in reports) else 1


def check(name: str, target: Target | None) -> list[Report]:
    """Look at every document of a file.

    Raises:
        XpydError: the file cannot be read.
    """
    shown = "<stdin>" if name == "-" else name
    try:
        found = documents(read(name))
    except LoadError as error:
        places = tuple(Place(error.line, fault.path, fault.message) for fault in error.faults)
        return [Report(file=shown, line=error.line, ok=False, faults=places)]
    return [_check_one(shown, document, target) for document in found]


def _check_one(name: str, document: Document, target: Target | None) -> Report:
    kind = recognize(document.value)
    if kind is Kind.OTHER:
        label = f"{document.value.get('apiVersion')} {document.value.get('kind')}"
        return Report(file=name, line=document.line, ok=True, summary=f"{label} is not of {GROUP}")
    try:
        if kind is Kind.POOL:
            pool = decode_pool(document.value).pool
            return Report(file=name, line=document.line, ok=True, kind=kind, name=pool.metadata.name)
        decoded = decode_service(document.value, target=target)
    except SpecError as error:
        return Report(file=name, line=document.line, ok=False, kind=kind, faults=tuple(_places(document, error.faults)))
    service = decoded.service
    refused, limited = _refused(service, target)
    if refused:
        return Report(file=name, line=document.line, ok=False, kind=kind, faults=tuple(_places(document, refused)))
    notes = tuple(
        Place(document.line_of(fault.path), fault.path, f"not for {only}: {fault.message}")
        for only, fault in (*decoded.notes, *limited)
    )
    said = [*judging.notes(service), *devices.notes(service)]
    notes += tuple(Place(document.line_of(fault.path), fault.path, fault.message) for fault in said)
    shape = f"{_range(service.spec.prefill)}P{_range(service.spec.decode)}D"
    return Report(file=name, line=document.line, ok=True, kind=kind, name=service.name, summary=shape, notes=notes)


def _refused(service: DisaggService, target: Target | None) -> tuple[tuple[Fault, ...], tuple[tuple[str, Fault], ...]]:
    """What the backends cannot do: faults, and notes that say where it is so.

    Hosts differ: what only a host without GPUs refuses is a note. Without a target, only what both refuse is a fault.
    """
    kube = _as_faults(kube_refusals(service))
    local = _as_faults(local_refusals(service, gpus=1))
    bare = tuple(("a host without GPUs", one) for one in _as_faults(local_refusals(service, gpus=0)) if one not in local)
    if target is Target.KUBERNETES:
        return kube, ()
    if target is Target.LOCAL:
        return local, bare
    both = tuple(one for one in kube if one in local)
    only = [(str(Target.KUBERNETES), one) for one in kube if one not in both]
    only += [(str(Target.LOCAL), one) for one in local if one not in both]
    return both, tuple(only)


def _as_faults(refusals: Iterable[tuple[str, str]]) -> tuple[Fault, ...]:
    return tuple(Fault(path, reason) for path, reason in refusals)


def _range(role: RoleSpec) -> str:
    return str(role.least) if role.scaling is None else f"({role.least}-{role.most})"


def _places(document: Document, faults: tuple[Fault, ...]) -> list[Place]:
    places = [Place(document.line_of(fault.path), fault.path, fault.message) for fault in faults]
    return sorted(places, key=lambda place: place.line)


def _text(report: Report) -> str:
    where = f"{report.file}:{report.line}"
    lines = [f"{report.file}:{place.line}: {place.path}: {place.message}" for place in report.faults]
    if report.ok:
        words = f"{report.kind} {report.name}: ok" if report.name else f"passed over, {report.summary}"
        shape = f", {report.summary}" if report.name and report.summary else ""
        lines.append(f"{where}: {words}{shape}")
    lines += [f"{report.file}:{place.line}: note: {place.path}: {place.message}" for place in report.notes]
    return "".join(f"{line}\n" for line in lines)
