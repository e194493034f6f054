"""Requests of one connection that wait behind the one that is being answered (pipelining).

Laws
  * Nothing more is answered, nor read, while a client leaves its answers unread: what is held for it is a write buffer and
    one read.
  * A connection answers ``ANSWERS`` requests in one turn of the loop; then other connections have theirs.
"""

from __future__ import annotations

from collections import deque

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.body_budget import BodyBudget
from xpyd_sidecar.router.http.holding import Held
from xpyd_sidecar.router.http.reply import HttpRequest

MAX_QUEUED = 16
"""Pipelined requests held while one is answered; reading stops beyond it, or beyond MAX_QUEUED_BYTES."""
MAX_QUEUED_BYTES = 1 << 20
ANSWERS = 8
"""Pipelined requests that one connection has answered in a turn of the loop."""


class PipelineQueue(deque[tuple[HttpRequest, Held, bool, bool] | HttpFault]):
    """Each request with its body as the budget has it, whether its answer is the connection's last, and whether its client
    speaks HTTP/1.0; or what is wrong with the next one.
    """

    @property
    def full(self) -> bool:
        """Whether nothing more is to be read behind these."""
        if len(self) > MAX_QUEUED:
            return True
        return sum([len(entry[0].body) for entry in self if not isinstance(entry, HttpFault)]) > MAX_QUEUED_BYTES

    def give_back(self, bodies: BodyBudget) -> None:
        """Nobody answers them any more."""
        for entry in self:
            if not isinstance(entry, HttpFault):
                bodies.give_back(entry[1])
        self.clear()
