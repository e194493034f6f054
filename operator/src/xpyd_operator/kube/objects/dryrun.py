"""Asking the API server whether it would take a pod or a policy, before any pod of a document is made.

A document preserves what it does not know of Kubernetes' own objects, and Pod Security, webhooks and the schema of a pod
only speak when one is created. A dry run lets them speak without making one, so that a faulty document is a condition of
the service and the one before goes on. Fields that the API server does not know are refused, and its answer is read: what
it left out of a pod (a feature that is off, a webhook) would not be there later either.
"""

from __future__ import annotations

import logging
from typing import Any

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.plan.desired import Revision, revision_of
from xpyd_operator.render.compare import dropped_path
from xpyd_operator.render.keys import PodKey
from xpyd_operator.render.labels import ROUTERS
from xpyd_operator.render.objects import policies, router_pod
from xpyd_operator.render.pod import engine_pods
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role

logger = logging.getLogger(__name__)
AGAIN_S = 60.0
"""What was refused is asked again: Pod Security of a namespace and webhooks may have changed."""
KNOWN = 64


def fault(error: ApiError) -> str | None:
    """What is wrong with an object by this refusal; None where it says nothing about the object."""
    if error.status in (400, 422):
        return error.message
    if error.status == 403:
        others = error.reason == "NamespaceTerminating" or "exceeded quota" in error.message
        ours = "cannot create resource" in error.message  # the operator's own permissions
        return None if others or ours else error.message
    return None


class DryRun:
    """Of one service; remembers its verdicts by role (or that it was of a router, or a policy) and revision."""

    def __init__(self, api: Api, settings: KubeSettings) -> None:
        self._api = api
        self._settings = settings
        self._verdicts: dict[tuple[str, Revision], tuple[str, float]] = {}

    async def ask(
        self, service: DisaggService, role: Role, revision: Revision, now: float, key: PodKey | None = None
    ) -> str:
        """What the API server has against a pod of this revision; empty where it would take it.

        Raises:
            ApiError: it cannot be told at present.
            UnsupportedField: the pod cannot be rendered.
        """
        name = InstanceName(f"{service.name}-check-{role}")
        if (known := self._known(role, revision, now)) is not None:
            return known
        pods = engine_pods(service, role, name, revision, self._settings, key=key)
        for pod in pods[:2]:  # a leader, and one that is led
            if words := await self._ask(pod, role, revision, now):
                return words
        return ""

    async def ask_router(self, service: DisaggService, now: float, key: PodKey | None = None) -> str:
        """The same of a router's pod, where routers have pods of their own.

        Raises:
            ApiError, UnsupportedField: as ``ask``.
        """
        pod = router_pod(service, f"{service.name}-check-router", self._settings, key)
        revision = revision_of(pod)
        if (known := self._known(ROUTERS, revision, now)) is not None:
            return known
        return await self._ask(pod, ROUTERS, revision, now)

    async def ask_policies(self, service: DisaggService, now: float) -> str:
        """The same of the NetworkPolicies of a document.

        Raises:
            ApiError: it cannot be told at present.
        """
        made = policies(service, self._settings)
        for policy in made:
            name = f"{policy['metadata']['name']}-check"
            tried = policy | {"metadata": policy["metadata"] | {"name": name}}
            revision = revision_of(tried)
            known = self._known(tried["kind"], revision, now)
            if words := await self._ask(tried, tried["kind"], revision, now) if known is None else known:
                return words
        return ""

    def _known(self, what: str, revision: Revision, now: float) -> str | None:
        known = self._verdicts.get((what, revision))
        return known[0] if known is not None and (not known[0] or 0 <= now - known[1] < AGAIN_S) else None

    async def _ask(self, made: dict[str, Any], what: str, revision: Revision, now: float) -> str:
        words = ""
        try:
            answer = await self._api.create(made["kind"], made["metadata"]["namespace"], made, dry_run=True)
            if path := dropped_path(made["spec"], answer.get("spec")):
                words = f"it leaves out spec.{path} (a feature of Kubernetes that is off, or a webhook takes it away)"
        except ApiError as error:
            refused = fault(error)
            admitted = error.conflict or (error.status == 403 and "exceeded quota" in error.message)
            if refused is None and not admitted:
                raise
            words = refused or ""
        self.accept(what, revision, words, now)
        return words

    def accept(self, what: str, revision: Revision, words: str = "", now: float = 0.0) -> None:
        """Remember a verdict; without words: pods of this revision exist, so it was taken."""
        self._verdicts.pop((what, revision), None)
        self._verdicts[what, revision] = (words, now)
        while len(self._verdicts) > KNOWN:
            del self._verdicts[next(iter(self._verdicts))]
