"""A router's HTTP connections to engines, which are kept and reused, with one request at a time on each.

When a reused connection ends before the first byte of an answer, the engine is taken to have closed it while it was idle,
and the request is sent once more, on a fresh connection: an engine that had read it would have begun to answer or would
still hold the connection. So idle connections are kept until engines close them (uvicorn after 5 s), ``IDLE_S`` at most.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import HostPort, split_host_port
from xpyd_sidecar.process import resources
from xpyd_sidecar.process.patience import Alarm, timeout_with_grace
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.api.paths import PATHS
from xpyd_sidecar.router.fleet.member import EngineTarget
from xpyd_sidecar.router.http.wire import request_bytes
from xpyd_sidecar.router.upstream.call import EngineConnection, Sink, UpstreamCall

CONNECT_S = 5.0
LACKING_S = 0.25
LACKING_TRIES = 16
"""How often a connection is tried, and how long after one another, that this process has no file, port or memory for."""
IDLE_S = 60.0
IDLE_MAX = 512
"""Idle connections kept per address."""


class EnginePool:
    """Opens, reuses and closes all connections of one router process to its engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.calls: set[UpstreamCall] = set()
        self.connections: set[EngineConnection] = set()
        self._idle: dict[HostPort, deque[EngineConnection]] = {}
        self.most = math.inf
        """Connections beyond which idle ones are closed before another is opened."""
        self.lacks = resources.Complaint("no connection to an engine")

    def send(self, call: UpstreamCall, make: Callable[[], bytes]) -> None:
        """Send a call's request. ``make`` builds its bytes, and is called again where the request is sent again.

        No method of the call's sink is called before this has returned.
        """
        self.calls.add(call)
        call.make, call.asked_at = make, self.loop.time()
        idle = self._idle.get(call.address) if call.body is None else None
        while idle:
            connection = idle.pop()
            if connection.open:
                connection.reused = True
                connection.serve(call)
                return
        call.connect()

    async def connect(self, call: UpstreamCall) -> None:
        """Open a connection for a call and send its request there. Where that fails, ``on_failed`` of its sink is called:
        ``LACKING`` where this process has no file, port or memory for a connection, else ``REFUSED``.
        """
        try:
            async with timeout_with_grace(CONNECT_S):
                connection = await self._connected(call)
        except TimeoutError:
            failed = FailureKind.REFUSED, FailureReason(f"no connection within {CONNECT_S:g} s")
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and resources.is_own_lack(error):
                self.lacks.add(error)
                failed = FailureKind.LACKING, FailureReason(resources.words(error))
            else:
                failed = FailureKind.REFUSED, FailureReason("cannot connect", f"{call.address}: {error}")
        else:
            call.connecting = None
            connection.serve(call)
            return
        call.connecting = None
        call.detach().on_failed(call, *failed)

    async def _connected(self, call: UpstreamCall) -> EngineConnection:
        host, port = split_host_port(call.address)
        tries = LACKING_TRIES if call.patient else 1
        while True:
            self.make_room()
            try:
                _, connection = await self.loop.create_connection(lambda: EngineConnection(self, call.address), host, port)
            except OSError as error:
                tries -= 1
                if not tries or not resources.is_own_lack(error):
                    raise
                self.lacks.add(error)
                await asyncio.sleep(LACKING_S)
            else:
                return connection

    def make_room(self) -> None:
        """Close the connections that have been idle for longest until fewer than ``most`` are open, so that another one
        may be opened. Connections in use are never closed.
        """
        while len(self.connections) >= self.most:
            oldest = min((idle for idle in self._idle.values() if idle), key=lambda idle: idle[0].last_at, default=None)
            if oldest is None:
                return
            connection = oldest.popleft()
            self.connections.discard(connection)
            connection.drop()

    def release(self, connection: EngineConnection, address: HostPort) -> None:
        """Take back a connection whose answer is complete: it is kept for the next request to ``address``, or closed
        where the engine has closed it or ``IDLE_MAX`` are idle.
        """
        idle = self._idle.get(address)
        if idle is None:
            idle = self._idle[address] = deque()
        if connection.open and len(idle) < IDLE_MAX:
            if connection.paused:
                connection.read(True)
            idle.append(connection)
        else:
            connection.drop()

    def forget(self, connection: EngineConnection, address: HostPort) -> None:
        """Remove a connection that is closed."""
        self.connections.discard(connection)
        idle = self._idle.get(address)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def sweep(self) -> None:
        """Close connections that have been idle for longer than ``IDLE_S`` seconds; to be called every second."""
        oldest = self.loop.time() - IDLE_S
        for address in list(self._idle):
            idle = self._idle[address]
            while idle and idle[0].last_at < oldest:
                idle.popleft().drop()
            if not idle:
                del self._idle[address]

    def close(self) -> None:
        """Close every connection and cancel the calls that are open, whose sinks are not told."""
        for call in list(self.calls):
            call.cancel()
        for connection in list(self.connections):
            connection.drop()
        self._idle.clear()


