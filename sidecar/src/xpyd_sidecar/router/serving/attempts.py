"""What a request asks of engines, and its open legs: what was sent to which instance, and how each came to its end.

The two forms of what is asked are ``generation.Generation`` (completions and chats, whose streams the router reads) and
``generation.Passthrough`` (everything else, whose answers pass through). All else about a request is the same for both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role
from xpyd_sidecar.router.api.bodies import GenerationRequest, RequestHash, hash_of
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.labels import Labels, labels_of
from xpyd_sidecar.router.api.spending import ExpectedTokens, taken_tokens
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.fleet import first_bytes
from xpyd_sidecar.router.fleet.member import EngineTarget, Pair
from xpyd_sidecar.router.http.reply import ReplyConnection
from xpyd_sidecar.router.http.wire import lines_of
from xpyd_sidecar.router.observing.record import HELD, SILENT, LegRecord, Record
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving import waiting
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.outlier_watch import Blamed
from xpyd_sidecar.router.serving.tenancy import TenantRequest
from xpyd_sidecar.router.stream import answers
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.replay_recorder import FirstToken
from xpyd_sidecar.router.upstream.call import BodySender, UpstreamCall

if TYPE_CHECKING:
    from xpyd_sidecar.router.observing.spans import Trace

TRACE_HEADERS = (b"traceparent", b"tracestate")
STREAM_STALL_S = 3.0
"""Silence of a stream after which its engine is probed: one that was told to end may leave streams open, and fails that."""
Headers = list[tuple[bytes, bytes]]


class GoesOn(mv.ResumableStream, Protocol):
    """An answer that may go on elsewhere, for who carries that out."""

    def on_refused(self) -> None:
        """An engine answered 4xx."""

    def resume(self) -> tuple[str, int]:
        """It goes on elsewhere: in which way, and how many tokens the client has."""

    def on_first_token(self, token: FirstToken, streams: Iterable[EventStream | None]) -> None:
        """Prefill's token goes to the client; ``streams`` read the other legs."""


