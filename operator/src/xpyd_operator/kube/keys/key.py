"""The keys of one service: which ones its pods have, which one is wanted, and the Secret that brings it to pods.

Nothing is remembered: a pod's volume says which Secret it has, and from the master follow the keys and the names of all
Secrets that the operator can have made (decision 0032).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.keys.master import KeyTrouble, Master
from xpyd_operator.render import keys as render
from xpyd_operator.render.keys import PodKey
from xpyd_operator.render.objects import key_secret
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey

logger = logging.getLogger(__name__)
CHECK_S = 600.0
"""So often the Secret is made again in any case, where it is gone (it is not watched, so that the operator need not list
Secrets, and 409 says that it is there)."""
SOON_S = 10.0
"""So often at most before pods are made, which cannot start without it."""
_ANEW = "or delete these pods, and they are made anew with another key"


class KnownKey(msgspec.Struct, frozen=True):
    """A key of the service, and how pods have it."""

    key: ServiceKey
    pod: PodKey
    generation: int
    """Of the master."""


class ServiceKeys:
    """The keys of one service. ``refresh`` first, in every round."""

    def __init__(self, api: Api, master: Master, *, dry_run: bool = False) -> None:
        self._api = api
        self._master = master
        self._dry_run = dry_run
        self._known: dict[str, KnownKey] = {}
        self._made: dict[str, float] = {}
        """Name of a Secret → when it was last made, or found to be there."""

    async def refresh(self, service: DisaggService, used: Collection[str], now: float) -> None:
        """Derive all keys of the service. ``used``: the Secrets that living pods of the service have.

        Raises:
            KeyTrouble: not all of those can be told.
            ApiError: at present.
        """
        generations, uid = await self._master.generations(now), service.metadata.uid or ""
        found = []
        for number, master in generations.items():
            key = keys.of_service(master, number, uid)
            found.append(KnownKey(key, render.derived_pod_key(service.name, key), number))
        self._known = {each.pod.secret: each for each in found}
        if lost := sorted(set(used) - self._known.keys()):
            words = f"pods have their key from Secret {', '.join(lost)}, which is of no generation of the master"
            raise KeyTrouble("KeyUnknown", f"{words}; put that one back, {_ANEW}")

    def find(self, secret: str) -> KnownKey | None:
        """The key in a Secret of this name; None: there is none."""
        return self._known.get(secret)

    def service_key(self, secret: str) -> ServiceKey | None:
        """The key that pods with this Secret have; None: it is not known."""
        known = self.find(secret)
        return known.key if known is not None else None

    def choose(self, used: Collection[str], stays: Callable[[KnownKey], bool], may_roll: Callable[[], bool]) -> KnownKey:
        """The key that the service is to have.

        Args:
            used: the Secrets that living pods have.
            stays: whether pods that are to stay as they are have this key.
            may_roll: whether the service may be rolled now for the key alone.
        """
        newest = self.newest
        before = self.previous_key(used, newest)
        if before is None or newest.pod.secret in used or not stays(before):
            return newest
        return newest if may_roll() else before

    @property
    def newest(self) -> KnownKey:
        """The key of the newest generation."""
        return max(self._known.values(), key=lambda each: each.generation)

    def previous_key(self, used: Collection[str], wanted: KnownKey) -> KnownKey | None:
        """The newest of the keys that pods have beside the one that is wanted; None: they have no other."""
        others = [self._known[name] for name in used if name in self._known and name != wanted.pod.secret]
        return max(others, key=lambda each: each.generation, default=None)

    async def provide(
        self, service: DisaggService, wanted: KnownKey, used: Collection[str], now: float, *, soon: bool = False
    ) -> None:
        """See that the Secret is there. ``soon``: pods are about to be made that need it.

        Raises:
            ApiError: it cannot be made at present.
        """
        last = self._made.get(wanted.pod.secret, float("-inf"))
        if self._dry_run or 0 <= now - last < (SOON_S if soon else CHECK_S):
            return
        self._made.pop(wanted.pod.secret, None)  # not known to be there, until the API server has answered
        earlier = [each for each in self._known.values() if each.generation < wanted.generation]
        before = self.previous_key(used, wanted) or max(earlier, key=lambda each: each.generation, default=None)
        body = key_secret(service, wanted.key.hex(), wanted.pod, before.key.hex() if before is not None else "")
        try:
            await self._api.create("Secret", service.metadata.namespace or "", body)
            logger.info("made Secret %s/%s", service.metadata.namespace, wanted.pod.secret)
        except ApiError as error:
            if not error.exists:
                raise
        self._made = {wanted.pod.secret: now}

    def why_not(self, secret: str, wanted: KnownKey | None) -> str:
        """Why a Secret is not known to be there; empty where it is. One that is not ``wanted`` is that of pods which have
        it already.
        """
        there = secret in self._made or (wanted is not None and secret != wanted.pod.secret and secret in self._known)
        return "" if there else "is not there yet"
