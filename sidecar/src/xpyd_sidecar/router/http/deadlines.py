"""How long a client may take: to send a request, to read its answer, to go."""

from __future__ import annotations

IDLE_S = 75.0
"""How long a connection may lie idle between requests."""
IDLE_LEAVING_S = 1.0
"""The same for a connection without any request yet when the server has stopped listening: one may be on its way."""
UNREAD_S = 60.0
"""How long a client may leave bytes unread before it counts as gone."""
LINGER_S = 3.0
"""How long a closed connection may take to send its last bytes and to see the client's end."""
SLOWEST_BODY = 100_000
"""Bytes a second that a large body must come with, beyond the time that every request has. So few that clients far away
can send; where there is no room for all, a body must come ten times as fast (``http.body_budget.PRESSED``).
"""


def receive_s(least_s: float, length: int) -> float:
    """How long a request may take to come. ``least_s``: what every request has; ``length``: bytes of its body."""
    return least_s + length / SLOWEST_BODY


def idle_s(*, leaving: bool) -> float:
    """How long a connection may lie idle. ``leaving``: the server has stopped listening."""
    return IDLE_LEAVING_S if leaving else IDLE_S
