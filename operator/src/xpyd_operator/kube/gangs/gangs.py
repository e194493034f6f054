"""Which schedulers' groups the API server serves, and which of them this operator makes. Of the whole operator."""

from __future__ import annotations

import logging

from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.render.gang import NEEDS, PLURAL, VERSIONS, Gang, Kind

logger = logging.getLogger(__name__)
LOOK_S = 60.0
"""What is served is asked again so late: a CRD may come, and a control plane be upgraded."""


class Gangs:
    """Groups of schedulers that are served. ``refresh`` before anything else."""

    def __init__(self, api: Api, settings: OperatorSettings) -> None:
        self._api = api
        self._choice = settings.gang
        self._looked = float("-inf")
        self.served: tuple[Gang, ...] = ()
        """One of each kind that is served."""

    async def refresh(self, now: float) -> None:
        """Ask what is served, where that was not done lately.

        Raises:
            ApiError: nothing is known yet, and the API server does not say.
        """
        if 0 <= now - self._looked < LOOK_S:
            return
        try:
            found = [await self._find(kind) for kind in VERSIONS]
        except ApiError as error:
            if self._looked < 0:
                raise
            logger.warning("cannot tell which groups of schedulers are served: %s", error)
            return
        served = tuple(each for each in found if each is not None)
        if served != self.served or self._looked < 0:
            logger.info("groups of schedulers: %s; instances of several pods are placed %s",
                        ", ".join(each.version for each in served) or "none are served", self._how(served))
        self.served, self._looked = served, now

    @property
    def chosen_gang(self) -> Gang | None:
        """The group that is made for new instances; None: they are placed one at a time where places are short."""
        return self._chosen(self.served)

    @property
    def problem(self) -> str:
        """Why the group that was asked for is not made; empty where nothing is wrong."""
        kind = next((each for each in VERSIONS if each == self._choice), None)
        if kind is None or self.chosen_gang is not None:
            return ""
        version = VERSIONS[kind][0]
        return (f"the operator was started with --gang {kind}, and the API server serves no {PLURAL} of {version}, so that "
                f"instances of several pods are placed one at a time; install {NEEDS[kind]}, or write --gang auto or none")

    def gang_of(self, kind: Kind) -> Gang | None:
        """The group of this kind that is served; None: none is."""
        return next((each for each in self.served if each.kind == kind), None)

    def _chosen(self, served: tuple[Gang, ...]) -> Gang | None:
        kind = "kubernetes" if self._choice == "auto" else self._choice
        return next((each for each in served if each.kind == kind), None)

    def _how(self, served: tuple[Gang, ...]) -> str:
        chosen = self._chosen(served)
        return "one at a time where places are short" if chosen is None else f"as PodGroups of {chosen.version}"

    async def _find(self, kind: Kind) -> Gang | None:
        for version in VERSIONS[kind]:
            if PLURAL in await self._api.served_resources(version):
                return Gang(kind, version)
        return None
