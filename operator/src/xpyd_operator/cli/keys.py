"""``xpyd keys``: make client keys, their digests, and look at documents of tenants (``xpyd_sidecar.contract.tenants``)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from xpyd_operator.errors import XpydError
from xpyd_sidecar.contract import keys as service_keys
from xpyd_sidecar.contract import tenants
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.tenants import DocumentFault, Tenant

EPILOG = """\
xpyd keys new search --tokens-per-minute 200000 > search.json     shows the key, once; the file gets the tenant's entry
xpyd keys digest < KEY                                            the digest of a key that `new` made
xpyd keys digest --key-file SERVICE_KEY < KEY                     of any other key, under the key of its service
xpyd keys check keys.json                                         what is wrong with a document, or who is in it
"""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("keys", help="make client keys for tenants, and check their document", epilog=EPILOG,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    new = what.add_parser("new", help="a key for a tenant, on stderr, and the entry of the tenant, on stdout")
    new.add_argument("name", metavar="NAME", help="the tenant's")
    new.add_argument("--tokens-per-minute", type=int, metavar="N", help="default: not bounded")
    new.add_argument("--tokens-per-day", type=int, metavar="N", help="default: not bounded")
    new.add_argument("--in-flight", type=int, metavar="N", help="requests at a time (default: not bounded)")
    new.add_argument("--model", action="append", default=[], metavar="MODEL", help="may be repeated (default: all)")
    digest = what.add_parser("digest", help="the digest that stands for a key, which is read from stdin")
    digest.add_argument("--key-file", metavar="FILE", help="the service's key, for a key that `xpyd keys new` did not make")
    check = what.add_parser("check", help="what is wrong with a document of tenants")
    check.add_argument("file", metavar="FILE", help="the document")


def run(args: argparse.Namespace) -> int:
    """0: printed, or in order; 1: ``check`` found a fault."""
    if args.what == "new":
        return _new(args)
    return _digest(args) if args.what == "digest" else _check(args)


def _new(args: argparse.Namespace) -> int:
    key = tenants.new_key()
    one = Tenant(args.name, (tenants.digest_of(key),), args.tokens_per_minute, args.tokens_per_day, args.in_flight,
                 tuple(args.model))
    entry = tenants.encode(one)
    try:
        tenants.decode(f'{{"tenants": [{entry}]}}')
    except DocumentFault as error:
        raise XpydError(str(error).replace("tenants[0] ", "tenant ", 1)) from None
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(f"{entry}\n")
    return 0


def _digest(args: argparse.Namespace) -> int:
    key = sys.stdin.read().strip()
    if not key or len(key.split()) > 1 or not key.isascii() or not key.isprintable():
        raise XpydError("stdin: one key is wanted, of characters that a header can carry")
    try:
        sys.stdout.write(f"{tenants.digest_of(key, _service(args.key_file))}\n")
    except ValueError as error:
        raise XpydError(f"{error}: --key-file FILE") from None
    return 0


def _service(path: str | None) -> ServiceKey | None:
    if path is None:
        return None
    try:
        return service_keys.read(Path(path))
    except OSError as error:
        raise XpydError(f"--key-file: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise XpydError(f"--key-file: {error}") from None


def _check(args: argparse.Namespace) -> int:
    try:
        text = Path(args.file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise XpydError(f"{args.file}: {error}") from None
    try:
        found = tenants.decode(text)
    except DocumentFault as error:
        sys.stdout.write(f"{args.file}: {error}\n")
        return 1
    sys.stdout.write(f"{args.file}: {len(found)} tenants\n")
    return 0
