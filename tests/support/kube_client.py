"""A small client of the API server for tests, so that nothing of the operator is judged by its own code.

    async with Kube(kubeconfig) as kube:
        await kube.create("Pod", {...})
        pods = Mirror(kube, "Pod", "team-a")          objects by name, kept by list and watch
        await pods.catch_up()                         until they are as the API server has them now
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
import yaml
from background import Background

Object = dict[str, Any]
DEADLINE_S = 60.0
AGAIN_S = 0.1
HEARD_S = 0.01
CAUGHT_UP_S = 240.0
"""For a watch on a full machine, or one that is begun anew."""
REFUSED_S = 240.0
WITH_NIC = {"containers": [{"name": "c", "image": "i", "resources": {"limits": {"example.com/nic": 1}}}]}
NO_NIC = {"requests.example.com/nic": "0"}
"""Of a quota: it is in force once a pod ``WITH_NIC`` is refused."""
NAMES = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""A list without what is in the objects."""

_KINDS = {
    "Namespace": ("/api/v1", "namespaces", False),
    "Node": ("/api/v1", "nodes", False),
    "Pod": ("/api/v1", "pods", True),
    "Service": ("/api/v1", "services", True),
    "Secret": ("/api/v1", "secrets", True),
    "Event": ("/api/v1", "events", True),
    "Deployment": ("/apis/apps/v1", "deployments", True),
    "ReplicaSet": ("/apis/apps/v1", "replicasets", True),
    "DaemonSet": ("/apis/apps/v1", "daemonsets", True),
    "Job": ("/apis/batch/v1", "jobs", True),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies", True),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets", True),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases", True),
    "ClusterRoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", False),
    "CustomResourceDefinition": ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions", False),
    "DisaggService": ("/apis/xpyd.dev", "disaggservices", True),
    "DisaggPool": ("/apis/xpyd.dev", "disaggpools", True),
}
OURS = "xpyd.dev"
VERSION = "v1beta1"
"""Of our own kinds."""


class KubeError(Exception):
    """The API server said no."""

    def __init__(self, status: int, body: Any) -> None:
        reason = body.get("reason", "") if isinstance(body, dict) else ""
        message = body.get("message", "") if isinstance(body, dict) else str(body)
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


