"""What is set on a stripe's socket, and what of this machine holds windows back.

Nothing is set that ends the kernel's own growth of a connection's window (SO_SNDBUF and SO_RCVBUF do).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

WINDOW_LEAST: Final = 4 << 20
"""Bytes of one connection's window that no log complains of: with four of them 16 GB/s over a round trip of 1 ms."""
SETTINGS: Final = Path("/proc/sys/net/ipv4")


def tune(sock: socket.socket) -> None:
    """Set a stripe's socket up."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # not connected yet, or a kernel without reno: only slower on loopback
        if sock.getpeername()[0] in {"127.0.0.1", "::1"}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def limits(settings: Path = SETTINGS) -> list[str]:
    """Settings of the kernel that hold windows back, each with what it is. Those that cannot be read hold nothing back."""
    found = []
    for name in ("tcp_rmem", "tcp_wmem"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # not shown to this process
            most = int((settings / name).read_text().split()[2])
            if most < WINDOW_LEAST:
                found.append(f"net.ipv4.{name} allows {most} bytes of a connection")
    for name in ("tcp_moderate_rcvbuf", "tcp_window_scaling"):
        with contextlib.suppress(OSError, ValueError):
            if not int((settings / name).read_text()):
                found.append(f"net.ipv4.{name} is off")
    return found


@functools.cache
def complain() -> None:
    """Say once in the log what holds windows back; called when the first stripe begins."""
    if found := limits():
        logger.warning("xpyd: KV over TCP is held back between nodes: %s; %d bytes, or more, are right for fast networks",
                       "; ".join(found), WINDOW_LEAST)
