"""Requests to the API server: plain dictionaries in and out, each with a deadline.

TLS, credentials and their renewal are the official client's (``login``); its models and its requests are left aside, since
thousands of pods are much cheaper as plain JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
import msgspec

from xpyd_operator.api.base import API_VERSION
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.server_clock import ServerClock
from xpyd_operator.render import gang, gateway
from xpyd_operator.render.labels import FIELD_MANAGER, SHARED_MANAGER

Body = dict[str, Any]
PATIENCE_S = 5.0
"""Longest ``Retry-After`` that is waited for."""
UNREACHABLE = 0
"""Status of an ApiError where no answer came."""


class Resource(msgspec.Struct, frozen=True):
    """Where objects of a kind are."""

    version: str
    plural: str

    cluster: bool = False
    """Its objects are in no namespace."""

    def path(self, namespace: str, name: str = "", sub: str = "") -> str:
        """Path below the server's address."""
        where = [] if self.cluster else ["namespaces", quote(namespace, safe="")]
        return self._path(*where, self.plural, quote(name, safe=""), sub)

    @property
    def collection_path(self) -> str:
        """Path of all objects, of whatever namespace."""
        return self._path(self.plural)

    def _path(self, *parts: str) -> str:
        root = f"/api/{self.version}" if "/" not in self.version else f"/apis/{self.version}"
        return "/".join(part for part in (root, *parts) if part)


RESOURCES: Mapping[str, Resource] = {
    "DisaggService": Resource(API_VERSION, "disaggservices"),
    "DisaggPool": Resource(API_VERSION, "disaggpools"),
    "Pod": Resource("v1", "pods"),
    "Service": Resource("v1", "services"),
    "Secret": Resource("v1", "secrets"),
    "Event": Resource("v1", "events"),
    "NetworkPolicy": Resource("networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "Deployment": Resource("apps/v1", "deployments"),
    "DaemonSet": Resource("apps/v1", "daemonsets"),
    "Job": Resource("batch/v1", "jobs"),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
    "Node": Resource("v1", "nodes", cluster=True),
    gateway.GATEWAY: Resource(f"{gateway.GROUP}/v1", "gateways"),
    **{kind: Resource(*where) for kind, where in gateway.KINDS.items()},
    **{gang.resource_of(each): Resource(each, gang.PLURAL) for versions in gang.VERSIONS.values() for each in versions},
}


class ApiError(XpydError):
    """The API server refused a request, or did not answer in time (``status`` 0)."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        """Kubernetes' own word: ``NotFound``, ``AlreadyExists``, ``Conflict``, ``Forbidden`` …"""
        self.message = message
        self.retry_after = retry_after
        """Seconds, where the server says."""

    @property
    def missing(self) -> bool:
        """There is no such object."""
        return self.status == 404

    @property
    def exists(self) -> bool:
        """There is an object of this name already. Another 409 says that a write was in the way, such as one of a quota."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def conflict(self) -> bool:
        """The object is not as the request took it to be (a patch says so of the uid with 422), or exists already."""
        return self.status == 409 or (self.status == 422 and "metadata.uid: Invalid value" in self.message)


class Counter(Protocol):
    """Takes note of requests (``kube.client.metrics.Metrics``)."""

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request was answered with ``code``, or not at all (0)."""


class _Cause(msgspec.Struct):
    reason: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] = []
    retry_after: float | None = msgspec.field(name="retryAfterSeconds", default=None)


class _Status(msgspec.Struct):
    """``kind: Status``, what the server says instead of an object."""

    reason: str = ""
    message: str = ""
    details: _Details | None = None


class _Question(msgspec.Struct, frozen=True):
    method: str
    path: str
    query: Mapping[str, str]
    content: str
    body: Body | None


