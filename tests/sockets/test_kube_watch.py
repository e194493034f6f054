"""Lists and events on their way into the cache: what is gone is noticed, and nobody is woken too early."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from xpyd_operator.kube.client.api import RESOURCES
from xpyd_operator.kube.client.cache import KINDS, WatchCache
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.client.watch import Watch


def thing(name: str, version: int, *, namespace: str = "ns", service: str = "s", uid: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "uid": uid or f"uid-{name}", "resourceVersion": str(version),
                         "labels": {"xpyd.dev/service": service}}}


def collection(kind: str, namespace: str | None = None) -> str:
    """Path of a list, as kopf asks for it."""
    version = RESOURCES[kind].version
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{RESOURCES[kind].plural}" if namespace else f"{root}/{RESOURCES[kind].plural}"


class Server:
    """Answers lists of what a test puts into ``there``, over a real socket and the session's middleware."""

    def __init__(self, *namespaces: str) -> None:
        self.there: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        self.version = 100
        self.raw: bytes | None = None
        self.woken: list[tuple[str, str]] = []
        self.cache = WatchCache()
        self.metrics = Metrics()
        self.watch = Watch(self.cache, self.metrics, namespaces, lambda *service: self.woken.append(service))
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._server = TestServer(app)

    async def __aenter__(self) -> Server:
        await self._server.start_server()
        self._session = aiohttp.ClientSession(middlewares=(self.watch.pass_on,))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._server.close()

    async def _get(self, request: web.Request) -> web.Response:
        if self.raw is not None:
            return web.Response(body=self.raw)
        if request.query.get("follow"):
            stream = web.StreamResponse()
            await stream.prepare(request)
            await asyncio.sleep(30)
        kind = next((kind for kind in KINDS if request.path.endswith(f"/{RESOURCES[kind].plural}")), None)
        if kind is None:
            return web.json_response({"kind": "APIResourceList", "resources": []})
        parts = request.path.split("/namespaces/")
        inside = [each for each in self.there[kind]
                  if len(parts) == 1 or each["metadata"]["namespace"] == parts[1].split("/")[0]]
        return web.Response(body=msgspec.json.encode(
            {"kind": f"{kind}List", "apiVersion": RESOURCES[kind].version, "items": inside,
             "metadata": {"resourceVersion": str(self.version)}}))

    async def fetch(self, path: str) -> Any:
        async with self._session.get(self._server.make_url(path)) as answer:
            return await answer.json(content_type=None)

    async def open(self, kind: str) -> aiohttp.ClientResponse:
        """A watch that stays open."""
        return await self._session.get(self._server.make_url(f"{collection(kind)}?watch=true&follow=yes"))

    async def list(self, *kinds: str, namespace: str | None = None) -> None:
        for kind in kinds:
            await self.fetch(collection(kind, namespace) + "?labelSelector=x")


async def test_nobody_is_woken_before_every_kind_was_listed_and_then_everybody() -> None:
    async with Server() as server:
        server.there["DisaggService"] = [thing("a", 1), thing("b", 2)]
        server.there["Pod"] = [thing("a-e0", 3, service="a")]
        assert server.watch.missing() == "nothing was listed yet"
        await server.list(*KINDS[:-1])
        server.watch.event("Pod", "MODIFIED", thing("a-e0", 5, service="a"))
        assert server.woken == []
        assert server.watch.missing() == f"not listed yet: {KINDS[-1]}"
        assert not server.watch.filled.is_set()
        await server.list(KINDS[-1])
        assert sorted(server.woken) == [("ns", "a"), ("ns", "b")]
        assert server.watch.missing() == ""
        assert server.watch.filled.is_set()


async def test_the_caller_still_gets_the_whole_answer() -> None:
    async with Server() as server:
        server.there["Pod"] = [thing("p", 1)]
        assert [each["metadata"]["name"] for each in (await server.fetch("/api/v1/pods"))["items"]] == ["p"]


async def test_listed_objects_say_what_they_are() -> None:
    async with Server() as server:
        server.there["Deployment"] = [thing("d", 1)]
        await server.list("Deployment")
        entry = server.cache.get("Deployment", "ns", "d")
        assert entry is not None
        assert (entry.body["kind"], entry.body["apiVersion"]) == ("Deployment", "apps/v1")


async def test_what_a_later_list_lacks_is_gone_and_its_service_is_woken() -> None:
    async with Server() as server:
        server.there["Pod"] = [thing("p", 1, service="s"), thing("q", 2, service="t")]
        await server.list(*KINDS)
        server.cache.on_written("Pod", thing("new", 200, service="s"))  # younger than the list will be
        server.woken.clear()
        server.there["Pod"] = [thing("q", 2, service="t")]
        server.version = 150
        await server.list("Pod")
        assert server.cache.get("Pod", "ns", "p") is None
        assert server.cache.get("Pod", "ns", "q") is not None
        assert server.cache.get("Pod", "ns", "new") is not None
        assert server.woken == [("ns", "s")]


