"""Whether some node has the label that a placement names: said at once, with its field, and not by pods that stay Pending.

Nothing waits for the answer, and pods are made all the same: a node that has the label may be on its way.
"""

from __future__ import annotations

import logging

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.plan.absent import Breakage
from xpyd_sidecar.contract.ids import Role

logger = logging.getLogger(__name__)
AGAIN_S = 60.0


class Topology:
    """Of the whole operator; what is known of a label is asked again now and then."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: dict[str, tuple[bool, float]] = {}
        """Label → whether a node has it, or nothing can be said; and when it was asked."""

    async def absent(self, service: DisaggService, now: float) -> tuple[Breakage, ...]:
        """What is wrong with the topology of a service, by role."""
        found = []
        for role in Role:
            spec = service.spec.role(role)
            key = service.spec.engine.topology if spec.parallelism.pods > 1 else None
            if key is not None and spec.max_instances and not await self._there(key, now):
                words = f"spec.engine.topology: no node has the label {key}, so that no pod of {role} finds a place"
                do = "kubectl get nodes --show-labels has those that there are"
                found.append(Breakage("TopologyUnknown", words, do))
        return tuple(found)

    async def _there(self, key: str, now: float) -> bool:
        known = self._known.get(key)
        if known is not None and 0 <= now - known[1] < AGAIN_S:
            return known[0]
        try:
            there = bool((await self._api.items("Node", labels=key, limit=1)).get("items"))
        except ApiError as error:
            if error.status != 403 and known is not None:
                return known[0]
            if known is None:  # with rights in namespaces alone nobody may look at nodes: then the scheduler says it
                logger.info("cannot tell whether a node has the label %s: %s", key, error)
            there = True
        self._known[key] = (there, now)
        return there
