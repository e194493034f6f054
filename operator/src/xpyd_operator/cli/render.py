"""``xpyd render``: what is generated from the API, and what the operator would make of a document."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from xpyd_operator import __version__
from xpyd_operator.api import crds, reference
from xpyd_operator.api.load import LoadError, documents
from xpyd_operator.api.recognize import DocumentKind, recognize
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.cli.documents import accept_document, files, read
from xpyd_operator.errors import Fault, SpecError, XpydError
from xpyd_operator.render.objects import manifests
from xpyd_operator.render.settings import KubeSettings


class _Plain(yaml.SafeDumper):
    """Writes what stands twice twice, not as an alias."""

    def ignore_aliases(self, _: Any) -> bool:
        """Always."""
        return True


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("render", help="print what is made of a document, the CRDs or the reference")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    pods = what.add_parser("pods", help="every object that the operator would make of a document")
    pods.add_argument(
        "-f", "--file", action="append", required=True, metavar="FILE", help="file, folder, or -; may be repeated"
    )
    pods.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="form of the answer")
    pods.add_argument("-n", "--namespace", help="for documents that name none")
    image = f"xpyd-sidecar:{__version__}"
    pods.add_argument("--sidecar-image", default=image, help=f"the operator's setting (default: {image})")
    pods.add_argument("--operator-namespace", default="xpyd-system", help="where the operator runs (default: xpyd-system)")
    pods.add_argument("--cluster-domain", default="cluster.local", help="the cluster's domain (default: cluster.local)")
    pods.add_argument("--pod-user", choices=("fixed", "assigned"), default="fixed", help="who pods run as (default: fixed)")
    some = what.add_parser("crds", help="the CustomResourceDefinitions")
    some.add_argument("--dir", default="crds", help="folder that gets one file per CRD; - prints them (default: crds)")
    text = what.add_parser("reference", help="the field reference (Markdown)")
    text.add_argument("--file", default="docs/reference.md", help="file to write; - prints (default: docs/reference.md)")
    for each in (some, text):
        each.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is not up to date")


def run(args: argparse.Namespace) -> int:
    """0: written, printed, or up to date; 1: ``--check`` found a file that is not."""
    if args.what == "pods":
        return _pods(args)
    if args.what == "reference":
        texts = {Path(args.file): reference.reference()}
        printed = args.file == "-"
    else:
        texts = {Path(args.dir) / name: crds.to_yaml(crd) for name, crd in crds.crds().items()}
        printed = args.dir == "-"
    if printed:
        sys.stdout.write("---\n".join(texts.values()))
        return 0
    if args.check:
        stale = [file for file, text in texts.items() if _read(file) != text]
        for file in stale:
            sys.stdout.write(f"{file}: not up to date; run `xpyd render {args.what}`\n")
        return 1 if stale else 0
    for file, text in texts.items():
        _write(file, text)
        sys.stdout.write(f"{file}\n")
    return 0


def _pods(args: argparse.Namespace) -> int:
    settings = KubeSettings(
        sidecar_image=args.sidecar_image, cluster_domain=args.cluster_domain, operator_namespace=args.operator_namespace,
        pod_user=args.pod_user,
    )
    names = list(files(args.file))
    services = [service for name in names for service in _services(name, args.namespace)]
    if not services:
        raise XpydError(f"{', '.join(names)}: no DisaggService in it")
    made = [one for service in services for one in manifests(service, settings)]
    if args.output == "json":
        listing = {"apiVersion": "v1", "kind": "List", "items": made}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(listing), indent=2).decode() + "\n")
    else:
        sys.stdout.write(yaml.dump_all(made, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True))
    return 0


def _services(name: str, namespace: str | None) -> Iterator[DisaggService]:
    """The services of a file that can run in Kubernetes; other objects are passed over. Warnings go to stderr.

    Raises:
        SpecError: with every fault and every refusal of a document; each path begins with ``file:line``.
        XpydError: the file cannot be read.
    """
    try:
        found = documents(read(name))
    except LoadError as error:
        raise SpecError(tuple(Fault(f"{name}:{error.line}", fault.message) for fault in error.faults)) from None
    for document in found:
        if recognize(document.value) is not DocumentKind.SERVICE:
            continue
        service = accept_document(name, document, Target.KUBERNETES)
        if service.metadata.namespace is None and namespace is not None:
            metadata = msgspec.structs.replace(service.metadata, namespace=namespace)
            service = msgspec.structs.replace(service, metadata=metadata)
        yield service


def _read(file: Path) -> str | None:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # a file that is missing or cannot be read is not up to date


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    except OSError as error:
        raise XpydError(f"{file}: {error.strerror}") from None
