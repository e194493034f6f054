"""``GET /trace``: timelines of the last requests, with what the engines have noted of them.

The engines are asked when somebody asks, over their control sockets, from a thread of its own: the router goes on serving,
and pays nothing otherwise. One question at a time; an engine that does not answer in time is named.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import zmq

from xpyd_sidecar.contract.ids import TRANSFER_ID, HostPort, InstanceName, TransferId
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.timeline import ASK_MAX, HEADER, Clock, TracedAnswer, TraceQuery, Traces
from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.messages import Reject
from xpyd_sidecar.process import curve
from xpyd_sidecar.router.api.faults import HttpFault, bad_request, unavailable
from xpyd_sidecar.router.http.reply import HttpRequest, LaterReply, Reply, RequestHandler
from xpyd_sidecar.router.observing import timeline
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.observing.timeline import EngineNotes
from xpyd_sidecar.router.serving.context import RequestContext

logger = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
"""How long engines are waited for, all together."""
TRIES: Final = 4
"""Exchanges by which an engine's clock is put beside ours; the quickest counts."""
ENGINES_MAX: Final = 64
ANSWER_MAX: Final = 16 << 20
_JSON: Final = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]


def select_requests(header: bytes, recent: Sequence[Record]) -> tuple[list[Record], tuple[TransferId, ...]]:
    """Requests that a question is about (``last N``, ``slowest N`` or ``id WORD``; the last one where nothing is said), and
    transfers to ask engines for. Raises HttpFault: 400, with what would be right; 404, nothing is known of it.
    """
    which, _, word = (header.decode("latin-1").strip() or "last 1").partition(" ")
    word = word.strip()
    if which in {"last", "slowest"} and word.isdecimal() and len(word) < 10 and 0 < int(word) <= ASK_MAX:
        records = timeline.select(recent, which, int(word))
    elif which == "id" and word:
        records = [record for record in recent if word in {record.request_id, record.transfer}][-1:]
        if not records and TRANSFER_ID.fullmatch(word):
            return [], (TransferId(word),)
        if not records:
            raise HttpFault(404, f"no request {word} among the last {len(recent)} of this router", kind="NotFoundError",
                            code="unknown_request")
    else:
        words = f"{HEADER}: last N, slowest N (N at most {ASK_MAX}) or id WORD, not {header[:80]!r}"
        raise bad_request(words, code="bad_trace")
    return records, tuple(record.transfer for record in records)


