"""Gateway API for tests on a real API server: CRDs that take any field, and what a controller would say, by script.

    stage = GatewayStage(team.kube, team.namespace)
    await stage.serve(ROUTE)                                 until whoever asks what is served hears of it
    route = await stage.wait(ROUTE, "the route is made")
    await stage.answer(ROUTE, said("Accepted", "False", "NotAllowedByListeners"))
    await stage.end()                                        nothing of it is left in the cluster
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from kube_client import Kube, KubeError, Object

ROUTE, TLS, POOL, GATEWAY = "HTTPRoute", "BackendTLSPolicy", "InferencePool", "Gateway"
GROUPS = {ROUTE: "gateway.networking.k8s.io", TLS: "gateway.networking.k8s.io", GATEWAY: "gateway.networking.k8s.io",
          POOL: "inference.networking.k8s.io"}
PLURALS = {ROUTE: "httproutes", TLS: "backendtlspolicies", POOL: "inferencepools", GATEWAY: "gateways"}
PARENTS = {ROUTE: ("parents", "parentRef"), POOL: ("parents", "parentRef"), TLS: ("ancestors", "ancestorRef")}
"""Where a controller writes what it says of a Gateway."""
DEADLINE_S = 240.0
POLL_S = 0.2
MERGE = "application/merge-patch+json"
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition(kind: str, *, served: bool = True) -> Object:
    """A CRD of version v1: spec and status have any fields. A group of Kubernetes' own wants the annotation."""
    schema = {"type": "object", "properties": {"spec": ANYTHING, "status": {"x-kubernetes-preserve-unknown-fields": True}}}
    version = {"name": "v1", "served": served, "storage": True, "subresources": {"status": {}},
               "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": PLURALS[kind], "singular": kind.lower(), "listKind": f"{kind}List"}
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{PLURALS[kind]}.{GROUPS[kind]}",
                         "annotations": {"api-approved.kubernetes.io": "unapproved, written for tests"}},
            "spec": {"group": GROUPS[kind], "scope": "Namespaced", "names": names, "versions": [version]}}


def said(kind: str, status: str = "True", reason: str = "", message: str = "", **more: Any) -> Object:
    """A condition as a controller writes it."""
    return {"type": kind, "status": status, "reason": reason or kind, "message": message,
            "lastTransitionTime": "2026-01-01T00:00:00Z"} | more


class GatewayStage:
    """In one namespace. The CRDs are of the whole cluster, so that ``end`` has to be called."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace

    # CRDs

    async def serve(self, *kinds: str, served: bool = True) -> None:
        """Until the API server tells that it serves them, or that it does not."""
        for kind in kinds:
            crd = definition(kind, served=served)
            name = crd["metadata"]["name"]

            await self.until(partial(self._free, name), f"the {name} of before has gone")
            await self._kube.apply("CustomResourceDefinition", "", crd, manager="admin")
        for kind in kinds:
            await self.until(partial(self._told, kind, served=served), f"{kind} is {'' if served else 'not '}served")

    async def withdraw(self, *kinds: str) -> None:
        """Delete the CRDs, and with them all of their objects; until the API server does not serve them."""
        for kind in kinds:
            await self._kube.delete("CustomResourceDefinition", "", definition(kind)["metadata"]["name"])
        for kind in kinds:
            await self.until(partial(self._told, kind, served=False), f"{kind} is not served")

    async def end(self) -> None:
        """Delete all of them, and do not wait."""
        for kind in PLURALS:
            await self._kube.delete("CustomResourceDefinition", "", definition(kind)["metadata"]["name"])

    async def _free(self, name: str) -> bool:
        there = await self._kube.find("CustomResourceDefinition", "", name)
        return there is None or not there["metadata"].get("deletionTimestamp")

    async def _told(self, kind: str, *, served: bool) -> bool:
        try:
            found = await self._kube.request("GET", f"/apis/{GROUPS[kind]}/v1")
        except KubeError as error:
            if error.status != 404:
                raise
            return not served
        return (PLURALS[kind] in {each["name"] for each in found["resources"]}) is served

    # Objects

    def _path(self, kind: str, name: str = "", sub: str = "") -> str:
        parts = ("/apis", GROUPS[kind], "v1/namespaces", self._namespace, PLURALS[kind], name, sub)
        return "/".join(part for part in parts if part)

    async def find(self, kind: str, name: str = "qwen") -> Object | None:
        """An object; None: there is none, or the kind is not served."""
        try:
            return await self._kube.request("GET", self._path(kind, name))  # type: ignore[no-any-return]
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def wait(self, kind: str, what: str, holds: Callable[[Object], object] = lambda _: True) -> Object:
        """The object, once it is there and as it is waited for."""
        found: Object = {}

        async def there() -> bool:
            body = await self.find(kind)
            found.clear()
            found.update(body or {})
            return bool(body and holds(body))

        await self.until(there, f"{what}: {kind}", lambda: found)
        return found

    async def wait_gone(self, kind: str) -> None:
        """Until there is none."""
        async def gone() -> bool:
            return await self.find(kind) is None

        await self.until(gone, f"no {kind} is left")

    async def make(self, kind: str, name: str, **fields: Any) -> None:
        """An object of somebody else; it replaces one of the name."""
        body = {"apiVersion": f"{GROUPS[kind]}/v1", "kind": kind, "metadata": {"name": name}} | fields
        await self._kube.request("PATCH", self._path(kind, name), body, content="application/apply-patch+yaml",
                                 fieldManager="person", force="true")

    async def answer(self, kind: str, *conditions: Object, gateway: str = "public", current: bool = True) -> None:
        """What the controller of a Gateway of this namespace says of the object, alone, of its present generation.

        ``current``: else of the one before.
        """
        body = await self.wait(kind, "it is there to be judged")
        field, ref = PARENTS[kind]
        of = {"observedGeneration": body["metadata"]["generation"] - (not current)}
        one = {ref: {"name": gateway}, "controllerName": "example.com/scripted",
               "conditions": [of | each for each in conditions]}
        await self.state(kind, {field: [one]})

    async def state(self, kind: str, status: Any, name: str = "qwen") -> None:
        """Put a status there as it is."""
        path = self._path(kind, name, "status")
        body = await self._kube.request("GET", self._path(kind, name))
        await self._kube.request("PUT", path, body | {"status": status})

    async def until(self, condition: Callable[[], Any], what: str, seen: Callable[[], Any] = lambda: "") -> None:
        """Until an awaited condition holds."""
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not await condition():
            assert asyncio.get_running_loop().time() < end, f"not within {DEADLINE_S:g} s: {what}: {seen()}"
            await asyncio.sleep(POLL_S)
