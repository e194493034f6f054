"""The route of one service to its routers: made where its kinds are served, put back, taken away, and what became of it.

Nothing of it is an error of a round: a gateway that rejects, a CRD that goes or a webhook that refuses is said in one
condition (``gateway_verdict``), and pods, Services and policies are looked after as ever.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.status import Condition
from xpyd_operator.errors import NotYet, XpydError
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import POLLED, Entry
from xpyd_operator.kube.objects.children import Children
from xpyd_operator.kube.objects.presence import why_not_there
from xpyd_operator.kube.routes.gateway_verdict import gateway_condition, verdict
from xpyd_operator.kube.service.shared import SharedParts
from xpyd_operator.render import needs
from xpyd_operator.render.gateway import TLS, gateway_objects

logger = logging.getLogger(__name__)
Body = dict[str, Any]
ENDING: Final = 405
"""What the API server says of a kind whose CRD is being deleted."""
AGAIN_S: Final = 30.0
"""What the API server refused is tried again so late, or when the document changes."""


class ServiceGateway:
    """Of one service."""

    def __init__(self, shared: SharedParts, entry: Entry) -> None:
        self._cache, self._gateways = shared.cache, shared.gateways
        self._at = (entry.namespace, entry.name)
        self._children = Children(shared.api, shared.cache, shared.events, shared.settings)
        self._rendered: tuple[DisaggService | None, tuple[Body, ...]] = (None, ())
        self._refused = ""
        """Why the last try came to nothing."""
        self._again = 0.0
        """When there is another one."""

    async def reconcile(self, service: DisaggService, now: float) -> None:
        """Make the objects of the gateway as they should be, as far as their kinds are served; never raises XpydError."""
        if self._rendered[0] is not service:
            self._rendered, self._refused, self._again = (service, gateway_objects(service)), "", 0.0
        gateway = service.spec.router.gateway
        if gateway is None:
            self._gateways.drop(self._at)
        else:
            named = ((each.namespace or self._at[0], each.name) for each in gateway.parent_refs)
            await self._gateways.want(self._at, named)
        if self._refused and now < self._again:
            return
        wanted = [each for each in self._rendered[1] if self._gateways.problem(each["kind"]) is None]
        names = {(each["kind"], each["metadata"]["name"]) for each in self._rendered[1]}
        gone = [(kind, service.name) for kind in POLLED if (kind, service.name) not in names]
        try:
            await self._children.reconcile_objects(
                service, wanted, gone, now, lacking=lambda made: self._lacking(service, made))
        except NotYet:
            self._refused = ""
        except XpydError as error:
            if isinstance(error, ApiError) and (error.missing or error.status == ENDING):
                return  # its CRD goes, which the next turn tells
            if str(error) != self._refused:
                logger.warning("what a gateway needs of %s/%s: %s", *self._at, error)
            self._refused, self._again = str(error), now + AGAIN_S
        else:
            self._refused = ""

    def condition(self) -> Condition | None:
        """What became of it; None: the document names no gateway, and nothing of one is left."""
        service, rendered = self._rendered
        if service is None or not rendered:
            words = f"the document names no gateway, and the API server does not let its objects go: {self._refused}"
            return gateway_condition("False", "Refused", words) if self._refused else None
        for each in rendered:
            if (trouble := self._gateways.problem(each["kind"])) is not None:
                reason, words = trouble
                return gateway_condition("Unknown" if reason == "NotReached" else "False", reason, words)
        if taken := self._children.taken_names:
            return gateway_condition("False", "NameTaken", f"somebody else's, so rename or delete it: {', '.join(taken)}")
        if self._refused:
            return gateway_condition("False", "Refused", f"the API server does not take it: {self._refused}")
        for each in rendered:
            if why := why_not_there(self._cache, service, each):
                return gateway_condition("Unknown", "Creating", f"{each['kind']} {service.name} {why}")
        found = [self._cache.get(each["kind"], *self._at) for each in rendered]
        return verdict(self._at[0], {each.kind: each.body for each in found if each is not None}, self._gateways.parent)

    def forget(self) -> None:
        """The service is gone."""
        self._gateways.drop(self._at)

    def _lacking(self, service: DisaggService, made: Body) -> str:
        policies = [each["metadata"]["name"] for each in self._rendered[1] if each["kind"] == TLS]
        wanted = {each["kind"]: each for each in self._rendered[1]}

        return needs.lacking(made, policies, lambda need: why_not_there(self._cache, service, wanted[need.kind]))
