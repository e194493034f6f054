"""The open legs of one request: what was sent to which instance, and how each came to its end.

Belongs here: the calls, the load that they are for their members, what the record says of them, and farewells to engines
that may not know of a leg. Does not belong here: what engines are asked (``asks``) and what follows from an answer
(``request``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role
from xpyd_sidecar.router.fleet.roster import Member
from xpyd_sidecar.router.observing.record import LegRecord, Record
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.asks import Asks
from xpyd_sidecar.router.serving.context import Context
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.upstream.call import Call, Sink

if TYPE_CHECKING:
    from xpyd_sidecar.router.observing.spans import Headers, Trace

TRACE_HEADERS = (b"traceparent", b"tracestate")


def traced(headers: Headers, trace: Trace | None, leg: LegRecord) -> Headers:
    """Headers of a leg: where spans are made, with its own span's context in place of the client's."""
    if trace is None:
        return headers
    return [header for header in headers if header[0] not in TRACE_HEADERS] + trace.leg(leg)


class Leg:
    """An open leg: its call, the member whose load it is, and what the record says of it."""

    __slots__ = ("call", "member", "record", "send")

    def __init__(self, send: mv.Send, call: Call, member: Member | None, record: LegRecord) -> None:
        self.send = send
        self.call = call
        self.member = member
        self.record = record


class Legs:
    """Those of one request, by number."""

    __slots__ = ("_asks", "_context", "_open", "_passed", "_record", "trace")

    def __init__(self, context: Context, record: Record, asks: Asks, passed: Headers) -> None:
        self._context = context
        self._record = record
        self._asks = asks
        self._passed = passed
        """Headers of the client that engines read."""
        self._open: dict[int, Leg] = {}
        self.trace: Trace | None = None

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def __getitem__(self, number: int) -> Leg:
        return self._open[number]

    def __iter__(self) -> Iterator[Leg]:
        """Those that are open now: what happens to one may shut others."""
        return iter(tuple(self._open.values()))

    def __bool__(self) -> bool:
        return bool(self._open)

    def instances(self) -> list[InstanceName]:
        """Where legs are open."""
        return [leg.send.target.instance for leg in self._open.values()]

    def to(self, instance: str, incarnation: str) -> Iterable[Leg]:
        """Those to this incarnation that are open when their turn comes."""
        for leg in self:
            target = leg.send.target
            if (target.instance, target.incarnation) == (instance, incarnation) and leg.send.leg in self._open:
                yield leg

    def hold(self, send: mv.Send, sink: Sink, reader: EventStream | None) -> Leg:
        """Open a leg that is yet to be asked; it is a load of its member from now on. ``reader``: see ``Asks.reader``."""
        target = send.target
        member = self._context.leg_opened(target)
        attempt = 0 if send.params is None else send.params.attempt
        record = LegRecord(send.role, target.instance, attempt, perf_counter())
        self._record.legs.append(record)
        call = self._context.pool.hold(target.http, sink, events=reader, tag=send.leg)
        leg = self._open[send.leg] = Leg(send, call, member, record)
        return leg

    def take(self, leg: Leg) -> None:
        """A leg that was opened, asked and counted by others."""
        self._open[leg.send.leg] = leg

    def ask(self, leg: Leg, request_id: bytes, body: bytes) -> None:
        """Send the request of a leg."""
        target = leg.send.target
        headers = [(b"x-request-id", request_id), *self._passed]
        if target.dp_rank is not None:
            headers.append((b"x-data-parallel-rank", b"%d" % target.dp_rank))
        headers = traced(headers, self.trace, leg.record)
        self._context.pool.send(leg.call, self._asks.message(target, headers, body))

    def shut(self, number: int, result: str) -> Leg | None:
        """A leg has ended so; None where it had before."""
        leg = self._open.pop(number, None)
        if leg is not None:
            leg.record.ended, leg.record.result = perf_counter(), result
            if leg.member is not None:
                self._context.leg_closed(leg.member)
            self._context.poison.leg_closed()
        return leg

    def cancel(self, leg: Leg) -> None:
        """Take a leg back that was shut."""
        leg.call.cancel()
        if math.isnan(leg.record.first_at):
            self.farewell(leg)

    def farewell(self, leg: Leg) -> None:
        """The engine may not know this leg: its connector would wait for it. Prefill may have been asked again since."""
        send = leg.send
        if send.role is Role.DECODE and send.params is not None and not send.target.p2p:
            attempt = Attempt(max(one.attempt for one in self._record.legs))
            self._context.farewells.say(send.target, msgspec.structs.replace(send.params, attempt=attempt))
