"""The open legs of one request: what was sent to which instance, and how each came to its end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role
from xpyd_sidecar.router.fleet.member import FleetMember
from xpyd_sidecar.router.observing.record import LegRecord, Record
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.asks import Asks
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.upstream.call import Sink, UpstreamCall

if TYPE_CHECKING:
    from xpyd_sidecar.router.observing.spans import Headers, Trace

TRACE_HEADERS = (b"traceparent", b"tracestate")


class OpenAttempt(msgspec.Struct, eq=False):
    """An open leg: its call, the member whose load it is, and what the record says of it."""

    send: mv.SendAttempt
    call: UpstreamCall
    member: FleetMember | None
    record: LegRecord


class OpenAttempts(dict[int, OpenAttempt]):
    """Those of one request, by number."""

    __slots__ = ("_asks", "_context", "_passed", "_record", "trace")

    def __init__(self, context: RequestContext, record: Record, asks: Asks, passed: Headers) -> None:
        """``passed``: headers of the client that engines read."""
        super().__init__()
        self._context = context
        self._record = record
        self._asks = asks
        self._passed = passed
        self.trace: Trace | None = None

    def instances(self) -> list[InstanceName]:
        """Where legs are open."""
        return [leg.send.target.instance for leg in self.values()]

    def to(self, instance: str, incarnation: str) -> Iterable[OpenAttempt]:
        """Those to this incarnation that are open when their turn comes: what happens to one may shut others."""
        for number, leg in list(self.items()):
            target = leg.send.target
            if (target.instance, target.incarnation) == (instance, incarnation) and number in self:
                yield leg

    def hold(self, send: mv.SendAttempt, sink: Sink, reader: EventStream | None) -> OpenAttempt:
        """Open a leg that is yet to be asked; it is a load of its member from now on. ``reader``: see ``Asks.reader``."""
        target = send.target
        member = self._context.leg_opened(target)
        record = LegRecord(send.role, target.instance, send.params.attempt if send.params else 0, perf_counter())
        self._record.legs.append(record)
        call = self._context.pool.hold(target.http, sink, events=reader, tag=send.leg)
        leg = self[send.leg] = OpenAttempt(send, call, member, record)
        return leg

    def ask(self, leg: OpenAttempt, request_id: bytes, body: bytes) -> None:
        """Send the request of a leg. Where spans are made, its own span's context goes in place of the client's."""
        target, passed = leg.send.target, self._passed
        headers = [(b"x-request-id", request_id)]
        if self.trace is not None:
            passed = [header for header in passed if header[0] not in TRACE_HEADERS] + self.trace.leg(leg.record)
        if target.dp_rank is not None:
            headers.append((b"x-data-parallel-rank", b"%d" % target.dp_rank))
        self._context.pool.send(leg.call, self._asks.message(target, headers + passed, body))

    def shut(self, number: int, result: str) -> OpenAttempt | None:
        """A leg has ended so; None where it had before."""
        leg = self.pop(number, None)
        if leg is not None:
            leg.record.ended, leg.record.result = perf_counter(), result
            if leg.member is not None:
                self._context.leg_closed(leg.member)
            self._context.poison.leg_closed()
        return leg

    def cancel(self, leg: OpenAttempt, attempt: int) -> None:
        """Take a leg back that was shut. ``attempt``: see ``farewell``."""
        leg.call.cancel()
        if math.isnan(leg.record.first_at):
            self.farewell(leg, attempt)

    def farewell(self, leg: OpenAttempt, attempt: int) -> None:
        """The engine may not know this leg: its connector would wait for it. ``attempt``: the last one of its transfer:
        prefill may have been asked again meanwhile.
        """
        send = leg.send
        if send.role is Role.DECODE and send.params is not None and not send.target.p2p:
            self._context.farewells.say(send.target, msgspec.structs.replace(send.params, attempt=Attempt(attempt)))