async def test_events_change_the_cache_and_wake_only_for_news() -> None:
    async with Server() as server:
        await server.list(*KINDS)
        server.watch.event("Pod", None, thing("p", 1))
        assert server.cache.get("Pod", "ns", "p") is None, "what a list brought came with the list"
        server.watch.event("Pod", "ADDED", thing("p", 2))
        server.watch.event("Pod", "MODIFIED", thing("p", 2))
        server.watch.event("Pod", "MODIFIED", thing("p", 3))
        assert server.woken == [("ns", "s")] * 2
        server.watch.event("Pod", "DELETED", thing("p", 4))
        server.watch.event("Pod", "DELETED", thing("p", 4))
        assert server.cache.get("Pod", "ns", "p") is None
        assert server.woken == [("ns", "s")] * 3
        server.watch.event("DisaggService", "ADDED", thing("z", 9, service="ignored"))
        assert server.woken[-1] == ("ns", "z")


async def test_an_event_of_an_object_without_our_label_wakes_nobody() -> None:
    async with Server() as server:
        await server.list(*KINDS)
        server.watch.event("Pod", "ADDED", thing("p", 2, service=""))
        assert server.woken == []


async def test_namespaces_are_complete_one_by_one() -> None:
    async with Server("a", "b") as server:
        server.there["DisaggService"] = [thing("one", 1, namespace="a"), thing("two", 2, namespace="b")]
        assert server.watch.missing() == "nothing was listed yet in a, b"
        await server.list(*KINDS, namespace="a")
        assert server.woken == [("a", "one")]
        assert server.watch.complete("a")
        assert not server.watch.complete("b")
        assert server.watch.missing() == "", "a namespace that does not exist is not waited for"
        await server.list(*KINDS, namespace="b")
        assert server.woken == [("a", "one"), ("b", "two")]
        server.there["DisaggService"] = []
        await server.list("DisaggService", namespace="a")
        assert server.cache.services() == [("b", "two")]


@pytest.mark.parametrize("raw", [b"<html>", b'{"items": []}', b'{"metadata": {"resourceVersion": ""}, "items": []}',
                                 b'{"metadata": {"resourceVersion": "5", "continue": "more"}, "items": []}'])
async def test_a_list_that_cannot_be_used_is_refused_and_nothing_is_forgotten(raw: bytes) -> None:
    async with Server() as server:
        server.there["Pod"] = [thing("p", 1)]
        await server.list(*KINDS)
        server.raw = raw
        with pytest.raises(aiohttp.ClientPayloadError, match="the list of Pods"):
            await server.list("Pod")
        assert server.cache.get("Pod", "ns", "p") is not None


async def test_a_kind_that_nobody_watches_while_others_are_watched_is_told() -> None:
    async with Server() as server:
        now = 1000.0
        assert server.watch.unwatched_kinds(now) == ""
        assert server.watch.unwatched_kinds(now + 60) == "", "nothing is watched: the API server is away"
        streams = {kind: await server.open(kind) for kind in KINDS if kind != "DisaggService"}
        assert server.watch.unwatched_kinds(now + 100) == ""
        assert server.watch.unwatched_kinds(now + 109) == ""
        assert server.watch.unwatched_kinds(now + 110) == "not watched: DisaggService"
        streams["DisaggService"] = await server.open("DisaggService")
        assert server.watch.unwatched_kinds(now + 111) == ""
        streams["Pod"].close()
        assert server.watch.unwatched_kinds(now + 112) == "", "it has time to come back"
        assert server.watch.unwatched_kinds(now + 122) == "not watched: Pod"
        server.raw = b"<html>"
        with pytest.raises(aiohttp.ClientPayloadError):
            await server.list("Pod")
        told = server.watch.unwatched_kinds(now + 122)
        assert told.startswith("not watched: Pod; the list of Pods (6 bytes) cannot be read: "), told
        server.raw = None
        await server.list("Pod")
        assert server.watch.unwatched_kinds(now + 122) == "not watched: Pod"
        server.watch.begin()
        assert server.watch.unwatched_kinds(now + 123) == ""


async def test_requests_are_counted_by_what_they_are() -> None:
    async with Server() as server:
        await server.list("Pod")
        await server.fetch("/api/v1/pods?watch=true")
        await server.fetch("/api/v1/namespaces/ns/pods?watch=true")
        await server.fetch("/apis/xpyd.dev/v1beta1")
        text = server.metrics.text().decode()
        for verb, resource, count in (("list", "pods", 1), ("watch", "pods", 2), ("get", "discovery", 1)):
            assert f'requests_total{{code="200",resource="{resource}",verb="{verb}"}} {count}.0' in text
