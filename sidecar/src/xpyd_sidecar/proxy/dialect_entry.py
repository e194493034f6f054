"""One request in a dialect that generates, before it is served: its place in the queue, as ``entry`` has of the others.

Does not belong here: the queue (``waiting``), and what happens to it afterwards (``passed``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpyd_sidecar.proxy.entry import LEFT, Door, asked_of, cached
from xpyd_sidecar.proxy.passed import Passed
from xpyd_sidecar.proxy.reply import HttpRequest, Reply
from xpyd_sidecar.routing.dialects import Request
from xpyd_sidecar.routing.faults import Fault
from xpyd_sidecar.routing.paths import Route

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch
    from xpyd_sidecar.proxy.passing import Passing


class DialectEntry(Door):
    """One request (``waiting.Request``)."""

    def __init__(self, passing: Passing, dispatch: Dispatch, route: Route, request: HttpRequest, reply: Reply, *,
                 asked: Request) -> None:
        """Raises Fault: 400, the priority is no whole number."""
        super().__init__(dispatch, request, reply, asked=asked.fields, raw=asked.prompt, skips=asked.alone)
        self._passing = passing
        self._route = route
        self._asked = asked

    def begin(self, queued_s: float) -> Passed:
        """Serve it."""
        asked = asked_of(self._dispatch, self._request, self._asked.prompt)
        skips = self._skips or cached(self._dispatch, asked)
        return self._passing.begin(Passed(
            self._passing, self._dispatch, self._route, self._request, self._reply, split=self._asked, asked=asked,
            skips=skips, queued_s=queued_s))

    def refuse(self, fault: Fault) -> None:
        """It was not served."""
        self._reply.fault(fault)
        self._passing.unserved(self._route, self._request, fault.outcome, fault.status, fault.message)

    def left(self) -> None:
        """Its client went away while it waited."""
        self._passing.unserved(self._route, self._request, "aborted", 0, LEFT)
