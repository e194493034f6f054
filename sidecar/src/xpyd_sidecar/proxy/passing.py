"""The requests that pass through with their answers: which are taken, how many, and how they ended.

Does not belong here: which paths these are (``routing.paths``), and what happens to one of them (``passed``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xpyd_sidecar.proxy.access import access
from xpyd_sidecar.proxy.passed import Passed
from xpyd_sidecar.proxy.reply import HttpRequest, Reply
from xpyd_sidecar.proxy.tally import Counts
from xpyd_sidecar.routing import dialects, faults
from xpyd_sidecar.routing.faults import Fault, unknown_model
from xpyd_sidecar.routing.passed import Asked, checked, refuse_in_form
from xpyd_sidecar.routing.paths import Body, Route

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

    def open(self, route: Route, request: HttpRequest, reply: Reply) -> Passed:
        """Begin to pass a request on.

        Raises:
            Fault: it is refused, before anything was sent.
        """
        dispatch = self._dispatch
        try:
            if request.upload is None and route.body is Body.FORM:
                refuse_in_form(request.body)
            asked = checked(route.path, request.body) if route.body is Body.JSON else Asked(None, {})
            served = dispatch.models()
            if asked.model and served and asked.model not in served:
                raise unknown_model(asked.model, served)
            if len(self._open) + len(dispatch.servings) >= dispatch.config.max_in_flight:
                raise faults.unavailable(f"{dispatch.config.max_in_flight} requests are being served, which is the limit")
            passed = Passed(self, dispatch, route, request, reply,
                            split=dialects.request(route.path, asked.fields))
            passed.start()
        except Fault as fault:
            if request.upload is not None and not request.upload.done:
                reply.last()  # the rest of its body will not be read
            outcome = "unavailable" if fault.status == 503 else "refused"
            self.count(route.path, outcome)
            if dispatch.access_log:
                access.info("%s", outcome, extra={"request": request.request_id, "path": route.path, "status": fault.status,
                                                  "detail": fault.message[:500]})
            raise
        self._open.add(passed)
        return passed

    def closed(self, passed: Passed, outcome: str) -> None:
        """A passed request is over."""
        self._open.discard(passed)
        self.count(passed.route.path, outcome)

    def count(self, path: str, outcome: str) -> None:
        """A passed request, of the table's ``path``, ended."""
        self._counts.add((path, outcome))
        self.told(path, outcome)

    def on_lost(self, instance: str, incarnation: str, reason: str) -> None:
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