class Tracer:
    """Answers ``/trace``; who may ask is the caller's business."""

    def __init__(self, context: RequestContext, key: ServiceKey) -> None:
        self._context = context
        self._key = key
        self._task: asyncio.Task[None] | None = None

    def open(self, request: HttpRequest, reply: Reply) -> RequestHandler:
        """Begin to answer. Raises HttpFault: it is wrong, nothing is known of it, or another one is being answered."""
        records, transfers = select_requests(request.headers.get(HEADER.encode(), b""), self._context.observer.recent)
        if self._task is not None and not self._task.done():
            raise unavailable("another trace is being made")
        answering = LaterReply(reply)
        self._task = self._context.loop.create_task(self._answer(answering, records, transfers))
        return answering

    async def close(self) -> None:
        """Answer no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _answer(self, answering: LaterReply, records: Sequence[Record], transfers: tuple[TransferId, ...]) -> None:
        context = self._context
        went = {leg.instance for record in records for leg in record.legs}
        engines = [(address, member.name) for member in context.roster.members() for address in member.control
                   if member.name in went or len(records) < len(transfers)][:ENGINES_MAX]
        gone = went - {name for _, name in engines}
        try:
            heard, silent = await asyncio.to_thread(ask, self._key, dict(engines), transfers) if transfers else ([], {})
            silent |= dict.fromkeys(gone, "it is gone")
            known = {record.transfer for record in records}
            others = [timeline.of_transfer(transfer, heard) for transfer in transfers if transfer not in known]
            lines = [timeline.of_request(record, heard) for record in records]
            lines += [line for line in others if line is not None]
            answer = Traces(context.service, context.name, len(context.observer.recent), tuple(lines),
                            tuple(Clock(one.told.instance, round(one.within_s, 6)) for one in heard), silent)
        except Exception:
            logger.exception("a trace could not be made")
            if not answering.gone:
                answering.reply.fault(HttpFault(500, "the trace could not be made; the router's log says why"))
            return
        if not answering.gone:
            answering.reply.send_whole(200, _JSON, msgspec.json.encode(answer))


def ask(key: ServiceKey, engines: Mapping[HostPort, InstanceName], transfers: tuple[TransferId, ...],
        deadline_s: float = ANSWER_S) -> tuple[list[EngineNotes], dict[str, str]]:
    """What engines have noted of transfers, and those that do not say. Blocks for ``deadline_s`` at most."""
    context: zmq.Context[Any] = zmq.Context()
    exchanges: dict[zmq.Socket[Any], ClockExchange] = {}
    silent: dict[str, str] = {}
    try:
        poller = zmq.Poller()
        for address, name in engines.items():
            sock = context.socket(zmq.DEALER)
            for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, ANSWER_MAX), (zmq.IPV6, 1)):
                sock.setsockopt(option, value)
            curve.connect(sock, key, "control")
            try:
                sock.connect(f"tcp://{address}")
            except zmq.ZMQError as error:
                silent[name] = f"control address {address}: {error}"
                continue
            poller.register(sock, zmq.POLLIN)
            exchanges[sock] = ClockExchange(name, sock, transfers)
            exchanges[sock].ask()
        end = time.monotonic() + deadline_s
        while any(one.open for one in exchanges.values()) and (left := end - time.monotonic()) > 0:
            for sock, _ in poller.poll(1 + int(1000 * left)):
                exchanges[sock].receive()
        silent |= {one.name: one.problem or f"no answer within {deadline_s:g} s" for one in exchanges.values()
                   if one.heard is None}
        return [one.heard for one in exchanges.values() if one.heard is not None], silent
    finally:
        context.destroy(linger=0)


class ClockExchange:
    """One engine: a few empty questions, by which its clock is known, then the real one. Within one host clocks agree."""

    def __init__(self, name: InstanceName, sock: zmq.Socket[Any], transfers: tuple[TransferId, ...]) -> None:
        self.name = name
        self.open = True
        self.problem = ""
        self.heard: EngineNotes | None = None
        self._sock = sock
        self._transfers = transfers
        self._left = TRIES
        self._asked_at = 0.0
        self._best = (float("inf"), 0.0)
        """Half of the quickest exchange, and what it says of the clock."""

    def ask(self) -> None:
        """Ask once more."""
        self._asked_at = time.monotonic()
        self._sock.send_multipart(messages.pack(TraceQuery(() if self._left > 1 else self._transfers)))

    def receive(self) -> None:
        """Take the engine's answer to the latest question, and ask the next one."""
        parts = self._sock.recv_multipart()
        now = time.monotonic()
        told = _told(parts)
        if isinstance(told, str):
            self.open, self.problem = False, told
            return
        half = (now - self._asked_at) / 2
        self._best = min(self._best, (half, told.now - (now - half)))
        self._left -= 1
        if self._left:
            self.ask()
            return
        self.open = False
        here = abs(told.clock - (time.time() - time.monotonic())) < timeline.SAME_HOST_S
        self.heard = EngineNotes(told, 0.0, 0.0) if here else EngineNotes(told, self._best[1], self._best[0])


def _told(parts: Sequence[bytes]) -> TracedAnswer | str:
    """What an engine has noted, or why nobody knows."""
    try:
        version = messages.prefix(parts[0]).version
        if version != messages.WIRE_VERSION:
            return f"control wire version {messages.WIRE_VERSION} here, {version} there"
        told = messages.unpack(parts[-1])
    except messages.MessageError as error:
        return str(error)
    if isinstance(told, TracedAnswer):
        return told
    return f"it answers with {type(told).__name__}" + (f": {told.reason}" if isinstance(told, Reject) else "")