class Api:
    """A bounded number of requests at a time; as an async context manager it closes its connections."""

    def __init__(
        self, session: aiohttp.ClientSession, host: str, counter: Counter | None = None, *, width: int = 32,
        timeout_s: float = 10.0,
    ) -> None:
        """``session``: logged in at ``host``, and closed with this."""
        self._session = session
        self._host = host
        self._counter = counter
        self._turns = asyncio.Semaphore(width)
        self._timeout_s = timeout_s
        self.server_clock = ServerClock(time.time)
        self.requests = 0
        """How many were sent."""

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def get(self, kind: str, namespace: str, name: str) -> Body:
        """One object."""
        return await self._ask("get", kind, namespace, name)

    async def create(self, kind: str, namespace: str, body: Body, *, dry_run: bool = False) -> Body:
        """Make an object that is not there yet (409 where it is). A dry run makes nothing, and is refused for a field that
        the API server does not know (400), which it would else leave out.
        """
        return await self._ask("create", kind, namespace, body=body, dry_run=dry_run)

    async def apply(self, kind: str, namespace: str, body: Body, *, shared: bool = False) -> Body:
        """Server-side apply, taking over fields of others. ``shared``: in another name, which owns the fields beside others
        that have the same values, and is refused (409) where a value is another one by now.
        """
        name, query = body["metadata"]["name"], {"fieldManager": SHARED_MANAGER} if shared else {"force": "true"}
        return await self._ask("apply", kind, namespace, name, body=body, query=query)

    async def items(self, kind: str, namespace: str = "", *, labels: str = "", limit: int = 0) -> Body:
        """A list: its ``items``.

        Args:
            kind: of the objects.
            namespace: empty: all of them.
            labels: a label selector.
            limit: most objects that are told; 0: all.
        """
        query = {"labelSelector": labels, "limit": str(limit or "")}
        return await self._ask("list", kind, namespace, query={name: value for name, value in query.items() if value})

    async def served_resources(self, version: str) -> frozenset[str]:
        """The resources that the API server has in ``group/version``; empty where it has none."""
        ask = _Question("GET", f"/apis/{version}", {}, _METHODS["get"][1], None)
        async with self._turns:
            try:
                found = await self._once("get", "discovery", ask)
            except ApiError as error:
                if error.missing:
                    return frozenset()
                raise
        return frozenset(str(each["name"]) for each in found.get("resources") or ())

    async def patch(self, kind: str, namespace: str, name: str, body: Body) -> Body:
        """Merge patch. A ``metadata.uid`` or ``resourceVersion`` in it is a precondition (409)."""
        return await self._ask("patch", kind, namespace, name, body=body)

    async def patch_status(self, kind: str, namespace: str, name: str, status: Body, uid: str = "") -> Body:
        """Merge patch of the status alone; ``uid``: only of this very object (409)."""
        body: Body = {"status": status}
        if uid:
            body["metadata"] = {"uid": uid}
        return await self._ask("patch", kind, namespace, name, sub="status", body=body)

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "", *, version: str = "") -> Body:
        """Delete, with the object's own grace period; ``uid``: only this very object, ``version``: only as it was then
        (its resourceVersion; 409).
        """
        body: Body = {"propagationPolicy": "Background"}
        if seen := {name: value for name, value in (("uid", uid), ("resourceVersion", version)) if value}:
            body["preconditions"] = seen
        return await self._ask("delete", kind, namespace, name, body=body)

    async def _ask(self, verb: str, kind: str, namespace: str = "", name: str = "", *, sub: str = "",
                   body: Body | None = None, query: Mapping[str, str] | None = None, dry_run: bool = False) -> Body:
        resource = RESOURCES[kind]
        method, content = _METHODS[verb]
        question = dict(query or {})
        if method in ("POST", "PATCH"):
            question.setdefault("fieldManager", FIELD_MANAGER)
        if dry_run:
            question |= {"dryRun": "All", "fieldValidation": "Strict"}
        path = resource.collection_path if verb == "list" and not namespace else resource.path(namespace, name, sub)
        label = f"{resource.plural}/{sub}" if sub else resource.plural
        async with self._turns:
            for attempt in (1, 2):
                try:
                    return await self._once(verb, label, _Question(method, path, question, content, body))
                except ApiError as error:
                    if error.status != 429 or attempt == 2 or (error.retry_after or 1.0) > PATIENCE_S:
                        raise
                    await asyncio.sleep(error.retry_after or 1.0)
        raise AssertionError

    async def _once(self, verb: str, label: str, ask: _Question) -> Body:
        started = time.perf_counter()
        status = UNREACHABLE
        what = f"{ask.method} {ask.path}"
        self.requests += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                status, retry_after, raw = await self._send(ask)
            if not 200 <= status < 300:
                raise _refused(status, retry_after, raw, what)
            decoded: Body = msgspec.json.decode(raw)
        except TimeoutError:
            raise ApiError(UNREACHABLE, "Timeout", f"{what}: no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(UNREACHABLE, "Unreachable", f"{what}: {error or type(error).__name__}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(status, "BadAnswer", f"{what}: the answer is not JSON: {error}") from None
        else:
            return decoded
        finally:
            if self._counter is not None:
                self._counter.request(verb, label, status, time.perf_counter() - started)

    async def _send(self, ask: _Question) -> tuple[int, str | None, bytes]:
        data = msgspec.json.encode(ask.body) if ask.body is not None else None
        headers = {"Accept": "application/json", "Content-Type": ask.content}
        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        began = self.server_clock.ours()
        asked = self._session.request(ask.method, f"{self._host}{ask.path}", params=ask.query, data=data, headers=headers,
                                      timeout=limit)
        async with asked as answer:
            self.server_clock.on_answer(answer.headers.get("date"), began)
            return answer.status, answer.headers.get("Retry-After"), await answer.read()


_METHODS = {
    "get": ("GET", "application/json"),
    "list": ("GET", "application/json"),
    "create": ("POST", "application/json"),
    "apply": ("PATCH", "application/apply-patch+yaml"),
    "patch": ("PATCH", "application/merge-patch+json"),
    "delete": ("DELETE", "application/json"),
}


def _refused(status: int, retry_after: str | None, raw: bytes, what: str) -> ApiError:
    try:
        said = msgspec.json.decode(raw, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = _Status(message=raw[:500].decode(errors="replace").strip())
    details = said.details or _Details()
    reason = next((cause.reason for cause in details.causes if cause.reason == "NamespaceTerminating"), said.reason)
    wait_s = float(retry_after) if retry_after and retry_after.isdecimal() else details.retry_after
    return ApiError(status, reason, said.message or f"{what}: {status}", wait_s)
