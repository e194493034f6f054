"""What there is of the Gateway API, for all services: which of its kinds the API server serves, the routes of services, and
the Gateways that they name.

Kinds that may be absent, come and go cannot be watched as the others are: kopf and the rounds would wait for a list that
never comes. They are listed in turns, into the same cache, and whoever is concerned is woken. Where nobody asks for a
gateway and nothing of one is left, only what is served is asked, once a minute.

    not served   nothing of the kind is there; asked again in the next turn
    Forbidden    the operator has the roles of a release before: what is there is not known, and nothing is made
    no answer    what was known goes on; where nothing was, nothing is made
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.cache import POLLED, WatchCache
from xpyd_operator.render.gateway import GATEWAY, KINDS
from xpyd_operator.render.labels import SERVICE

logger = logging.getLogger(__name__)
Body = dict[str, Any]
Name = tuple[str, str]
"""Namespace and name."""
POLL_S: Final = 5.0
"""Between two turns while somebody has a gateway."""
IDLE_S: Final = 60.0
"""While nobody has one."""
GAP_S: Final = 0.5
"""Shortest pause, however many ask."""
FORBIDDEN: Final = 403
ABSENT: Final[Body] = {}
"""Of a Gateway that does not exist. One of which nothing is known is not there at all."""
PARENTS: Final = 64
"""Most Gateways that one turn looks at; the next one goes on with those that follow."""
_AT_ONCE: Final = 8
"""Gateways that are asked for side by side: rounds have most of the connections."""


class Gateways:
    """Of the whole operator. ``wake`` is called for every service that something has changed for."""

    def __init__(
        self, api: Api, cache: WatchCache, namespaces: Iterable[str], wake: Callable[[str, str], None]
    ) -> None:
        self._api, self._cache, self._wake = api, cache, wake
        self._namespaces = tuple(namespaces) or ("",)
        self._wanted: dict[Name, frozenset[Name]] = {}
        """Services that ask for a gateway → Gateways that they name."""
        self._troubles: dict[str, tuple[str, str]] = {}
        """By kind, why nothing can be made of it: reason and words."""
        self._parents: dict[Name, Body] = {}
        self._next = 0
        """Where among all Gateways that are named the next turn begins."""
        self._listed: set[str] = set()
        """Kinds whose objects are known, perhaps as they were a while ago."""
        self._failing: set[str] = set()
        """What was not answered, and is in the log since then."""
        self._looked = False
        self._few = asyncio.Semaphore(_AT_ONCE)
        self._turn = asyncio.Lock()
        self._asked = asyncio.Event()

    # What services ask

    async def want(self, service: Name, parents: Iterable[Name]) -> None:
        """A service has a gateway; returns once it is known what is served, or that nobody says so."""
        named = frozenset(parents)
        if self._wanted.get(service) != named:
            self._wanted[service] = named
            self._asked.set()
        if not self._looked:
            await self.refresh(first=True)

    def drop(self, service: Name) -> None:
        """A service has none any more."""
        self._wanted.pop(service, None)

    def problem(self, kind: str) -> tuple[str, str] | None:
        """Reason and words why nothing can be made of a kind; None: it is served."""
        if not self._looked:
            return "NotReached", "it is not known yet what the API server serves"
        return self._troubles.get(kind)

    def parent(self, gateway: Name) -> Body | None:
        """A Gateway as it was seen last; ``ABSENT``: there is none; None: nothing is known of it."""
        return self._parents.get(gateway)

    # What is looked at

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:  # a bug, or an answer that nobody thought of, ends one turn
                logger.exception("could not look at gateways")
            await asyncio.sleep(GAP_S)
            busy = self._wanted or self._cache.kinds(POLLED)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if busy else IDLE_S):
                    await self._asked.wait()
            self._asked.clear()

    async def refresh(self, *, first: bool = False) -> None:
        """Look at what is served and at gateways once; no XpydError leaves it. ``first``: only where that was not done."""
        async with self._turn:
            if first and self._looked:
                return
            before = dict(self._troubles)
            changed: set[Name] = set()
            for version in dict.fromkeys(where[0] for where in KINDS.values()):
                changed |= await self._look_at(version)
            changed |= await self._look_at_parents()
            if self._troubles != before or not self._looked:
                changed |= set(self._wanted)
            self._looked = True
        for namespace, name in changed:
            self._wake(namespace, name)

    async def _look_at(self, version: str) -> set[Name]:
        kinds = [kind for kind, where in KINDS.items() if where[0] == version]
        try:
            served = await self._api.served_resources(version)
        except ApiError as error:
            self._unanswered(f"cannot tell what is served of {version}", kinds, error)
            return set()
        self._failing.discard(f"cannot tell what is served of {version}")
        changed: set[Name] = set()
        for kind in kinds:
            changed |= await self._list(kind) if KINDS[kind][1] in served else self._absent(kind)
        return changed

    async def _list(self, kind: str) -> set[Name]:
        changed: set[Name] = set()
        try:
            for namespace in self._namespaces:
                listed = await self._api.items(kind, namespace, labels=SERVICE)
                bodies: list[Body] = listed.get("items") or []
                for body in bodies:
                    body.setdefault("kind", kind)
                    body.setdefault("apiVersion", KINDS[kind][0])
                version = str((listed.get("metadata") or {}).get("resourceVersion", ""))
                at = int(version) if version.isdecimal() else 0
                changed |= self._cache.on_listed(kind, namespace or None, bodies, at)
        except ApiError as error:
            if error.missing:  # it has just gone
                return changed | self._absent(kind)
            if error.status == FORBIDDEN:
                words = f"the operator may not list {KINDS[kind][1]}; its roles are those of a release before: {error}"
                self._say(kind, ("NotAllowed", words))
            else:
                if self._troubles.get(kind, ("",))[0] == "CRDMissing":  # it is served by now
                    del self._troubles[kind]
                self._unanswered(f"cannot list {KINDS[kind][1]}", (kind,), error)
            return changed
        self._listed.add(kind)
        self._failing.discard(f"cannot list {KINDS[kind][1]}")
        self._say(kind, None)
        return changed

    def _unanswered(self, what: str, kinds: Iterable[str], error: ApiError) -> None:
        """Log it once, until it is answered; nothing is made of a kind of which nothing was ever known."""
        if what not in self._failing:
            self._failing.add(what)
            logger.warning("%s: %s", what, error)
        for kind in kinds:
            if kind not in self._listed and self._troubles.get(kind, ("NotReached",))[0] == "NotReached":
                self._troubles[kind] = ("NotReached", f"{what}: {error}")

    def _absent(self, kind: str) -> set[Name]:
        version, plural = KINDS[kind]
        words = f"the API server serves no {plural} of {version}; install the CRDs of {version.partition('/')[0]}"
        self._listed.discard(kind)
        self._say(kind, ("CRDMissing", words))
        return self._cache.on_unserved(kind)

    def _say(self, kind: str, trouble: tuple[str, str] | None) -> None:
        before = self._troubles.pop(kind, None)
        if trouble is not None:
            self._troubles[kind] = trouble
        if before != trouble and (self._wanted or self._looked):
            logger.info("%s: %s", kind, trouble[1] if trouble is not None else "served")

    async def _look_at_parents(self) -> set[Name]:
        named = sorted({parent for parents in self._wanted.values() for parent in parents})
        begin = self._next % max(1, len(named))
        due = (named[begin:] + named[:begin])[:PARENTS]
        self._next = begin + len(due)
        found = await asyncio.gather(*(self._parent(each) for each in due))
        before = {name: self._parents[name] for name in named if name in self._parents and name not in due}
        seen = before | {name: body for name, body in zip(due, found, strict=True) if body is not None}
        news = {name for name in named if _version(seen.get(name)) != _version(self._parents.get(name))}
        self._parents = seen
        return {service for service, parents in self._wanted.items() if parents & news}

    async def _parent(self, name: Name) -> Body | None:
        async with self._few:
            try:
                return await self._api.get(GATEWAY, *name)
            except ApiError as error:
                if error.missing:
                    return ABSENT
                return None if error.status == FORBIDDEN else self._parents.get(name)


def _version(body: Mapping[str, Any] | None) -> str | None:
    """Tells two sights of a Gateway apart; empty: there is none; None: nothing is known."""
    if body is None:
        return None
    return str(body["metadata"].get("resourceVersion", "")) if body else ""
