"""``xpyd render``: what is generated from the API."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from xpyd_operator.api import crds, reference
from xpyd_operator.errors import XpydError


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("render", help="write the CRDs or the reference")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    some = what.add_parser("crds", help="the CustomResourceDefinitions")
    some.add_argument("--dir", default="crds", help="folder that gets one file per CRD; - prints them (default: crds)")
    text = what.add_parser("reference", help="the field reference (Markdown)")
    text.add_argument("--file", default="docs/reference.md", help="file to write; - prints (default: docs/reference.md)")
    for each in (some, text):
        each.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is not up to date")


def run(args: argparse.Namespace) -> int:
    """0: written, printed, or up to date; 1: ``--check`` found a file that is not."""
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
