"""The plain socket: heartbeats of older engines (``compat: p2p``).

Such engines cannot prove who they are, and one socket cannot speak CURVE and plain: so this is a port of its own, next to
that of membership, and open only where it is asked for. Nothing is answered, since they never read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import zmq

from xpyd_sidecar.contract import p2p
from xpyd_sidecar.contract.ids import ServiceName
from xpyd_sidecar.contract.membership import Heartbeat
from xpyd_sidecar.router.fleet.heartbeat_listener import BeatListener, bind
from xpyd_sidecar.router.fleet.member import FleetMember, Undecodable
from xpyd_sidecar.router.fleet.p2p import Guests
from xpyd_sidecar.router.fleet.pump import Pump

logger = logging.getLogger(__name__)

PORT_AFTER_MEMBERS = 1
"""The port is that of membership and this: 30002 by default."""


class GuestListener(BeatListener):
    """Listens for older engines."""

    what = "heartbeat of an older engine"

    def __init__(self, service: ServiceName, take: Callable[[Heartbeat], int | None], count: Callable[[str], None],
                 members: Callable[[], Iterable[FleetMember]]) -> None:
        """``members``: who is in the roster now."""
        super().__init__(take, count)
        self._guests = Guests(service, members)

    def listen(self, host: str, port: int) -> int:
        """Bind; the port (chosen by the kernel where ``port`` is 0). Raises ConfigError: the address cannot be bound."""
        self._socket = self._context.socket(zmq.ROUTER)
        bound = bind(self._socket, host, port, p2p.MAX_MESSAGE, "router.compat: members_port + 1")
        self._pump = Pump(self._socket, self._on_message)
        logger.warning("engines that nobody can identify may join on port %d (compat: p2p)", bound, extra={"port": bound})
        return bound

    def _read(self, frames: list[zmq.Frame]) -> Heartbeat:
        try:
            beat = p2p.decode(frames[-1].buffer)
        except ValueError as error:
            raise Undecodable(str(error)) from None
        return self._guests.heartbeat(beat)

    def _answer(self, *_: object) -> None:
        """Nothing: older engines never read."""
