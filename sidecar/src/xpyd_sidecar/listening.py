"""Listening on all addresses of a machine, whichever families it has.

    ::              one socket for IPv6 and IPv4 where the machine has IPv6; where it has none, 0.0.0.0
    anything else   that address alone

Belongs here: which address to bind, and the option that goes with it. Does not belong here: sockets that accept
(``accepting``), ZMQ's options (``sockets``).

    python -m xpyd_sidecar.listening MODULE ARGUMENT …

becomes ``python -m MODULE ARGUMENT … --host HOST``, for servers that cannot find out by themselves. Where an image lacks
MODULE, what it was called before is taken: so an old vLLM starts, and is refused by its version and not by an import.
Imports nothing but the standard library, since it runs before an engine.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

EVERYWHERE: Final = "::"
_V4: Final = "0.0.0.0"
BEFORE: Final = {"vllm.entrypoints.launchers.api_server.entry": "vllm.entrypoints.openai.api_server"}
"""What a module was called in older versions of its package."""


def bound(host: str) -> str:
    """The address to bind for ``host``."""
    return _V4 if host == EVERYWHERE and not _both() else host


def both_families(listening: socket.socket, host: str) -> None:
    """Before a socket is bound to ``host``: whether it also takes IPv4. Does nothing to one of IPv4."""
    if listening.family == socket.AF_INET6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != EVERYWHERE)


def _both(*, as_made: bool = False) -> bool:
    """Whether this machine has sockets of both families. ``as_made``: by default, without setting an option."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            if as_made and probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
                return False
            both_families(probe, EVERYWHERE)
            probe.bind((EVERYWHERE, 0))
    except OSError:  # the kernel was started without IPv6
        return False
    return True


def installed_name(module: str) -> str:
    """The name of a module in the package that is installed. Its package is looked for and not imported."""
    if module not in BEFORE:
        return module
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    found = any(Path(folder, *parts).with_suffix(".py").is_file() for folder in folders)
    return module if found or not folders else BEFORE[module]


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """What to run so that ``module`` listens everywhere. It sets no option, so the machine's default decides."""
    return [sys.executable, "-m", module, *arguments, "--host", EVERYWHERE if _both(as_made=True) else _V4]


def main(argv: Sequence[str]) -> None:
    """Become the command; the process stays the same."""
    if not argv:
        sys.stderr.write("usage: python -m xpyd_sidecar.listening MODULE ARGUMENT …\n")
        raise SystemExit(2)
    made = command(installed_name(argv[0]), argv[1:])
    os.execv(made[0], made)  # noqa: S606 (the command is ours, and there is no shell)


if __name__ == "__main__":
    main(sys.argv[1:])
