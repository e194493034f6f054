"""TCP ports of this host: which are free for engines, and which process holds one that is needed."""

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
    """Whether a process could now listen on the TCP port at this address of the host."""
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
    """A free TCP port from ``FIRST`` to ``LAST`` for an engine, not one of ``taken``; the search begins at a random one.

    Raises:
        LocalError: no such port is free.
    """
    first = random.randrange(FIRST, LAST + 1)
    for offset in range(LAST + 1 - FIRST):
        port = FIRST + (first - FIRST + offset) % (LAST + 1 - FIRST)
        if port not in taken and is_free(host, port):
            return port
    raise LocalError(f"no port from {FIRST} to {LAST} of {host} is free for an engine")


def check_address(host: str) -> None:
    """Check that this host can listen at the address ``host``.

    Raises:
        LocalError: it cannot; the message says why.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise LocalError(f"--host {host}: this host cannot listen there ({error.strerror or error})") from None


def require_free(host: str, port: int, field: str) -> None:
    """Check that a TCP port which the document asks for, in ``field``, is free.

    Raises:
        LocalError: it is in use; the message names the process that listens there, where that can be seen.
    """
    if not is_free(host, port):
        holder = who_listens(port)
        by = f" by {holder}" if holder else ""
        raise LocalError(f"{field}: port {port} of {host} is in use{by}; end that or write another port")


def who_listens(port: int) -> str:
    """The process that listens on a TCP port, as ``command line (pid 123)``; empty where there is none, or it may not be
    seen since it is another user's.
    """
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
    """Inode numbers of the sockets that listen on a port, from a table such as /proc/net/tcp, in which the local address
    is ``ADDRESS:PORT`` in hexadecimal (proc(5)).
    """
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
