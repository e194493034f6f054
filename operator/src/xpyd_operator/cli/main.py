"""``xpyd``: finds the subcommand, runs it, and turns errors into a message and an exit code.

    0    done
    1    the answer is no: ``check`` found faults, ``status`` a service that is not ready …
    2    the command could not be carried out: wrong usage, a document that is wrong, a port that is taken …
    130  ended by Ctrl-C

A subcommand is a module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``. Only the one
that is asked for is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from xpyd_operator import versions
from xpyd_operator.errors import XpydError

COMMANDS: dict[str, str] = {
    "up": "run a service as processes of this host, or change the one that runs",
    "status": "show what runs on this host",
    "logs": "print logs of a service of this host",
    "trace": "show where the time of single requests went",
    "doctor": "say what is wrong with this host or a service, and what to do",
    "down": "drain and stop a service of this host",
    "join": "add an engine of this host to a service on another one",
    "bench": "drive an OpenAI endpoint and measure it",
    "simulate": "replay a trace: what planner, HPA and fixed counts would make of it",
    "keys": "make client keys for tenants, and check their document",
    "check": "say what is wrong with documents, without a cluster",
    "render": "print what is made of a document, the CRDs or the reference",
}
"""Subcommands (modules of this package) with one line of help each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``xpyd``; the result is the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        versions.check()
        args = _parse(arguments)
        code: int = _module(args.command).run(args)
        sys.stdout.flush()
    except XpydError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"xpyd: {line}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone (`xpyd status | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xpyd", description="vLLM, disaggregated into prefill and decode")
    parser.add_argument("--version", action=_SayVersion, nargs=0,
                        help="say the version, and whether compiled parts are used")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        if name == asked:
            _module(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser.parse_args(arguments)


class _SayVersion(argparse.Action):
    """``--version``: asks the sidecar package how it was built, which takes a moment."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(versions.describe())
        parser.exit()


def _module(name: str) -> Any:
    return importlib.import_module(f"xpyd_operator.cli.{name}")


if __name__ == "__main__":
    sys.exit(main())
