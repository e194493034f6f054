"""The paths of a worker: what is of all workers together is asked of the owner."""

from __future__ import annotations

from functools import partial

from xpyd_sidecar.contract import timeline
from xpyd_sidecar.proxy import link as li
from xpyd_sidecar.proxy.admin import Paths
from xpyd_sidecar.proxy.auth import ClientKeys
from xpyd_sidecar.proxy.dispatch import Dispatch
from xpyd_sidecar.proxy.patience import Alarm
from xpyd_sidecar.proxy.reply import Handler, HttpRequest, Reply
from xpyd_sidecar.routing import faults

ASKED = frozenset({"/metrics", "/fleet", timeline.PATH, "/dashboard/data"})
"""Paths that the owner answers, for all workers together."""
ASK_S = 5.0


class _Waiting:
    """A request that the owner answers."""

    def __init__(self, reply: Reply, timer: Alarm) -> None:
        self.reply = reply
        self.timer = timer
        self.gone = False

    def on_client_gone(self) -> None:
        """The answer goes nowhere."""
        self.gone = True

    def on_pause(self) -> None:
        """It is one write."""

    def on_resume(self) -> None:
        """Likewise."""


class WorkerPaths(Paths):
    """Those of one worker."""

    link: li.Link[li.Down]

    def __init__(self, dispatch: Dispatch, client_keys: ClientKeys, admin_token: str) -> None:
        super().__init__(dispatch, client_keys, admin_token)
        self._loop = dispatch.loop
        self._asked: dict[int, _Waiting] = {}
        self._number = 0

    def handle(self, request: HttpRequest, reply: Reply) -> Handler | None:
        """Answer a request. Raises Fault."""
        if request.path not in ASKED:
            return super().handle(request, reply)
        self._number += 1
        number = self._number
        timer = Alarm(self._loop, self._loop.time() + ASK_S, partial(self._answered, number, None))
        waiting = self._asked[number] = _Waiting(reply, timer)
        self.link.send(li.Ask(number, request.method, request.path, request.headers, request.request_id))
        return waiting

    def answer(self, answer: li.Answer) -> None:
        """The owner has answered."""
        self._answered(answer.number, answer)

    def _answered(self, number: int, answer: li.Answer | None) -> None:
        waiting = self._asked.pop(number, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        if waiting.gone:
            return
        if answer is None:
            waiting.reply.fault(faults.unavailable("the process that owns membership does not answer"))
        else:
            waiting.reply.whole(answer.status, answer.headers, answer.body)