logger = logging.getLogger(__name__)

ANSWER_S: Final = 5.0
OPEN_MAX: Final = 256
"""Notices without an answer. Beyond it none is sent: ``claim_s`` is there for those."""


class CancelNotices(Sink):
    """Tells decode engines of requests that this router process has cancelled and that they may not have read yet.

    The router cancels a decode request by closing its connection. An engine whose core has the request aborts it, and its
    connector drops what prefill sends. But the request may not have got so far: the front end had not read it, had not
    begun to generate, or refused the body before vLLM looked at what it is for. Then the connector does not know that it
    will not come, and prefill holds the KV until ``claim_s`` is over.

    So the engine is sent a notice: a request with the same ``kv_transfer_params`` that every vLLM refuses, since it asks
    for -1 tokens. vLLM tells the connector of a decode request that it refuses (``contract.legs.REMOTE``), which then
    drops the transfer. An engine that did know the request takes the notice for a repetition.
    """

    def __init__(self, loop: AbstractEventLoop, pool: EnginePool) -> None:
        self._loop = loop
        self._pool = pool
        self._open: set[UpstreamCall] = set()

    def __len__(self) -> int:
        """Notices that are sent and not answered."""
        return len(self._open)

    def send(self, target: EngineTarget, leg: legs.Leg) -> None:
        """Tell the engine at ``target`` that the decode request with ``leg`` is cancelled. Returns at once, and does not
        report what becomes of the notice, which is given up after ``ANSWER_S``. Nothing is sent while ``OPEN_MAX`` notices
        are unanswered.
        """
        if len(self._open) >= OPEN_MAX:
            return
        body = json.dumps({"prompt": [0], "max_tokens": -1, legs.FIELD: legs.encode(leg)}).encode()
        call = UpstreamCall(self._pool, target.http, self)
        request = request_bytes(b"POST", PATHS["completions"], target.http, target.rank_headers(), body)
        self._pool.send(call, lambda: request)
        self._open.add(call)
        Alarm(self._loop, self._loop.time() + ANSWER_S, partial(self._late, call))

    def _late(self, call: UpstreamCall) -> None:
        if call in self._open:
            self._open.discard(call)
            call.cancel()

    # ---- call.Sink

    def on_whole(self, call: UpstreamCall, body: bytes) -> None:
        """The engine has answered a notice. It should be a refusal: a success is logged."""
        self._open.discard(call)
        if call.head is not None and call.head.status < 300:
            logger.warning("%s took a request for -1 tokens: %s", call.address, body[:200].decode(errors="replace"))

    def on_failed(self, call: UpstreamCall, kind: FailureKind, reason: FailureReason) -> None:
        """A notice did not arrive. It is not sent again: an engine that is gone needs none."""
        self._open.discard(call)
        logger.debug("no farewell to %s: %s %s", call.address, kind, reason.full)
