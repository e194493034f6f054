"""What goes with a service beside its engines: made where it is missing, put back where it differs, removed where it is not
wanted. Everything is judged by the cache, so nothing is asked or written while nothing differs.

An object of somebody else (``ownership``) is never touched; its name is reported as taken. The watch only shows objects
with our label, so a name that seems free is looked up once before it is written. What needs others is written once they
are there (``presence``).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import NotYet
from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.apply import apply
from xpyd_operator.kube.client.cache import Entry, WatchCache
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.client.work import all_of, in_turn
from xpyd_operator.kube.objects.ownership import ownership
from xpyd_operator.kube.podstate.facts import controller
from xpyd_operator.render.compare import differs
from xpyd_operator.render.dependencies import stages
from xpyd_operator.render.keys import PodKey
from xpyd_operator.render.labels import role_name
from xpyd_operator.render.objects import children, initial_object, pool, unwanted_objects
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role

logger = logging.getLogger(__name__)
Body = dict[str, Any]
AGAIN_S = 30.0
"""A name that is taken is looked up again so late."""


class Children:
    """Of one service."""

    def __init__(self, api: Api, cache: WatchCache, events: Events, settings: KubeSettings) -> None:
        self._api = api
        self._cache = cache
        self._events = events
        self._settings = settings
        self._taken: dict[tuple[str, str], float] = {}
        """Kind and name of somebody else's object → when to look again."""
        self._mirrored: dict[str, tuple[str, Any]] = {}
        """Name of a pool → its uid and generation after we wrote it; its status may not tell of that one yet."""
        self._rendered: tuple[object, tuple[Body, ...]] = (None, ())

    @property
    def taken_names(self) -> list[str]:
        """Kinds and names of objects that the service needs and that are somebody else's."""
        return [f"{kind} {name}" for kind, name in sorted(self._taken)]

    async def reconcile(
        self,
        service: DisaggService,
        counts: Mapping[Role, int],
        now: float,
        key: PodKey | None = None,
        *,
        lacking: Callable[[Body], str],
        several: bool = False,
        before: bool = False,
        pods: Mapping[Role, int] | None = None,
    ) -> None:
        """Make all children of the service as they should be, what needs others after them.

        Args:
            service: the document.
            counts: as in ``objects.children``.
            now: unix seconds.
            key: of routers in pods of their own.
            lacking: what an object waits for, in words; empty where it may be made (``render.needs``).
            several: as in ``objects.children``.
            before: as in ``objects.unwanted_objects``.
            pods: as in ``objects.children``.

        Raises:
            ApiError: something could not be written; everything else was.
            NotYet: nothing else is wrong than that something waits.
            XpydError: several things could not.
        """
        first = self._unwanted(service, unwanted_objects(service, several=several, before=before))
        first += [self._pool(service, role, counts[role], now) for role in Role]
        await self._make(service, self._children(service, counts, key, several=several, pods=pods), first, now, lacking)

    async def reconcile_objects(
        self, service: DisaggService, rendered: Sequence[Body], gone: Iterable[tuple[str, str]], now: float, *,
        lacking: Callable[[Body], str],
    ) -> None:
        """Make these objects as they should be, in the order of what they need, and then delete others.

        Args:
            service: whose they are.
            rendered: what is wanted.
            gone: kinds and names of what is not; they stay while something that may have used them is not as it should be.
            now: unix seconds.
            lacking: as in ``reconcile``.

        Raises:
            XpydError: as ``reconcile``.
        """
        await self._make(service, rendered, [], now, lacking)
        await all_of(each for each in self._unwanted(service, gone) if each is not None)

    def _unwanted(self, service: DisaggService, gone: Iterable[tuple[str, str]]) -> list[Awaitable[None] | None]:
        namespace, uid = service.metadata.namespace or "", service.metadata.uid or ""
        found: list[Awaitable[None] | None] = []
        for kind, name in gone:
            entry = self._cache.get(kind, namespace, name)
            ours = entry is not None and ownership(entry.body["metadata"], service.name, uid) != "others"
            if entry is not None and ours and not entry.deleting:
                found.append(self._delete(entry))
            self._taken.pop((kind, name), None)
        return found

    async def _make(
        self, service: DisaggService, rendered: Sequence[Body], first: list[Awaitable[None] | None], now: float,
        lacking: Callable[[Body], str],
    ) -> None:
        async def make(kinds: frozenset[str], beside: list[Awaitable[None] | None]) -> None:
            work = [self._child(service, each, now, lacking) for each in rendered if each["kind"] in kinds]
            await all_of(each for each in (*beside, *work) if each is not None)

        order = stages({each["kind"] for each in rendered})
        await in_turn(partial(make, kinds, first if number == 0 else []) for number, kinds in enumerate(order))

    def pool(self, service: DisaggService, role: Role) -> Entry | None:
        """The pool of a role, if it is there and ours."""
        entry = self._cache.get("DisaggPool", service.metadata.namespace or "", role_name(service.name, role))
        ours = entry is not None and controller(entry.body["metadata"]) == service.metadata.uid
        return entry if ours and entry is not None and not entry.deleting else None

    async def scale(self, service: DisaggService, role: Role, count: int) -> bool:
        """Set the count of a role that has ``scaling``, as `kubectl scale` does; whether it was another one. Where the pool
        has gone, or is another one by now, the watch brings that.

        Raises:
            ApiError: it could not be written.
        """
        entry = self.pool(service, role)
        if entry is None or service.spec.role(role).scaling is None:
            return False
        if (entry.body.get("spec") or {}).get("replicas") == count:
            return False
        logger.info("%s of %s/%s is set to %d", role, entry.namespace, service.name, count)
        try:
            patch = {"metadata": {"uid": entry.uid}, "spec": {"replicas": count}}
            self._cache.on_written(entry.kind, await self._api.patch(entry.kind, entry.namespace, entry.name, patch))
        except ApiError as error:
            if not (error.missing or error.conflict):
                raise
            return False
        return True

    def _children(
        self,
        service: DisaggService,
        counts: Mapping[Role, int],
        key: PodKey | None,
        *,
        several: bool,
        pods: Mapping[Role, int] | None,
    ) -> tuple[Body, ...]:
        made_of = (service, tuple(sorted(counts.items())), key, several, tuple(sorted((pods or {}).items())))
        if self._rendered[0] != made_of:
            made = children(service, counts, self._settings, key, several=several, pods=pods)
            self._rendered = (made_of, made)
        return self._rendered[1]

    def _child(
        self, service: DisaggService, wanted: Body, now: float, lacking: Callable[[Body], str]
    ) -> Awaitable[None] | None:
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        entry = self._cache.get(kind, service.metadata.namespace or "", name)
        if entry is not None and (entry.deleting or self._foreign(entry, service, now)):
            return None
        what = differs(wanted, entry.body) if entry is not None else "missing"
        if not what:
            return None
        if words := lacking(wanted):
            return _wait(words)
        if entry is None:
            make = partial(apply, self._api, self._cache, initial_object(wanted), "it is missing")
            return self._first(service, kind, name, now, make)
        return apply(self._api, self._cache, wanted, f"{what} differs", entry.body)

    def _pool(self, service: DisaggService, role: Role, count: int, now: float) -> Awaitable[None] | None:
        name = role_name(service.name, role)
        entry = self._cache.get("DisaggPool", service.metadata.namespace or "", name)
        if entry is None:
            count = service.spec.replicas(role) if service.spec.suspend else count  # for when it is resumed
            return self._first(service, "DisaggPool", name, now, partial(self._create, pool(service, role, count)))
        if entry.deleting or self._foreign(entry, service, now):
            return None
        if service.spec.role(role).scaling is None:
            wanted = service.spec.replicas(role)
            there = (entry.body.get("spec") or {}).get("replicas")
            if there != wanted:
                return self._mirror(entry, service.name, there, wanted)
        return None

    def _foreign(self, entry: Entry, service: DisaggService, now: float) -> bool:
        if self._may_have(entry.kind, entry.body["metadata"], service):
            self._taken.pop((entry.kind, entry.name), None)
            return False
        self._taken[entry.kind, entry.name] = now + AGAIN_S
        return True

    @staticmethod
    def _may_have(kind: str, metadata: Body, service: DisaggService) -> bool:
        """Whether an object is ours, or may be taken over: a pool is never applied, so that none can be."""
        owned = ownership(metadata, service.name, service.metadata.uid or "")
        return owned == "ours" or (owned == "left" and kind != "DisaggPool")

    def _first(
        self, service: DisaggService, kind: str, name: str, now: float, make: Callable[[], Awaitable[None]]
    ) -> Awaitable[None] | None:
        """Make what seems not to be there, unless somebody else's object turns out to have the name."""
        if now < self._taken.get((kind, name), 0.0):
            return None
        return self._look_and_make(service, kind, name, now, make)

    async def _look_and_make(
        self, service: DisaggService, kind: str, name: str, now: float, make: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            there = await self._api.get(kind, service.metadata.namespace or "", name)
        except ApiError as error:
            if not error.missing:
                raise
        else:
            if not self._may_have(kind, there["metadata"], service):
                if (kind, name) not in self._taken:
                    logger.warning("%s %s/%s is somebody else's", kind, service.metadata.namespace, name)
                self._taken[kind, name] = now + AGAIN_S
                return
        self._taken.pop((kind, name), None)
        await make()

    async def _create(self, wanted: Body) -> None:
        kind, namespace = wanted["kind"], wanted["metadata"]["namespace"]
        logger.info("create %s %s/%s", kind, namespace, wanted["metadata"]["name"])
        try:
            self._cache.on_written(kind, await self._api.create(kind, namespace, wanted))
        except ApiError as error:
            if not error.conflict:  # made by a leader before us; the watch brings it
                raise

    async def _mirror(self, entry: Entry, service: str, there: Any, wanted: int) -> None:
        patch = {"metadata": {"uid": entry.uid}, "spec": {"replicas": wanted}}
        try:
            answer = await self._api.patch(entry.kind, entry.namespace, entry.name, patch)
        except ApiError as error:
            self._excuse(entry, error)
            return
        self._cache.on_written(entry.kind, answer)
        told = (entry.body.get("status") or {}).get("observedGeneration")
        known = ((entry.uid, told), self._mirrored.get(entry.name))
        self._mirrored[entry.name] = (entry.uid, answer["metadata"].get("generation"))
        # Of a generation that was seen before: the service has changed, not the pool.
        if told is not None and (entry.uid, entry.body["metadata"].get("generation")) not in known:
            words = f"replicas {there} put back to {wanted} of DisaggService {service}; write scaling there to scale here"
            self._events.emit(entry, "Warning", "PoolScaledBack", words)

    async def _delete(self, entry: Entry) -> None:
        logger.info("delete %s %s/%s: not asked for", entry.kind, entry.namespace, entry.name)
        try:
            await self._api.delete(entry.kind, entry.namespace, entry.name, entry.uid)
        except ApiError as error:
            self._excuse(entry, error)
        else:
            self._cache.missing(entry)

    def _excuse(self, entry: Entry, error: ApiError) -> None:
        """It has gone, or is another one by now, which the watch brings: nothing is wrong."""
        if error.missing:
            self._cache.missing(entry)
        elif not error.conflict:
            raise error


async def _wait(words: str) -> None:
    raise NotYet(words)