def path_of(kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """URL path of a collection or an object."""
    prefix, plural, namespaced = _KINDS[kind]
    if prefix.endswith(OURS):
        prefix += f"/{VERSION}"
    assert not (namespaced and name and not namespace), f"{kind} {name}: in which namespace?"
    inside = f"/namespaces/{namespace}" if namespaced and namespace else ""
    return f"{prefix}{inside}/{plural}" + (f"/{name}" if name else "") + (f"/{subresource}" if subresource else "")


def version_of(item: Object) -> int:
    """The resourceVersion of an object or a list; a later one is greater, whatever the kind."""
    return int(item["metadata"]["resourceVersion"])


class Kube:
    """Requests as the user of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        self.server: str = cluster["server"]
        self.ssl = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        self._headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        if "client-certificate-data" in user:
            with tempfile.NamedTemporaryFile() as both:
                for part in ("client-certificate-data", "client-key-data"):
                    both.write(base64.b64decode(user[part]) + b"\n")
                both.flush()
                self.ssl.load_cert_chain(both.name)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self.ssl, limit=64)
        self._session = aiohttp.ClientSession(self.server, connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        assert self._session is not None
        await self._session.close()

    async def request(self, method: str, path: str, body: Any = None, *, content: str = "application/json",
                      accept: str = "*/*", **query: str) -> Any:
        """One request; 429 is tried again. Raises KubeError, aiohttp.ClientError, TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    return await self._request(method, path, body, {"Content-Type": content, "Accept": accept}, query)
                except KubeError as error:
                    if error.status != 429:  # such as while a CRD changes
                        raise
                await asyncio.sleep(AGAIN_S)

    async def _request(self, method: str, path: str, body: Any, headers: dict[str, str], query: dict[str, str]) -> Any:
        assert self._session is not None
        data = msgspec.json.encode(body) if body is not None else None
        if data is None:
            del headers["Content-Type"]
        async with self._session.request(method, path, data=data, params=query, headers=headers) as answer:
            raw = await answer.read()
            found = msgspec.json.decode(raw) if "json" in answer.content_type and raw else raw.decode()
            if answer.status >= 400:
                raise KubeError(answer.status, found)
            return found

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return await self.request("GET", path_of(kind, namespace, name))  # type: ignore[no-any-return]

    async def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None where it does not exist."""
        try:
            return await self.get(kind, namespace, name)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def items(self, kind: str, namespace: str = "", **query: str) -> list[Object]:
        return (await self.request("GET", path_of(kind, namespace), **query))["items"]  # type: ignore[no-any-return]

    async def versions(self, kind: str, namespace: str) -> tuple[int, dict[str, int]]:
        """The resourceVersion of now, and those of all objects by name."""
        listed = await self.request("GET", path_of(kind, namespace), accept=NAMES)
        there = {item["metadata"]["name"]: version_of(item) for item in listed["items"] or ()}  # null: none
        return version_of(listed), there

    async def create(self, kind: str, body: Object, namespace: str = "") -> Object:
        return await self.request("POST", path_of(kind, namespace), body)  # type: ignore[no-any-return]

    async def merge(self, kind: str, namespace: str, name: str, patch: Object, subresource: str = "") -> Object:
        """JSON merge patch."""
        path = path_of(kind, namespace, name, subresource)
        return await self.request("PATCH", path, patch, content="application/merge-patch+json")  # type: ignore[no-any-return]

    async def apply(self, kind: str, namespace: str, body: Object, manager: str = "person") -> Object:
        """Server-side apply, as a person's ``kubectl apply --server-side`` does it."""
        path = path_of(kind, namespace, body["metadata"]["name"])
        return await self.request("PATCH", path, body, content="application/apply-patch+yaml", fieldManager=manager,  # type: ignore[no-any-return]
                                  force="true")

    async def delete(self, kind: str, namespace: str, name: str, *, grace_s: int | None = None, uid: str = "",
                     propagation: str = "Background") -> None:
        """Delete; gone already is fine."""
        options: Object = {"propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self.request("DELETE", path_of(kind, namespace, name), options)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    async def wait_refused(self, namespace: str, spec: Object, words: str) -> None:
        """Until the API server would not take such a pod, and says so. Raises TimeoutError.

        It hears of the labels of a namespace, of a quota and of a policy a moment after it has taken them.
        """
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}
        async with asyncio.timeout(REFUSED_S):
            while True:
                try:
                    await self.request("POST", path_of("Pod", namespace), pod, dryRun="All")
                except KubeError as error:
                    if words in str(error):
                        return
                await asyncio.sleep(AGAIN_S)

    async def watch(self, kind: str, namespace: str, since: str) -> AsyncIterator[tuple[str, Object]]:
        """Events after a resourceVersion until the connection ends."""
        assert self._session is not None
        query = {"watch": "true", "resourceVersion": since, "allowWatchBookmarks": "true"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with self._session.get(path_of(kind, namespace), params=query, timeout=timeout) as answer:
            if answer.status >= 400:
                raise KubeError(answer.status, await answer.text())
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = msgspec.json.decode(line)
                    yield event["type"], event["object"]


class Mirror(Background):
    """Objects of one kind and namespace by name, as a watch shows them; it lists again when the watch breaks.

    ``listeners`` hear ``(was, now)`` of every change; None stands for not there.
    """

    def __init__(self, kube: Kube, kind: str, namespace: str) -> None:
        self._kube = kube
        self.kind = kind
        self.namespace = namespace
        self.objects: dict[str, Object] = {}
        self.listeners: list[Callable[[Object | None, Object | None], None]] = []
        self._listed = asyncio.Event()
        self._heard = 0
        """Up to this resourceVersion all is known, if not further."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        async with asyncio.timeout(DEADLINE_S):
            await self._listed.wait()
        return self

    async def catch_up(self) -> None:
        """Until it shows all that had been written when this began. Raises TimeoutError.

        Each kind has a watch of its own, which may be behind what a test wrote itself, or behind the watch of another kind.
        """
        async with asyncio.timeout(CAUGHT_UP_S):
            while True:
                try:
                    now, there = await self._kube.versions(self.kind, self.namespace)
                    break
                except (KubeError, aiohttp.ClientError, OSError):  # it comes back, or a CRD does
                    await asyncio.sleep(AGAIN_S)
            while True:
                here = {name: version_of(item) for name, item in self.objects.items()}
                if self._heard >= now or here == there:
                    return
                await asyncio.sleep(HEARD_S)

    async def work(self) -> None:
        """Follow what the API server tells."""
        while True:
            try:
                await self._follow()
            except (KubeError, aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
                await asyncio.sleep(AGAIN_S)  # the API server is away: tests do that on purpose

    async def _follow(self) -> None:
        listed = await self._kube.request("GET", path_of(self.kind, self.namespace))
        found = {item["metadata"]["name"]: item for item in listed["items"]}
        names = [*(name for name in self.objects if name not in found), *found]  # what is gone first
        changes = [change for name in names if (change := self._put(name, found.get(name)))]
        for change in changes:  # heard when all of them are here: a list has no order of time
            self._tell(*change)
        self._heard = version_of(listed)
        self._listed.set()
        async for event, item in self._kube.watch(self.kind, self.namespace, listed["metadata"]["resourceVersion"]):
            if event == "ERROR":
                return
            if event != "BOOKMARK":
                change = self._put(item["metadata"]["name"], None if event == "DELETED" else item)
                if change:
                    self._tell(*change)
            self._heard = version_of(item)

    def _put(self, name: str, now: Object | None) -> tuple[Object | None, Object | None] | None:
        """What it was and is; None: nothing has changed."""
        was = self.objects.get(name)
        if now is None:
            self.objects.pop(name, None)
        elif was is not None and was["metadata"]["resourceVersion"] == now["metadata"]["resourceVersion"]:
            return None
        else:
            self.objects[name] = now
        return was, now

    def _tell(self, was: Object | None, now: Object | None) -> None:
        for listener in self.listeners:
            listener(was, now)
