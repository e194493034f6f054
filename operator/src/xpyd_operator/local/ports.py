"""Ports of this host: which are free for engines, and who holds one that is needed."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection
from pathlib import Path
from random import Random

from xpyd_operator.errors import LocalError
from xpyd_operator.local import procs

FIRST, LAST = 20000, 29999
"""Engines listen here: below Linux' ephemeral range, from which an outgoing connection could take the port meanwhile."""
_LISTEN = "0A"
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")


def is_free(host: str, port: int) -> bool:
    """Whether somebody could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose(host: str, taken: Collection[int], random: Random) -> int:
    """A port for an engine that is free and not promised to another one.

    Raises:
        LocalError: none is.
    """
    first = random.randrange(FIRST, LAST + 1)
    for offset in range(LAST + 1 - FIRST):
        port = FIRST + (first - FIRST + offset) % (LAST + 1 - FIRST)
        if port not in taken and is_free(host, port):
            return port
    raise LocalError(f"no port from {FIRST} to {LAST} of {host} is free for an engine")


def check_address(host: str) -> None:
    """Whether this host has the address.

    Raises:
        LocalError: it has not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise LocalError(f"--host {host}: this host cannot listen there ({error.strerror or error})") from None


def require_free(host: str, port: int, field: str) -> None:
    """A port that the document asks for.

    Raises:
        LocalError: somebody listens there already; says who, where that can be seen.
    """
    if not is_free(host, port):
        holder = who_listens(port)
        by = f" by {holder}" if holder else ""
        raise LocalError(f"{field}: port {port} of {host} is in use{by}; end that or write another port")


def who_listens(port: int) -> str:
    """``name (pid 123)`` of a process that listens on a port; empty where it is another user's."""
    wanted = {inode for table in ("tcp", "tcp6") for inode in _listeners(procs.PROC / "net" / table, port)}
    if not wanted:
        return ""
    for stat in procs.all_processes():
        with contextlib.suppress(OSError):
            for link in os.scandir(procs.PROC / str(stat.pid) / "fd"):
                with contextlib.suppress(OSError):
                    match = _SOCKET.fullmatch(os.readlink(link.path))
                    if match and match[1] in wanted:
                        return f"{_title(stat.pid)} (pid {stat.pid})"
    return ""


def _listeners(table: Path, port: int) -> list[str]:
    """Inodes of the listening sockets of a port. The local address is ``ADDRESS:PORT`` in hexadecimal."""
    try:
        lines = table.read_text("ascii").splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]


def _title(pid: int) -> str:
    try:
        raw = (procs.PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        raw = ""
    return raw if len(raw) <= 80 else f"{raw[:77]}..."
