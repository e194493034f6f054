"""Options that ZMQ sockets of several parts share.

Belongs here: what has a reason worth writing down once. Does not belong here: keys (``curve``), messages.
"""

from __future__ import annotations

from typing import Any

import zmq


def find_dead(socket: zmq.Socket[Any], seconds: float) -> None:
    """Have the kernel end connections whose other side is gone without a word, after about ``seconds``.

    Unacknowledged data ends a connection after this time (TCP_USER_TIMEOUT, RFC 5482), keepalive probes end one on which
    nothing is sent. Nobody is woken for it, while ZMQ's own pings cost both sides an encrypted message each.
    """
    third = max(1, round(seconds / 3))
    socket.setsockopt(zmq.TCP_MAXRT, round(1000 * seconds))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, third)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, third)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
