"""What both ports tell everybody of this process: whether it lives, whether it should get traffic, its metrics."""

from __future__ import annotations

import math

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.http.reply import HttpRequest, Reply
from xpyd_sidecar.router.observing.metrics import CONTENT_TYPE
from xpyd_sidecar.router.serving.context import RequestContext

RENDERED_S = 0.25
"""How long a page of metrics is served again: with many instances it takes milliseconds to make."""
_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]


class Probes:
    """Answers to whoever watches over this process."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._metrics_page, self._metrics_until = b"", -math.inf

    def health(self, _: HttpRequest, reply: Reply) -> None:
        """The process lives."""
        reply.send_whole(200, _TEXT, b"ok\n")

    def ready(self, _: HttpRequest, reply: Reply) -> None:
        """It should get traffic, or why not."""
        if reason := self.not_ready():
            reply.send_whole(503, [*_TEXT, (b"retry-after", b"1")], reason.encode() + b"\n")
        else:
            reply.send_whole(200, _TEXT, b"ready\n")

    def not_ready(self) -> str:
        """Why this router should get no traffic; empty when it should.

        Beside an engine this and the engine's own health make the pod's readiness, also where no clients are sent here, so
        only a restart counts: agents that knew this router must have had the time to come back. Clients come once the
        operator saw ``settled``. Whether anybody decodes is left out: a 503 says more than a connection refused; and where
        instances are started for who asks, somebody must hear that.
        """
        context = self._context
        if context.draining:
            return "the router is stopping"
        now, roster = context.loop.time(), context.roster
        beside = context.config.beside_engine
        if not (roster.has_waited_for_agents(now) if beside else roster.is_settled(now)):
            return "the roster is not settled: agents may not have found this router yet"
        if not beside and not context.standby.enabled and not roster.pickable(Role.DECODE):
            return roster.why_not(Role.DECODE)
        return ""

    def metrics(self, _: HttpRequest, reply: Reply) -> None:
        """Prometheus's page."""
        context = self._context
        if context.loop.time() >= self._metrics_until:
            self._metrics_page = context.observer.metrics.text()
            self._metrics_until = context.loop.time() + RENDERED_S
        reply.send_whole(200, [(b"content-type", CONTENT_TYPE)], self._metrics_page)
