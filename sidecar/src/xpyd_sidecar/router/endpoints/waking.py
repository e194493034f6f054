"""``POST /wake``: polls of the operator, kept open until a request is held that is to start instances.

Laws
  * A poll is answered at once while somebody waits who may start instances and the operator wants none; else when that
    comes to be, or after ``POLL_S``.
  * Of more than ``POLLS_MAX`` open polls the oldest is answered: there is one leader, and one before may have left some.
  * A call is signed for this router, and so is the answer: what it says starts instances.
"""

from __future__ import annotations

import asyncio

import msgspec

from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.waking import POLL_S, WakeAnswer, WakeCall
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.reply import HttpRequest, LaterReply, Reply, RequestHandler
from xpyd_sidecar.router.serving.context import RequestContext

POLLS_MAX = 8


class WakePoll(LaterReply):
    """One that is open."""

    def __init__(self, endpoint: WakeEndpoint, reply: Reply, call: WakeCall, signature: str) -> None:
        super().__init__(reply)
        self._endpoint = endpoint
        self.call, self.signature = call, signature
        self.timer: asyncio.TimerHandle | None = None

    def on_client_gone(self) -> None:
        """Nobody waits for it any more."""
        super().on_client_gone()
        self._endpoint.leave(self)


class WakeEndpoint:
    """Of one router; who may ask is the caller's business."""

    def __init__(self, context: RequestContext, key: ServiceKey, *, poll_s: float = POLL_S) -> None:
        self._context = context
        self._key = keys.derive(key, "admin call")
        self._poll_s = poll_s
        self._polls: dict[WakePoll, None] = {}
        context.hold.on_waker = self.on_waker

    def __len__(self) -> int:
        """Polls that are open."""
        return len(self._polls)

    def open(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        """Begin to answer, or answer. Raises HttpFault: 400, the body is no call."""
        try:
            call = msgspec.json.decode(request.body, type=WakeCall)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HttpFault(400, f"no call that a router knows: {error}", code="bad_wake") from None
        context = self._context
        context.standby.on_call(call, context.loop.time())
        context.hold.on_fleet_change()
        signature = request.headers.get(signing.HEADER.lower().encode(), b"").decode("latin-1")
        poll = WakePoll(self, reply, call, signature)
        if self._tells(poll):
            self._answer(poll)
            return None
        while len(self._polls) >= POLLS_MAX:
            self._end(next(iter(self._polls)))
        self._polls[poll] = None
        poll.timer = context.loop.call_later(self._poll_s, self._end, poll)
        return poll

    def on_waker(self) -> None:
        """A request is held that may start instances: answer the polls that wait for one."""
        for poll in [each for each in self._polls if self._tells(each)]:
            self._end(poll)

    def leave(self, poll: WakePoll) -> None:
        """Its client has gone."""
        self._polls.pop(poll, None)
        if poll.timer is not None:
            poll.timer.cancel()
            poll.timer = None

    def close(self) -> None:
        """Answer all of them: the router stops, or ends."""
        for poll in list(self._polls):
            self._end(poll)

    def _tells(self, poll: WakePoll) -> bool:
        return poll.call.wanted < 1 and self._context.hold.wakers > 0

    def _end(self, poll: WakePoll) -> None:
        self.leave(poll)
        if not poll.gone:
            self._answer(poll)

    def _answer(self, poll: WakePoll) -> None:
        body = msgspec.json.encode(WakeAnswer(self._context.name, self._context.hold.wakers))
        mac = signing.sign_answer(self._key, poll.signature, body).encode()
        poll.reply.send_whole(200, [(b"content-type", b"application/json"), (b"cache-control", b"no-store"),
                                    (signing.HEADER.lower().encode(), mac)], body)
