"""The paths of a worker: what is of all workers together is asked of the owner."""

from __future__ import annotations

from functools import partial

from xpyd_sidecar.contract import timeline
from xpyd_sidecar.router.api import faults
from xpyd_sidecar.router.endpoints.application import RENDERED_S, Paths
from xpyd_sidecar.router.http.auth import Admin, ClientKeys
from xpyd_sidecar.router.http.patience import Alarm
from xpyd_sidecar.router.http.reply import HttpRequest, LaterReply, Reply, RequestHandler
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.workers import link as li

ASKED = frozenset({"/metrics", "/fleet", timeline.PATH, "/dashboard/data"})
"""Paths that the owner answers, for all workers together."""
ASK_S = 5.0


class WorkerPaths(Paths):
    """Those of one worker."""

    link: li.WorkerLink[li.Down]

    def __init__(self, context: RequestContext, client_keys: ClientKeys, admin: Admin) -> None:
        super().__init__(context, client_keys, admin)
        self._loop = context.loop
        self._asked: dict[int, list[LaterReply]] = {}
        """Who waits for the answer to a question, by its number."""
        self._number = 0
        self._metrics_asked = 0
        """The number of the latest question for metrics, to which others that come meanwhile are added."""
        self._metrics_answer: li.OwnerAnswer | None = None

    def own(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        """Answer a request, which was judged, that is the router's own. Raises HttpFault."""
        if request.path not in ASKED:
            return super().own(request, reply)
        shared = request.path == "/metrics"
        if shared and self._metrics_answer is not None and self._loop.time() < self._metrics_until:
            answer = self._metrics_answer
            reply.whole(answer.status, answer.headers, answer.body)
            return None
        number = self._metrics_asked
        if not shared or number not in self._asked:
            number = self._ask(request, private=reply.private)
            if shared:
                self._metrics_asked = number
        waiting = LaterReply(reply)
        self._asked[number].append(waiting)
        return waiting

    def _ask(self, request: HttpRequest, *, private: bool) -> int:
        self._number += 1
        self._asked[self._number] = []
        Alarm(self._loop, self._loop.time() + ASK_S, partial(self._answered, self._number, None))
        self.link.send(li.AskOwner(
            self._number, request.method, request.path, request.headers, request.request_id, private))
        return self._number

    def answer(self, answer: li.OwnerAnswer) -> None:
        """The owner has answered."""
        self._answered(answer.number, answer)

    def _answered(self, number: int, answer: li.OwnerAnswer | None) -> None:
        asked = self._asked.pop(number, [])
        if asked and number == self._metrics_asked and answer is not None:
            self._metrics_answer, self._metrics_until = answer, self._loop.time() + RENDERED_S
        for waiting in asked:
            if waiting.gone:
                continue
            if answer is None:
                waiting.reply.fault(faults.unavailable("the process that owns membership does not answer"))
            else:
                waiting.reply.whole(answer.status, answer.headers, answer.body)
