"""The requests that pass through with their answers: which are taken, how many, and how they ended.

Does not belong here: which paths these are (``routing.paths``), and what happens to one of them (``passed``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from xpyd_sidecar.proxy import intake
from xpyd_sidecar.proxy.access import access
from xpyd_sidecar.proxy.account import outcome_of
from xpyd_sidecar.proxy.dialect_entry import DialectEntry
from xpyd_sidecar.proxy.passed import Passed
from xpyd_sidecar.proxy.reply import Handler, HttpRequest, Reply
from xpyd_sidecar.proxy.tally import Counts
from xpyd_sidecar.routing import dialects, faults
from xpyd_sidecar.routing.faults import Fault, unknown_model
from xpyd_sidecar.routing.hidden import refuse_form_type, refuse_in_form
from xpyd_sidecar.routing.passed import Asked, checked
from xpyd_sidecar.routing.paths import Body, Route
from xpyd_sidecar.routing.reason import Reason
from xpyd_sidecar.routing.request_hash import hash_of

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch


class Passing:
    """All passed requests of a router."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._open: set[Passed] = set()
        self._counts = Counts(dispatch.observer.metrics.registry, "xpyd_router_passed_requests",
                              "Requests passed to one decode instance, by path and outcome", ("path", "outcome"))
        self.told: Callable[[str, str], None] = lambda _path, _outcome: None
        """Who else is told the path (of the table) and the outcome of each."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def generating(self) -> int:
        """Those that count among the requests that generate."""
        return sum(passed.account.generates for passed in self._open)

    def open(self, route: Route, request: HttpRequest, reply: Reply) -> Handler:
        """Begin to pass a request on; one in a dialect that generates waits for room, if it must.

        Raises:
            Fault: it is refused, before anything was sent.
        """
        dispatch = self._dispatch
        try:
            if route.body is Body.FORM:
                refuse_form_type(request.headers.get(b"content-type", b""))
                refuse_in_form(request.body)
            asked = Asked(None, {}, request.body)
            if route.body is Body.JSON:
                asked = checked(route.path, request.body, intake.judged)
            if asked.body is not request.body:
                request = msgspec.structs.replace(request, body=asked.body)
            served = dispatch.models()
            if asked.model and served and asked.model not in served:
                raise unknown_model(asked.model, served)
            if dispatch.poison.alert and route.body is Body.JSON:
                dispatch.poison.refuse(hash_of(route.path, asked.fields))
            split = dialects.request(route.path, asked.fields)
            if split is not None:
                return dispatch.line.enter(DialectEntry(self, dispatch, route, request, reply, asked=split))
            if len(self._open) + len(dispatch.servings) >= dispatch.config.max_in_flight:
                raise faults.unavailable(f"{dispatch.config.max_in_flight} requests are being served, which is the limit")
        except Fault as fault:
            if request.upload is not None and not request.upload.done:
                reply.last()  # the rest of its body will not be read
            self.unserved(route, request, fault.outcome, fault.status, fault.message)
            raise
        return self.begin(Passed(self, dispatch, route, request, reply))

    def begin(self, passed: Passed) -> Passed:
        """Send it."""
        self._open.add(passed)
        passed.start()
        return passed

    def unserved(self, route: Route, request: HttpRequest, outcome: str, status: int, detail: str) -> None:
        """A request ended before it was served."""
        self.count(route.path, outcome)
        dialect = dialects.DIALECTS.get(route.path)
        if dialect is not None:
            self._dispatch.unserved(dialect.name, request, outcome_of(outcome, status, gone=True), status, detail)
        elif self._dispatch.access_log:
            access.info("%s", outcome, extra={"request": request.request_id, "path": route.path, "status": status,
                                              "detail": detail[:500]})

    def closed(self, passed: Passed, outcome: str) -> None:
        """A passed request is over."""
        self._open.discard(passed)
        self.count(passed.route.path, outcome)
        self._dispatch.line.moved()

    def count(self, path: str, outcome: str) -> None:
        """A passed request, of the table's ``path``, ended."""
        self._counts.add((path, outcome))
        self.told(path, outcome)

    def on_lost(self, instance: str, incarnation: str, reason: Reason) -> None:
        """The roster says that this incarnation will never answer."""
        for passed in list(self._open):
            passed.on_lost(instance, incarnation, reason)

    def sweep(self, now: float, awake: float) -> None:
        """Called every second."""
        for passed in list(self._open):
            passed.sweep(now, awake)

    def abort(self, reason: str) -> None:
        """Cut off what still runs."""
        for passed in list(self._open):
            passed.abort(reason)
