"""Asking the API server whether it would take a pod, before any pod of a revision is made.

A template preserves what it does not know, and Pod Security, webhooks and the pod's own schema only speak when a pod is
created. A dry run lets them speak without making one, so that a faulty template is a condition of the service and the old
revision goes on.
"""

from __future__ import annotations

import logging

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.api import Api, ApiError
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.keys import PodKey
from xpyd_operator.render.pod import engine_pod
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role

logger = logging.getLogger(__name__)
AGAIN_S = 60.0
"""What was refused is asked again: Pod Security of a namespace and webhooks may have changed."""
KNOWN = 64


def fault(error: ApiError) -> str | None:
    """What is wrong with the pod by this refusal; None where it says nothing about the pod."""
    if error.status in (400, 422):
        return error.message
    if error.status == 403:
        others = error.reason == "NamespaceTerminating" or "exceeded quota" in error.message
        ours = "cannot create resource" in error.message  # the operator's own permissions
        return None if others or ours else error.message
    return None


class DryRun:
    """Of one service; remembers its verdicts by role and revision."""

    def __init__(self, api: Api, settings: KubeSettings) -> None:
        self._api = api
        self._settings = settings
        self._verdicts: dict[tuple[Role, Revision], tuple[str, float]] = {}

    async def ask(
        self, service: DisaggService, role: Role, revision: Revision, now: float, key: PodKey | None = None
    ) -> str:
        """What the API server has against a pod of this revision; empty where it would take it.

        Raises:
            ApiError: it cannot be told at present.
            Unsupported: the pod cannot be rendered.
        """
        known = self._verdicts.get((role, revision))
        if known is not None and (not known[0] or 0 <= now - known[1] < AGAIN_S):
            return known[0]
        pod = engine_pod(service, role, InstanceName(f"{service.name}-check-{role}"), revision, self._settings, key=key)
        words = ""
        try:
            await self._api.create("Pod", service.metadata.namespace or "", pod, dry_run=True)
        except ApiError as error:
            refused = fault(error)
            admitted = error.conflict or (error.status == 403 and "exceeded quota" in error.message)
            if refused is None and not admitted:
                raise
            words = refused or ""
        self.accept(role, revision, words, now)
        return words

    def accept(self, role: Role, revision: Revision, words: str = "", now: float = 0.0) -> None:
        """Remember a verdict; without words: pods of this revision exist, so it was taken."""
        self._verdicts.pop((role, revision), None)
        self._verdicts[role, revision] = (words, now)
        while len(self._verdicts) > KNOWN:
            del self._verdicts[next(iter(self._verdicts))]
