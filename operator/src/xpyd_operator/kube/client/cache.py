"""What the watches show, with our own writes on top: the operator's picture of the cluster.

Laws
    1. Of one name the body with the highest resourceVersion stays, whatever the order in which watch events and answers to
       our own writes come. Versions of one kind come from one counter, so they order objects of one name and different
       uid as well.
    2. What was deleted stays so: an answer that is older than the deletion does not bring it back. (A newer one does: for
       the API server, an object that loses our label and gets it back is deleted and comes again.)
    3. A deletion that is older than what is there, or of another uid, changes nothing.
       What the API server stops to serve is forgotten without that: it may serve the very same objects again.
    4. An object without our label is none of ours, and is not kept. Nor is ``managedFields`` of any: nobody here reads it.

Nothing here waits or asks; the caller is a single event loop. Bodies are shared: nobody may change one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from xpyd_operator.render import gateway
from xpyd_operator.render.labels import SERVICE

Body = dict[str, Any]
T = TypeVar("T")

OWNER_KIND = "DisaggService"
KINDS = (OWNER_KIND, "DisaggPool", "Pod", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment", "DaemonSet",
         "Job")
"""What is watched; all but the first by the label ``xpyd.dev/service``."""
POLLED = tuple(gateway.KINDS)
"""What is listed now and then, as it may not be served (``kube.routes.gateways``)."""
TOMBSTONES = 20_000
"""Deleted uids that are remembered, far more than answers can be under way."""


class Entry:
    """One object as it was last seen."""

    __slots__ = ("_derived", "body", "kind", "name", "namespace", "service", "uid", "version")

    def __init__(self, kind: str, body: Body) -> None:
        metadata = body["metadata"]
        self.kind = kind
        self.body = _kept(body)
        self.name: str = metadata["name"]
        self.namespace: str = metadata.get("namespace", "")
        self.uid: str = metadata.get("uid", "")
        self.version = _version(metadata)
        self.service: str = self.name if kind == OWNER_KIND else (metadata.get("labels") or {}).get(SERVICE, "")
        self._derived: tuple[Callable[[Body], Any], Any] | None = None

    @property
    def deleting(self) -> bool:
        """Its deletion has begun."""
        return bool(self.body["metadata"].get("deletionTimestamp"))

    def derive(self, how: Callable[[Body], T]) -> T:
        """``how(body)``, computed once for this body."""
        if self._derived is None or self._derived[0] is not how:
            self._derived = (how, how(self.body))
        found: T = self._derived[1]
        return found


class WatchCache:
    """See the module."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str], Entry] = {}
        self._of_service: dict[tuple[str, str, str], dict[str, Entry]] = {}
        self._dead: dict[tuple[str, str], int] = {}
        """(kind, uid) → version of the deletion."""

    # What comes in

    def on_seen(self, kind: str, body: Body) -> bool:
        """A watch shows an object. Returns whether that was news."""
        return self._put(Entry(kind, body))

    def on_written(self, kind: str, body: Body) -> bool:
        """The API server answered one of our writes with this object. Returns whether that was news."""
        return self._put(Entry(kind, body))

    def on_deleted(self, kind: str, body: Body) -> bool:
        """An object does not exist any more. Returns whether that was news."""
        entry = Entry(kind, body)
        self._bury(entry, entry.version)
        there = self._entries.get((kind, entry.namespace, entry.name))
        if there is None or there.uid != entry.uid or 0 < entry.version < there.version:
            return False
        self._drop(there)
        return True

    def missing(self, entry: Entry, version: int = 0) -> None:
        """The API server says that there is no such object (404), or that its name has another uid (409)."""
        self._bury(entry, max(version, entry.version))
        if self._entries.get((entry.kind, entry.namespace, entry.name)) is entry:
            self._drop(entry)

    def on_listed(self, kind: str, namespace: str | None, bodies: Iterable[Body], version: int) -> set[tuple[str, str]]:
        """Everything of one kind (None: in all namespaces) as of ``version``: what is not in it and not newer is gone.

        Returns:
            (namespace, service) of everything that was not as the list has it.
        """
        changed: set[tuple[str, str]] = set()
        there: set[tuple[str, str]] = set()
        for body in bodies:
            entry = Entry(kind, body)
            there.add((entry.namespace, entry.name))
            if self._put(entry):
                changed.add((entry.namespace, entry.service))
        for entry in [each for each in self._entries.values() if each.kind == kind]:
            inside = namespace is None or entry.namespace == namespace
            if inside and entry.version <= version and (entry.namespace, entry.name) not in there:
                self.missing(entry, version)
                changed.add((entry.namespace, entry.service))
        return changed

    def on_unserved(self, kind: str) -> set[tuple[str, str]]:
        """The API server serves none of this kind, so nothing is known of it; once it is served again, the same
        objects, of the same versions, may be there.

        Returns:
            (namespace, service) of everything that was known.
        """
        there = [each for each in self._entries.values() if each.kind == kind]
        for entry in there:
            self._drop(entry)
        return {(entry.namespace, entry.service) for entry in there}

    # What is there

    def get(self, kind: str, namespace: str, name: str) -> Entry | None:
        """One object."""
        return self._entries.get((kind, namespace, name))

    def of_service(self, kind: str, namespace: str, service: str) -> list[Entry]:
        """The objects of one kind that carry the label of a service, in no order."""
        return list(self._of_service.get((kind, namespace, service), {}).values())

    def services(self) -> list[tuple[str, str]]:
        """(namespace, name) of every DisaggService."""
        return [(namespace, name) for kind, namespace, name in self._entries if kind == OWNER_KIND]

    def names(self) -> set[tuple[str, str]]:
        """(namespace, name) of every DisaggService, and of those that are gone and have left something."""
        return {(namespace, name) for _, namespace, name in self._of_service}

    def kinds(self, kinds: Iterable[str]) -> set[str]:
        """Those of these kinds of which something is there."""
        there = {kind for kind, _, _ in self._entries}
        return there & set(kinds)

    def __len__(self) -> int:
        return len(self._entries)

    def _put(self, entry: Entry) -> bool:
        there = self._entries.get((entry.kind, entry.namespace, entry.name))
        if entry.version <= self._dead.get((entry.kind, entry.uid), -1):
            return False
        if there is not None and entry.version <= there.version:
            return False
        if there is not None:
            self._drop(there)
        if not entry.service:
            if there is not None:
                self._bury(entry, entry.version)
            return there is not None
        self._entries[(entry.kind, entry.namespace, entry.name)] = entry
        self._of_service.setdefault((entry.kind, entry.namespace, entry.service), {})[entry.name] = entry
        return True

    def _drop(self, entry: Entry) -> None:
        del self._entries[(entry.kind, entry.namespace, entry.name)]
        of_service = self._of_service[(entry.kind, entry.namespace, entry.service)]
        del of_service[entry.name]
        if not of_service:
            del self._of_service[(entry.kind, entry.namespace, entry.service)]

    def _bury(self, entry: Entry, version: int) -> None:
        at = (entry.kind, entry.uid)
        self._dead[at] = max(version, self._dead.pop(at, -1))
        while len(self._dead) > TOMBSTONES:
            del self._dead[next(iter(self._dead))]


def _kept(body: Body) -> Body:
    metadata = body["metadata"]
    if "managedFields" not in metadata:
        return body
    return body | {"metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}


def _version(metadata: Body) -> int:
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
