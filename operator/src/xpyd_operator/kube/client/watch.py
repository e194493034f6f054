"""Between kopf's watches and the cache: complete lists, single events, and whom they wake.

kopf lists and watches, comes back after cuts and notices new CRDs. Two things it does not tell its handlers: that a list is
complete, and what is missing from a list that was fetched again after a cut (deletions in between are lost). Both are read
here from the lists themselves, as they pass through the session that kopf is given:

    kopf ── GET /api/v1/pods ──▶ session ─▶ API server        what is in no list any more is gone;
                                   │ items, resourceVersion    rounds begin when each kind was listed once
                                   ▼
                                 cache ◀── ADDED, MODIFIED, DELETED ── handlers ◀── kopf
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

from xpyd_operator.kube.client.api import RESOURCES
from xpyd_operator.kube.client.cache import KINDS, OWNER_KIND, WatchCache
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.render.labels import SERVICE

logger = logging.getLogger(__name__)
_COLLECTION: Final = re.compile(
    r"/(api|apis/(?P<group>[^/]+))/(?P<version>v\d\w*)(/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)$")
_KINDS = {(RESOURCES[kind].version, RESOURCES[kind].plural): kind for kind in KINDS}
_EVERYWHERE: Final = None
UNWATCHED_S = 10.0
"""A kind that nobody watches for so long, while others of its namespace are watched, was overlooked."""

Wake = Callable[[str, str], None]


class _Metadata(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion", default="")
    more: str = msgspec.field(name="continue", default="")


class _ListAnswer(msgspec.Struct):
    metadata: _Metadata
    kind: str = ""
    version: str = msgspec.field(name="apiVersion", default="")
    items: list[dict[str, Any]] | None = None


_DECODER = msgspec.json.Decoder(_ListAnswer)


class Watch:
    """Feeds one cache. ``wake(namespace, service)`` is called for what changed, once everything there is known."""

    def __init__(self, cache: WatchCache, metrics: Metrics, namespaces: Iterable[str], wake: Wake) -> None:
        self.filled = asyncio.Event()
        """Set once there is nothing left to wait for."""
        self._cache = cache
        self._metrics = metrics
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (_EVERYWHERE,)
        self._wake = wake
        self._listed: dict[str | None, set[str]] = {}
        """Kinds that were listed, by namespace (None: all namespaces in one list)."""
        self._streams: dict[str | None, dict[str, ClientResponse]] = {}
        """The watch of each kind that was begun last, by namespace."""
        self._unwatched_since: float | None = None
        self._unreadable: dict[str, str] = {}
        """Why the last list of a kind was not taken."""

    # What is known

    def complete(self, namespace: str) -> bool:
        """Whether each kind was listed where ``namespace`` is."""
        where = _EVERYWHERE if self._namespaces == (_EVERYWHERE,) else namespace
        return len(self._listed.get(where, ())) == len(KINDS)

    def missing(self) -> str:
        """What was not listed yet, in words; empty when there is nothing left to wait for.

        A namespace that is looked after and does not exist is not waited for.
        """
        begun = [where for where in self._namespaces if where in self._listed]
        if not begun:
            names = ", ".join(str(where) for where in self._namespaces if where is not None)
            return f"nothing was listed yet in {names}" if names else "nothing was listed yet"
        kinds = {kind for where in begun for kind in KINDS if kind not in self._listed[where]}
        return f"not listed yet: {', '.join(kind for kind in KINDS if kind in kinds)}" if kinds else ""

    def unwatched_kinds(self, now: float) -> str:
        """Kinds that nobody has watched for ``UNWATCHED_S``, in words; to be called every second (``now`` is monotonic).

        kopf looks for resources when a CRD changes, and the API server may offer a new one only after the last change that
        is seen; nobody then looks again. While nothing at all is watched, the API server is away and kopf waits for it.
        """
        live = {where: {kind for kind, stream in streams.items() if not stream.closed}
                for where, streams in self._streams.items()}
        lacking = {kind for kinds in live.values() if kinds for kind in KINDS if kind not in kinds}
        if not lacking:
            self._unwatched_since = None
        elif self._unwatched_since is None:
            self._unwatched_since = now
        elif now - self._unwatched_since >= UNWATCHED_S:
            kinds = [kind for kind in KINDS if kind in lacking]
            reasons = [self._unreadable[kind] for kind in kinds if kind in self._unreadable]
            return "; ".join([f"not watched: {', '.join(kinds)}", *reasons])
        return ""

    def begin(self) -> None:
        """Kopf starts: its earlier watches are over."""
        self._streams.clear()
        self._unwatched_since = None

    # What comes in

    def event(self, kind: str, type_: str | None, body: dict[str, Any]) -> None:
        """Kopf shows an object. ``type_`` is None for what a list brought, which is known already."""
        self._metrics.on_watched(kind, (type_ or "listed").lower())
        if type_ is None:
            return
        news = self._cache.on_deleted(kind, body) if type_ == "DELETED" else self._cache.on_seen(kind, body)
        if news:
            self._tell({_service(kind, body)})

    async def pass_on(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Middleware of kopf's session: counts each request, and reads the lists of what we watch."""
        found = _COLLECTION.search(request.url.path)
        watching = request.url.query.get("watch") == "true"
        verb = "watch" if watching else "list" if found else "get"
        resource = found["plural"] if found else "discovery"
        started = time.perf_counter()
        code = 0
        try:
            response = await handler(request)
            code = response.status
        finally:
            self._metrics.request(verb, resource, code, time.perf_counter() - started)
        kind = _kind(found) if found else None
        if found is not None and kind is not None and code == 200:
            if watching:
                self._streams.setdefault(found["namespace"], {})[kind] = response
            else:
                self._list(kind, found["namespace"], await response.read())
        return response

    def _list(self, kind: str, namespace: str | None, raw: bytes) -> None:
        try:
            listed, version = _read(raw)
        except ValueError as error:
            # kopf lists again then, and says nothing of it
            self._unreadable[kind] = f"the list of {kind}s ({len(raw)} bytes) cannot be read: {error}"
            raise aiohttp.ClientPayloadError(self._unreadable[kind]) from None
        self._unreadable.pop(kind, None)
        items = listed.items or []
        for item in items:
            item.setdefault("kind", kind)
            item.setdefault("apiVersion", listed.version)
        changed = self._cache.on_listed(kind, namespace, items, version)
        complete_before = self.complete(namespace or "")
        self._listed.setdefault(namespace, set()).add(kind)
        if not complete_before and self.complete(namespace or ""):
            where = f" in {namespace}" if namespace else ""
            logger.info("everything was listed once%s: %d objects", where, len(self._cache))
            changed = {pair for pair in self._cache.names() if namespace in (None, pair[0])}
        if not self.missing():
            self.filled.set()
        self._tell(changed)

    def _tell(self, services: Iterable[tuple[str, str]]) -> None:
        for namespace, service in services:
            if service and self.complete(namespace):
                self._wake(namespace, service)


def _read(raw: bytes) -> tuple[_ListAnswer, int]:
    """A list and its version. Raises ValueError."""
    listed = _DECODER.decode(raw)  # its errors are ValueErrors
    if listed.metadata.more:
        raise ValueError("it came in parts, which was not asked for")
    return listed, int(listed.metadata.version)


def _kind(found: re.Match[str]) -> str | None:
    version = f"{found['group']}/{found['version']}" if found["group"] else found["version"]
    return _KINDS.get((version, found["plural"]))


def _service(kind: str, body: dict[str, Any]) -> tuple[str, str]:
    """(namespace, name) of the service that an object is of; no name where it says none."""
    metadata = body["metadata"]
    if kind == OWNER_KIND:
        return metadata.get("namespace", ""), metadata["name"]
    return metadata.get("namespace", ""), (metadata.get("labels") or {}).get(SERVICE, "")
