"""Reading documents from files, folders and standard input: what ``check`` and ``up`` share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from xpyd_operator.api.load import Document, LoadError, documents
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import RelativePath
from xpyd_operator.errors import Fault, SpecError, XpydError
from xpyd_operator.render.judge import judge

ENDINGS = (".yaml", ".yml", ".json")


def files(names: list[str]) -> Iterator[str]:
    """File names, folders replaced by the YAML and JSON files in them; ``-`` is standard input.

    Raises:
        XpydError: no such file, or a folder without any.
    """
    for name in names:
        path = Path(name)
        if name != "-" and path.is_dir():
            inside = sorted(str(file) for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())
            if not inside:
                raise XpydError(f"{name}: no file in it ends with {', '.join(ENDINGS)}")
            yield from inside
        elif name != "-" and not path.exists():
            raise XpydError(f"{name}: no such file")
        else:
            yield name


def read(name: str) -> str:
    """The text of a file, or of standard input (``-``).

    Raises:
        LoadError: it is no UTF-8 text.
        XpydError: it cannot be read.
    """
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadError(raw.count(b"\n", 0, error.start) + 1, "is not YAML: not UTF-8 text") from None
    except OSError as error:
        raise XpydError(f"{name}: {error.strerror}") from None


def load_service(name: str, target: Target | None = Target.LOCAL, *, gpus: int = 1) -> DisaggService:
    """The one DisaggService of a file. A source beside the document becomes an absolute path. Warnings go to stderr.

    Raises:
        SpecError: with every refusal; each path begins with ``file:line``.
        XpydError: the file cannot be read.
    """
    try:
        found = documents(read(name))
    except LoadError as error:
        raise SpecError(tuple(Fault(f"{name}:{error.line}", fault.message) for fault in error.faults)) from None
    if len(found) > 1:
        message = f"has {len(found)} documents; write one DisaggService per file"
        raise SpecError((Fault(f"{name}:{found[1].line}", message),))
    service = accept_document(name, found[0], target, gpus=gpus)
    return _absolute(service, Path.cwd() if name == "-" else Path(name).resolve().parent)


def accept_document(name: str, document: Document, target: Target | None, *, gpus: int = 1) -> DisaggService:
    """The service of a document that is judged to be right. Warnings go to stderr.

    Raises:
        SpecError: with every refusal; each path begins with ``file:line``.
    """
    judgement = judge(document.value, target, gpus=gpus)
    warn(locate_fault(name, document, fault) for fault in judgement.warnings)
    try:
        return judgement.accepted_service()
    except SpecError as error:
        raise SpecError(tuple(locate_fault(name, document, fault) for fault in error.faults)) from None


def warn(warnings: Iterable[Fault]) -> None:
    """Say warnings where they mix with nothing that a program reads."""
    for one in warnings:
        sys.stderr.write(f"xpyd: warning: {one}\n")


def locate_fault(name: str, document: Document, fault: Fault) -> Fault:
    """The fault with file and line before its path."""
    return Fault(f"{name}:{document.line_of(fault.path)}: {fault.path}", fault.message)


def _absolute(service: DisaggService, folder: Path) -> DisaggService:
    spec, origin = service.spec, service.spec.model.origin
    adapters = tuple(
        msgspec.structs.replace(each, source=str((folder / each.source).resolve())) if each.source.startswith(".") else each
        for each in spec.adapters
    )
    model = spec.model
    if isinstance(origin, RelativePath):
        model = msgspec.structs.replace(model, source=str((folder / origin.path).resolve()))
    return msgspec.structs.replace(service, spec=msgspec.structs.replace(spec, model=model, adapters=adapters))
