"""``xpyd check``: every fault of every document, with file and line."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from xpyd_operator.api.base import GROUP
from xpyd_operator.api.decode import decode_pool
from xpyd_operator.api.load import Document, LoadError, documents
from xpyd_operator.api.recognize import DocumentKind, recognize
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.rule import Target
from xpyd_operator.cli.documents import files, read
from xpyd_operator.errors import Fault, SpecError
from xpyd_operator.render.judge import judge


class Finding(msgspec.Struct, frozen=True):
    """One fault, warning or note."""

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
    faults: tuple[Finding, ...] = ()
    """Why it is refused."""
    warnings: tuple[Finding, ...] = ()
    """What engines of a version of vLLM would not do; followed all the same."""
    notes: tuple[Finding, ...] = ()


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
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the answer")


def run(args: argparse.Namespace) -> int:
    """0: all documents are right; 1: at least one is not, or, if strict, has a warning."""
    target = Target(args.target) if args.target else None
    reports = [report for name in files(args.file) for report in check(name, target)]
    if args.output == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(reports), indent=2).decode() + "\n")
    else:
        for report in reports:
            sys.stdout.write(_text(report))
    return 0 if all(report.ok and not (args.strict and report.warnings) for report in reports) else 1


def check(name: str, target: Target | None) -> list[Report]:
    """Look at every document of a file.

    Raises:
        XpydError: the file cannot be read.
    """
    shown = "<stdin>" if name == "-" else name
    try:
        found = documents(read(name))
    except LoadError as error:
        places = tuple(Finding(error.line, fault.path, fault.message) for fault in error.faults)
        return [Report(file=shown, line=error.line, ok=False, faults=places)]
    return [_check_one(shown, document, target) for document in found]


def _check_one(name: str, document: Document, target: Target | None) -> Report:
    kind = recognize(document.value)
    if kind is DocumentKind.OTHER:
        label = f"{document.value.get('apiVersion')} {document.value.get('kind')}"
        return Report(file=name, line=document.line, ok=True, summary=f"{label} is not of {GROUP}")
    if kind is DocumentKind.POOL:
        return _pool(name, document)
    judgement = judge(document.value, target)
    service = judgement.service
    if service is None or judgement.refusals:
        shape, named = "", ""
    else:
        shape, named = f"{_range(service.spec.prefill)}P{_range(service.spec.decode)}D", service.name
    return Report(
        file=name,
        line=document.line,
        ok=not judgement.refusals,
        kind=kind,
        name=named,
        summary=shape,
        faults=_places(document, judgement.refusals),
        warnings=_places(document, judgement.warnings),
        notes=_places(document, judgement.notes),
    )


def _pool(name: str, document: Document) -> Report:
    try:
        pool = decode_pool(document.value).pool
    except SpecError as error:
        faults = _places(document, error.faults)
        return Report(file=name, line=document.line, ok=False, kind=DocumentKind.POOL, faults=faults)
    return Report(file=name, line=document.line, ok=True, kind=DocumentKind.POOL, name=pool.metadata.name)


def _range(role: RoleSpec) -> str:
    return str(role.min_instances) if role.scaling is None else f"({role.min_instances}-{role.max_instances})"


def _places(document: Document, faults: tuple[Fault, ...]) -> tuple[Finding, ...]:
    places = [Finding(document.line_of(fault.path), fault.path, fault.message) for fault in faults]
    return tuple(sorted(places, key=lambda place: place.line))


def _text(report: Report) -> str:
    where = f"{report.file}:{report.line}"
    lines = [f"{report.file}:{place.line}: {place.path}: {place.message}" for place in report.faults]
    if report.ok:
        words = f"{report.kind} {report.name}: ok" if report.name else f"passed over, {report.summary}"
        shape = f", {report.summary}" if report.name and report.summary else ""
        lines.append(f"{where}: {words}{shape}")
    lines += [f"{report.file}:{place.line}: warning: {place.path}: {place.message}" for place in report.warnings]
    lines += [f"{report.file}:{place.line}: note: {place.path}: {place.message}" for place in report.notes]
    return "".join(f"{line}\n" for line in lines)
