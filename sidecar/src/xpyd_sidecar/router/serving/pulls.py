"""KV of the turns before, moved from the decode instance that has it to the prefill instance of the next turn.

Prefill never sees what decode answers, so it would compute every answer again with the next turn. Decode holds it, and both
have a connector that sends and receives: two legs with exchanged roles move it, by the protocol that all KV moves by.

    request ──picked: P, D──▶ worth it? ──no──▶ served
                                │ yes                ▲
             prefill's leg to D, decode's leg to P   │ whatever became of it, within ``LIMIT_S``
             over all messages but the new ones ─────┘

Worth it: decode, which tells what it holds, holds so many more tokens than prefill that prefill would compute for longer
than pulls usually take, while nobody waits there.

Laws
  * A request has one pull at most, before it is served, and is served whatever became of it; with the same pair if that can
    still be picked.
  * What a pull moves is checked and paired as all KV is: what does not arrive is computed.
  * Pulls are bounded: ``MOST`` a router, ``MOST_OF_ONE`` a decode instance, ``LIMIT_S`` each. After ``FAILURES`` in a row
    there are none for ``PAUSE_S``: a chat template that takes no list of messages which ends with an answer is no reason to
    ask for it with every turn.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.process.patience import Alarm
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason, HttpFault, unavailable
from xpyd_sidecar.router.api.paths import PATHS
from xpyd_sidecar.router.balance.candidates import FEW_TOKENS, backlog
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.fleet.member import EngineTarget, Pair
from xpyd_sidecar.router.http.reply import Reply, RequestHandler
from xpyd_sidecar.router.http.wire import request_bytes
from xpyd_sidecar.router.upstream.call import Sink, UpstreamCall
from xpyd_sidecar.router.upstream.pool import CancelNotices, EnginePool

LEAST_TOKENS: Final = 1024
"""That decode holds and prefill does not: for less no pull is worth its two requests."""
GAIN: Final = 1.5
"""Prefill must have to compute for this many times as long as a pull usually takes."""
USUAL_S: Final = 0.1
"""How long a pull takes, while nothing is known."""
KEEP: Final = 0.8
"""Of what is known of that, at each pull."""
LIMIT_S: Final = 3.0
MOST: Final = 64
MOST_OF_ONE: Final = 4
FAILURES: Final = 3
PAUSE_S: Final = 600.0
_STATES: Final = "-s"
"""In the fingerprint of a model with states, which stand at their own places in a prompt."""


class Pulls:
    """All pulls of one router."""

    def __init__(self, pool: EnginePool, cancel_notices: CancelNotices, count: Callable[[str], None]) -> None:
        """``count`` hears how each ended: ``ok``, ``failed``, ``late`` or ``gone``."""
        self.pool, self.cancel_notices = pool, cancel_notices
        self._count = count
        self._running: set[Pull] = set()
        self._of: dict[tuple[InstanceName, Incarnation], int] = {}
        """Pulls that run, by decode instance."""
        self._usual_s = USUAL_S
        self._failures = 0
        self._paused_until = -math.inf

    def __len__(self) -> int:
        """Pulls that run."""
        return len(self._running)

    def plan(self, request: bodies.GenerationRequest | None, picks: Selection) -> Pull | None:
        """A pull for a request that is about to be served; None: none is worth it. Where it looks at a pair, ``picks``
        gives that pair next.
        """
        now = self.pool.loop.time()
        if (request is None or request.api != "chat" or picks.holdings is None or picks.tokens < LEAST_TOKENS
                or not bodies.may_end_with_answer(request) or len(self) >= MOST or now < self._paused_until):
            return None
        pair = picks.first_pair()
        if pair is None or pair.prefill is None or _STATES in pair.decode.fingerprint:
            return None
        there, here = picks.held_bytes(pair.decode.instance), picks.held_bytes(pair.prefill.instance)
        tokens = picks.tokens * (there - here) // len(picks.prefix)
        prefill, tells = pair.prefill.member, pair.decode.member.prefixes_seq > 0
        least = max(LEAST_TOKENS, GAIN * self._usual_s * prefill.computed_per_s)
        if not tells or not prefill.computed_per_s or tokens < least or backlog(prefill, now) > FEW_TOKENS:
            return None
        messages = picks.prefix.messages_until(there)
        if messages is None or self._of.get((pair.decode.instance, pair.decode.incarnation), 0) >= MOST_OF_ONE:
            return None
        return Pull(self, request, messages, picks, pair)

    def on_begun(self, pull: Pull) -> None:
        """A pull has begun."""
        self._running.add(pull)
        self._of[pull.source] = self._of.get(pull.source, 0) + 1

    def on_ended(self, pull: Pull, result: str, took_s: float) -> None:
        """It has ended so, after so many seconds."""
        self._running.discard(pull)
        self._of[pull.source] -= 1
        if not self._of[pull.source]:
            del self._of[pull.source]
        self._count(result)
        if result == "ok":
            self._usual_s = KEEP * self._usual_s + (1 - KEEP) * took_s
            self._failures = 0
        elif result != "gone":
            self._failures += 1
            if self._failures >= FAILURES:
                self._failures, self._paused_until = 0, self.pool.loop.time() + PAUSE_S

    def abort(self, reason: str) -> None:
        """The router stops: what waits for a pull is refused."""
        for pull in list(self._running):
            pull.refuse(unavailable(reason))


class Pull(Sink, RequestHandler):
    """One of them: it answers to its client meanwhile, and hands that on to who serves it."""

    _reply: Reply
    _serve: Callable[[float], RequestHandler]
    _on_unserved: Callable[[HttpFault | None], None]

    def __init__(self, pulls: Pulls, request: bodies.GenerationRequest, messages: bytes, picks: Selection,
                 pair: Pair) -> None:
        """``messages``: of the conversation, those whose KV moves."""
        self._pulls, self._request, self._messages, self._picks, self._pair = pulls, request, messages, picks, pair
        self.source = pair.decode.instance, pair.decode.incarnation
        self._transfer = TransferId(secrets.token_hex(16))
        self._calls: dict[int, UpstreamCall] = {}
        self._alarm: Alarm | None = None
        self._began = 0.0

    def begin(self, reply: Reply, serve: Callable[[float], RequestHandler],
              on_unserved: Callable[[HttpFault | None], None]) -> Pull:
        """Send both legs. ``serve``: go on behind it, after so many seconds; ``on_unserved``: the request was not served,
        and gets this answer; None: its client has gone.
        """
        self._reply, self._serve, self._on_unserved = reply, serve, on_unserved
        loop, prefill = self._pulls.pool.loop, self._pair.prefill
        assert prefill is not None
        self._began = loop.time()
        self._alarm = Alarm(loop, self._began + LIMIT_S, lambda: self._end("late"))
        self._pulls.on_begun(self)
        peer = legs.Peer(prefill.instance, prefill.incarnation, prefill.control)
        self._ask(self._pair.decode, self._leg(Role.PREFILL, peer))
        self._ask(prefill, self._leg(Role.DECODE, None))
        return self

    def _leg(self, role: Role, peer: legs.Peer | None) -> legs.Leg:
        return legs.Leg(legs.VERSION, role, self._transfer, Attempt(1), LIMIT_S, peer, LIMIT_S)

    def _ask(self, target: EngineTarget, leg: legs.Leg) -> None:
        pool, number = self._pulls.pool, len(self._calls)
        headers = [(b"x-request-id", b"pull-%b-%d" % (self._transfer.encode(), number)), *target.rank_headers()]
        call = self._calls[number] = UpstreamCall(pool, target.http, self, tag=number)
        pool.send(call, lambda: request_bytes(
            b"POST", PATHS["chat"], target.http, headers, bodies.pulled_body(self._request, self._messages, leg)))

    def refuse(self, fault: HttpFault | None) -> None:
        """End it, and do not serve its request; None: its client has gone."""
        self._stop("gone")
        self._on_unserved(fault)

    def on_client_gone(self) -> None:
        """Take both legs back."""
        self.refuse(None)

    # ---- call.Sink

    def on_whole(self, call: UpstreamCall, body: bytes) -> None:  # noqa: ARG002 (Sink's names)
        """A leg has its answer."""
        assert call.head is not None
        del self._calls[call.tag]
        if call.head.status != 200:
            self._end("failed")
        elif not self._calls:
            self._picks.on_pulled(self._pair)
            self._end("ok")

    def on_failed(self, call: UpstreamCall, kind: FailureKind, reason: FailureReason) -> None:  # noqa: ARG002 (Sink's names)
        """A leg has none; whether that engine lives is found out by who serves the request."""
        del self._calls[call.tag]
        self._end("failed")

    def _end(self, result: str) -> None:
        self._stop(result)
        self._reply.connection.hand_over(self, self._serve(self._pulls.pool.loop.time() - self._began))

    def _stop(self, result: str) -> None:
        assert self._alarm is not None
        self._alarm.cancel()
        calls, self._calls = self._calls, {}
        for number, call in calls.items():
            call.cancel()
            if number and self._pair.prefill is not None:  # the engine may not know it yet: its connector would wait
                self._pulls.cancel_notices.send(self._pair.prefill, self._leg(Role.DECODE, None))
        self._pulls.on_ended(self, result, self._pulls.pool.loop.time() - self._began)
