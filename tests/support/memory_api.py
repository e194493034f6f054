"""A store that answers as ``kube.client.api.Api`` does, for unit tests: no network, no defaults, no admission."""

from __future__ import annotations

import base64
import copy
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import KINDS, WatchCache
from xpyd_operator.kube.client.server_clock import ServerClock

Body = dict[str, Any]
_uids = itertools.count(1)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class MemoryApi:
    """``asked``: verb, kind and name of every request. ``fault``: raised instead of an answer where it returns one."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Body] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.resources: dict[str, frozenset[str]] = {}
        """What is served beside what is always there, by ``group/version``."""
        self.fault: Callable[[str, str, str], ApiError | None] = lambda verb, kind, name: None
        self.clock: Callable[[], float] = time.time
        """Unix seconds: of ``creationTimestamp``."""
        self.server_clock = ServerClock(time.time)
        self._version = 1000

    def show(self, cache: WatchCache) -> None:
        """As complete lists would."""
        for kind in KINDS:
            cache.on_listed(kind, None, [body for at, body in self.objects.items() if at[0] == kind], self._version)

    def run_pods(self, cache: WatchCache, status: Body, starts: Callable[[Body], bool] = lambda _: True) -> None:
        """Every pod that was made has this status, as a kubelet would have it, where it starts; ended ones go."""
        for (kind, namespace, name), body in list(self.objects.items()):
            if kind != "Pod":
                continue
            if body["metadata"].get("deletionTimestamp"):
                del self.objects[kind, namespace, name]
                cache.on_deleted(kind, body)
            elif not body.get("status") and starts(body):
                cache.on_seen(kind, self.put(kind, body | {"status": status}))

    def put(self, kind: str, body: Body) -> Body:
        """Without a request."""
        self._version += 1
        created = datetime.fromtimestamp(self.clock(), UTC).strftime("%FT%TZ")
        fresh = {"uid": f"uid-{next(_uids)}", "generation": 1, "creationTimestamp": created}
        metadata = fresh | body["metadata"] | {"resourceVersion": str(self._version)}
        at = (kind, metadata.get("namespace", ""), metadata["name"])
        self.objects[at] = copy.deepcopy(body) | {"kind": kind, "metadata": metadata}
        return self.objects[at]

    async def get(self, kind: str, namespace: str, name: str) -> Body:
        self._note("get", kind, name)
        return self._there(kind, namespace, name)

    async def create(self, kind: str, namespace: str, body: Body, *, dry_run: bool = False) -> Body:
        name = body["metadata"]["name"]
        self._note("dry-run" if dry_run else "create", kind, name)
        if (kind, namespace, name) in self.objects:
            raise ApiError(409, "AlreadyExists", f"{kind} {name} already exists")
        body = {"metadata": {"namespace": namespace}} | body
        if kind == "Secret":
            data = {item: base64.b64encode(text.encode()).decode() for item, text in body.get("stringData", {}).items()}
            body = {part: value for part, value in body.items() if part != "stringData"} | {"data": data}
        return body if dry_run else self.put(kind, body)

    async def apply(self, kind: str, namespace: str, body: Body, *, shared: bool = False) -> Body:
        name = body["metadata"]["name"]
        self._note("share" if shared else "apply", kind, name)
        if shared:
            there = self._there(kind, namespace, name)
            if merged(there, body) != there:
                raise ApiError(409, "Conflict", "another value")
            return there
        return self.put(kind, merged(self.objects.get((kind, namespace, name), {}), body))

    async def served_resources(self, version: str) -> frozenset[str]:
        self._note("get", "discovery", version)
        return self.resources.get(version, frozenset())

    async def items(self, kind: str, namespace: str = "", *, labels: str = "", limit: int = 0) -> Body:
        self._note("list", kind, labels)
        key, _, value = labels.partition("=")

        def marked(body: Body) -> bool:
            has: dict[str, str] = body["metadata"].get("labels") or {}
            return not key or (key in has and value in ("", has[key]))

        found = [body for at, body in sorted(self.objects.items()) if at[0] == kind and namespace in ("", at[1])
                 and marked(body)]
        return {"metadata": {"resourceVersion": str(self._version)}, "items": found[: limit or len(found)]}

    async def patch(self, kind: str, namespace: str, name: str, body: Body) -> Body:
        self._note("patch", kind, name)
        there = self._there(kind, namespace, name)
        version = body.get("metadata", {}).get("resourceVersion", there["metadata"]["resourceVersion"])
        if version != there["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        if body.get("metadata", {}).get("uid", there["metadata"]["uid"]) != there["metadata"]["uid"]:
            raise ApiError(422, "Invalid", "metadata.uid: Invalid value: field is immutable")
        grown = {"generation": there["metadata"]["generation"] + ("spec" in body)}
        return self.put(kind, merged(merged(there, body), {"metadata": grown}))

    async def patch_status(self, kind: str, namespace: str, name: str, status: Body, uid: str = "") -> Body:
        self._note("status", kind, name)
        return self.put(kind, merged(self._there(kind, namespace, name), {"status": status}))

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "", *, version: str = "") -> Body:
        self._note("delete", kind, name)
        there = self._there(kind, namespace, name)
        if uid and uid != there["metadata"]["uid"]:
            raise ApiError(409, "Conflict", "another uid")
        if version and version != there["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "another resourceVersion")
        if kind == "Pod":
            mark = {"deletionTimestamp": "2099-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
            return self.put(kind, merged(there, {"metadata": mark}))
        del self.objects[kind, namespace, name]
        return {"kind": "Status", "status": "Success"}

    def _note(self, verb: str, kind: str, name: str) -> None:
        self.asked.append((verb, kind, name))
        if error := self.fault(verb, kind, name):
            raise error

    def _there(self, kind: str, namespace: str, name: str) -> Body:
        found = self.objects.get((kind, namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", f"{kind} {name} not found")
        return found