class Asks(ABC):
    """Of one request."""

    skips: str = ""
    """Why it goes without prefill: a field, or a rule; empty where it does not, or never would."""
    api: str = ""
    """The name of its API where it generates; empty where it does not, and then it is no generation request."""
    path: str = ""
    """Its path, of the router's table, where its answer passes through; else empty."""
    stream: bool = False
    """Whether its answer is to come in events."""
    once: bool = False
    """Whether its body can be sent to one engine alone."""
    opaque: bool = False
    """Whether nobody but its client knows what its answer means: an error event cannot be put behind it."""
    speaks: bool = False
    """Whether the client gets prefill's token."""
    prompt: Raw = Raw(b"")
    """As the client wrote it; empty where there is none."""
    cuts: str = ""
    """What engines are told that prefixes of its prompt are called; empty: nothing."""
    passed_on: tuple[bytes, ...]
    """Names of the client's headers that engines read."""
    pulled: bool = False
    """KV has been moved for it, or that was tried (``pulls``)."""
    held: bool = False
    """It has been held for somebody who was expected (``hold``)."""
    generating: bool = False
    """Whether a model writes its answer."""
    wakes: bool = False
    """Whether it may start instances where none runs (``fleet.standby``)."""
    waited_s: float = 0.0
    """How long it has waited, held or in the queue."""
    priority: int = 0
    """Within its key's band."""
    tokens: ExpectedTokens = ExpectedTokens()
    """What it counts for in its key's share."""
    tenancy: TenantRequest | None = None
    """Whose it is, where keys are those of tenants."""
    _hash: RequestHash | None = None
    _labels: Labels | None = None

    def __init__(self, kind: str, model: str | None, fields: Mapping[str, Raw]) -> None:
        """``fields``: of its JSON body, as the client wrote them, and ``model`` the one they name. ``kind``: what makes
        its hash together with them.
        """
        self.model = model
        self.fields = fields
        self._kind = kind

    @property
    def generates(self) -> GenerationRequest | None:
        """The completion or chat that it is; None: it is neither."""
        return None

    @property
    def decode_only(self) -> bool:
        """Whether decode does all of it."""
        return bool(self.skips)

    def weighed_tokens(self, tokens: int) -> int:
        """What so many tokens count for where requests wait: less where its tenant has a larger weight."""
        return tokens if self.tenancy is None else -(-tokens // self.tenancy.tenant.weight)

    @property
    def unread(self) -> bool:
        """Whether part of its body has not come, so that the next request cannot be found behind it."""
        return False

    @property
    def still_comes(self) -> bool:
        """Whether its client is sending it, and no engine keeps it from that."""
        return False

    @property
    def resumable_stream(self) -> GoesOn | None:
        """What the client has of an answer that may go on elsewhere; None where it cannot."""
        return None

    def request_hash(self) -> RequestHash:
        """Equal for all requests that ask for the same work. Made when it is needed."""
        if self._hash is None:
            self._hash = hash_of(self._kind, self.fields)
        return self._hash

    def labels(self) -> Labels:
        """What it has in common with others. Made when they are needed."""
        if self._labels is None:
            self._labels = labels_of(self._kind, self.model, self.fields, self.prompt)
        return self._labels

    @abstractmethod
    def leg(self, send: mv.SendAttempt, lines: bytes, *, speaks: bool) -> bytes:
        """The whole HTTP request of a leg, with these lines in its head; the head alone, where ``body`` has a sender.

        ``speaks``: prefill's token goes to the client.
        """

    def reserves(self, body: int) -> int:  # noqa: ARG002 (of most that are asked)
        """Bytes that it may hold beside its body of ``body`` bytes until its answer has begun, and as far as can be said,
        then.
        """
        return 0

    @property
    def keeps(self) -> int:
        """Bytes that are kept of it beside its body, once its answer has begun."""
        return 0

    def body(self, refuse: Callable[[HttpFault], None]) -> BodySender | None:  # noqa: ARG002 (a form's alone)
        """Who sends the body of the next leg while it comes; None: it is in the message. ``refuse`` hears what is wrong."""
        return None

    @abstractmethod
    def reader(self, role: Role, *, framed: bool, speaks: bool) -> EventStream | None:
        """What reads the answer of the next leg; None where it is wanted whole."""

    def failure(self) -> str:
        """What an engine says in an answer, which is whole, of its failure; empty where it says none."""
        return ""

    @abstractmethod
    def lengths(self) -> tuple[int, int] | None:
        """``(prompt tokens, generated tokens)`` of what was relayed; None where nothing was read of it."""


class OpenAttempt(msgspec.Struct, eq=False):
    """An open leg: its call, and what the record says of it."""

    send: mv.SendAttempt
    call: UpstreamCall
    record: LegRecord
    tokens: int = 0
    """About how many its prompt has, where it is computed there before its first byte; 0 once that has come."""
    uncached: int = 0
    """Of those, that are not believed to be cached there."""
    cached: int = 0
    """And that were believed to be, when it was sent."""
    ahead: int = 0
    """Those that were there before."""

    @property
    def begun(self) -> bool:
        """Whether the first byte of its answer has come."""
        return not math.isnan(self.record.first_at)


class OpenAttempts(dict[int, OpenAttempt]):
    """Those of one request, by number."""

    __slots__ = ("_asks", "_blamed", "_context", "_key", "_lines", "_passed", "_prefilled_at", "_record", "picks",
                 "relaying", "sent", "trace")

    def __init__(self, context: RequestContext, record: Record, asks: Asks, passed: Headers, key: str) -> None:
        """``passed``: headers of the client that engines read; the last one may be Via, with this router in it. ``key``:
        whose request it is.
        """
        self._context = context
        self._record = record
        self._asks = asks
        self._passed = passed
        via = b"" if passed and passed[-1][0] == b"via" else b"via: %b\r\n" % context.via
        self._lines = b"x-request-id: %b\r\n%b" % (record.request_id.encode(), via)
        """Of the head of every leg; those of the client's headers go behind it."""
        self._key = key
        self._blamed: list[Blamed] = []
        self._prefilled_at = -math.inf  # when the prompt's KV was computed
        self.picks: Selection | None = None
        """Who chose where its legs go."""
        self.sent: dict[Role, EngineTarget] = {}
        """Where the last leg of each role went."""
        self.relaying: UpstreamCall | None = None
        """Of the leg whose answer goes to the client as it comes."""
        self.trace: Trace | None = None

    def instances(self) -> list[InstanceName]:
        """Where legs are open."""
        return [leg.send.target.instance for leg in self.values()]

    def attempts_on(self, instance: str, incarnation: str) -> Iterable[OpenAttempt]:
        """Attempts on this incarnation, one by one, each if it is still open: what happens to one may shut others."""
        for number, leg in list(self.items()):
            target = leg.send.target
            if (target.instance, target.incarnation) == (instance, incarnation) and number in self:
                yield leg

    def ask(self, send: mv.SendAttempt, call: UpstreamCall, *, speaks: bool) -> None:
        """Send a leg, which is a load of its member from now on. Where spans are made, its own span's context goes in place
        of the client's.
        """
        target, passed, context = send.target, self._passed, self._context
        context.leg_opened(target)
        self.sent[send.role] = target
        record = LegRecord(send.role, target.instance, send.params.attempt if send.params else 0, perf_counter())
        self._record.legs.append(record)
        tokens = self._record.prompt_size if send.role is Role.PREFILL or send.params is None else 0
        picks = self.picks
        uncached = picks.uncached_tokens(target.instance) if tokens and picks is not None else tokens
        if picks is not None and picks.stays:
            context.observer.metrics.count_skipped_rest(uncached)
        self[send.leg] = OpenAttempt(send, call, record, tokens, uncached, tokens - uncached,
                                      target.member.queued_tokens)
        target.member.queued_tokens += tokens
        target.member.uncached_tokens += uncached
        target.member.sent_tokens += uncached
        lines = self._lines
        if target.dp_rank is not None:
            lines += lines_of(target.rank_headers())
        if self.trace is not None:
            passed = [header for header in passed if header[0] not in TRACE_HEADERS] + self.trace.leg(record)
        if passed:
            lines += lines_of(passed)
        context.pool.send(call, partial(self._asks.leg, send, lines, speaks=speaks))

    def on_answer(self, leg: OpenAttempt, body: bytes = b"") -> None:
        """The first byte of a leg's answer has come, or all of the answer: ``body``."""
        member = leg.send.target.member
        member.heard_at = self._context.loop.time()
        if leg.send.role is Role.PREFILL:
            self._prefilled_at = member.heard_at
            if self._context.picker.holdings is not None and (actual := answers.cached_tokens(body)) >= 0:
                estimate, told = self._record.prompt_size, answers.prompt_tokens(body)
                # By the prompt's length as the engine tells it: the estimate's own error is none of what is held.
                predicted = leg.cached * told // estimate if told > 0 and estimate > 0 else leg.cached
                self._context.observer.metrics.count_cached_tokens(predicted, actual)
        if self._asks.tenancy is not None and (leg.send.role is Role.PREFILL or leg.send.params is None):
            self._record.cached_tokens = answers.cached_tokens(body)
            self._asks.tenancy.note_prefill_usage(body)
        _computed(leg)

    def handed_over(self) -> tuple[GenerationRequest, Pair] | None:
        """As ``InFlightRequest``'s."""
        record, sent, request = self._record, self.sent, self._asks.generates
        straight = record.outcome == "ok" and record.attempt == 1 and not (record.retries or record.skips)
        if straight and request is not None and sent.keys() == set(Role):
            return request, Pair(sent[Role.DECODE], sent[Role.PREFILL])
        return None

    def probe_silent(self, now: float, awake: float) -> None:
        """Have the engines probed that were silent for long. ``awake``: nobody was before."""
        for leg in list(self.values()):
            bound = min(waiting.STALL_S, STREAM_STALL_S) if leg.call is self.relaying else waiting.STALL_S
            if now - max(leg.call.last_at, awake) > bound:
                self._context.watch.request_probe(leg.send.target)

    def on_left(self, leg: OpenAttempt) -> None:
        """A leg was to be left for another one, since it was silent. It was not, where it is open still."""
        if leg.send.leg not in self:
            leg.record.result = SILENT
            self.blame(leg, "it was silent")

    def blame(self, leg: OpenAttempt, why: str) -> None:
        """A leg failed, and its instance may be to blame."""
        self._context.outliers.on_failed(leg.send.target)
        self._blamed.append((leg.send.role, leg.send.target, why))

    def on_over(self, connection: ReplyConnection) -> None:
        """The request is over. ``connection``: of its client."""
        record, asks, context = self._record, self._asks, self._context
        used = taken_tokens(asks.tokens, record.prompt_tokens, record.tokens, whole=record.outcome == "ok",
                            sent=bool(record.legs))
        context.line.on_over(self._key, asks.weighed_tokens(asks.tokens.total), asks.weighed_tokens(used))
        if asks.tenancy is not None and record.outcome != HELD:
            asks.tenancy.end(context.loop.time(), record)
        if record.api and record.tokens >= 0 and record.outcome == "ok":
            context.answers.learn(record.tokens)
        context.lengths.learn(asks.prompt, record.prompt_tokens)
        self._context.outliers.on_over(self._record, self.sent, self._blamed,
                                       lambda: (self._asks.request_hash(), self._key, connection.server.source(connection)))

    def silent(self, now: float, awake: float) -> list[OpenAttempt]:
        """Those that gave nothing for too long and are better elsewhere; who gave nothing for too long is suspected.

        ``awake``: nobody was silent before. A decode leg that waits for prefill says nothing of decode.
        """
        outliers, out = self._context.outliers, []
        waits = any(leg.send.role is Role.PREFILL for leg in self.values())
        for leg in self.values():
            send, call, since = leg.send, leg.call, awake
            member = send.target.member
            member.heard_at = max(member.heard_at, call.heard_at)
            times, moves, pause = outliers.first_bytes, call is self.relaying, 0.0
            if member.hung and not leg.begun:
                out.append(leg)
                continue
            if leg.begun:
                since, pause = max(since, call.heard_at), first_bytes.PAUSE_S
            elif send.role is Role.DECODE and send.params is not None:
                if waits:
                    continue
                since, moves = max(since, call.asked_at, self._prefilled_at), self._record.stream
            else:
                since, moves = max(since, call.asked_at), self._record.stream or send.role is Role.PREFILL
            if self._record.api:
                member.work_since = min(member.work_since, since)
            if now - since <= first_bytes.FLOOR_S:
                continue  # nearly always
            ahead = max(leg.ahead, member.load.waiting * times.usual_tokens)
            if now - since > times.bound_s(leg.tokens + ahead) + pause:
                outliers.suspect(send.target)
                if moves:
                    out.append(leg)
        return out

    def shut(self, number: int, result: str) -> OpenAttempt | None:
        """A leg has ended so; None where it had before."""
        leg = self.pop(number, None)
        if leg is not None:
            leg.record.ended, leg.record.result = perf_counter(), result
            self._context.leg_closed(leg.send.target)
            _computed(leg)
            if leg.call is self.relaying:
                self.relaying = None
        return leg

    def cancel(self, leg: OpenAttempt, attempt: int) -> None:
        """Take a leg back that was shut. ``attempt``: see ``send_cancel_notice``."""
        leg.call.cancel()
        if math.isnan(leg.record.first_at):
            self.send_cancel_notice(leg, attempt)

    def send_cancel_notice(self, leg: OpenAttempt, attempt: int) -> None:
        """Tell decode that this leg will not come: the engine may not know it, and its connector would wait.

        ``attempt``: the last one of its transfer, since prefill may have been asked again meanwhile.
        """
        send = leg.send
        if send.role is Role.DECODE and send.params is not None:
            self._context.cancel_notices.send(send.target, msgspec.structs.replace(send.params, attempt=Attempt(attempt)))


def _computed(leg: OpenAttempt) -> None:
    """Its prompt is not waited for any more."""
    member = leg.send.target.member
    member.queued_tokens -= leg.tokens
    member.uncached_tokens -= leg.uncached
    leg.tokens = leg.uncached = 0
