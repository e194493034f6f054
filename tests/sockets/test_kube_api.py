"""Requests: where they go, what they say, and what becomes of refusals, silence and nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from processes import free_port

from xpyd_operator.kube.client.api import PATIENCE_S, Api, ApiError
from xpyd_operator.kube.client.login import session
from xpyd_operator.render.gang import resource_of


class Server:
    def __init__(self) -> None:
        self.answers: list[Callable[[], web.Response]] = []
        self.asked: list[tuple[str, str, dict[str, str], Any, str]] = []
        self.counted: list[tuple[str, str, int]] = []
        self.port = free_port()
        self.busy = self.most = 0

    async def handle(self, request: web.Request) -> web.Response:
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            body = await request.json() if request.can_read_body else None
            self.asked.append((request.method, request.path, dict(request.query), body, request.content_type))
            await asyncio.sleep(0.01)
            return self.answers.pop(0)() if self.answers else web.json_response({"kind": "Pod"})
        finally:
            self.busy -= 1

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        assert seconds >= 0
        self.counted.append((verb, resource, code))

    def refuse(self, code: int, reason: str = "", message: str = "no", headers: dict[str, str] | None = None,
               **more: Any) -> None:
        said = {"kind": "Status", "reason": reason, "message": message} | more
        self.answers.append(lambda: web.json_response(said, status=code, headers=headers))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", made.port).start()
    yield made
    await runner.cleanup()


def connect(server: Server, *, timeout_s: float = 2.0, width: int = 4) -> Api:
    configuration = Configuration(host=f"http://127.0.0.1:{server.port}")
    configuration.retries = None
    configuration.api_key["BearerToken"] = "bearer secret"
    return Api(session(configuration), configuration.host, server, width=width, timeout_s=timeout_s)


async def test_the_servers_clock_is_that_of_its_answers_whatever_they_say(server: Server) -> None:
    async with connect(server) as api:
        await api.get("Pod", "a", "x")
        assert abs(api.server_clock.ahead_s) < 2.0
        began = time.time()
        server.refuse(404, "NotFound", headers={"Date": formatdate(began + 600.0, usegmt=True)})
        with pytest.raises(ApiError):
            await api.get("Pod", "a", "x")
        assert began - time.time() + 598.0 < api.server_clock.ahead_s < 602.0


async def test_paths_and_parameters(server: Server) -> None:
    async with connect(server) as api:
        await api.get("Pod", "a", "x")
        await api.create("DisaggPool", "a", {"metadata": {"name": "x"}}, dry_run=True)
        await api.apply("NetworkPolicy", "a", {"metadata": {"name": "x"}})
        await api.patch("Deployment", "a", "x", {"spec": {"replicas": 1}})
        await api.patch_status("DisaggService", "a", "x", {"plan": None}, "u")
        await api.delete("PodDisruptionBudget", "a", "x", "u")
        await api.items("DisaggPool")
        await api.items(resource_of("scheduling.x-k8s.io/v1alpha1"), "a", labels="xpyd.dev/service=qwen")
        await api.items("Node", labels="rack", limit=1)
        assert await api.served_resources("scheduling.k8s.io/v1beta1") == frozenset()
        resources = [{"name": "podgroups"}, {"name": "podgroups/status"}]
        server.answers.append(lambda: web.json_response({"resources": resources}))
        assert await api.served_resources("scheduling.x-k8s.io/v1alpha1") == {"podgroups", "podgroups/status"}
        server.refuse(404, "NotFound")
        assert await api.served_resources("scheduling.volcano.sh/v1beta1") == frozenset()
        assert api.requests == 12
    assert server.asked == [
        ("GET", "/api/v1/namespaces/a/pods/x", {}, None, "application/json"),
        ("POST", "/apis/xpyd.dev/v1beta1/namespaces/a/disaggpools",
         {"fieldManager": "xpyd", "dryRun": "All", "fieldValidation": "Strict"},
         {"metadata": {"name": "x"}}, "application/json"),
        ("PATCH", "/apis/networking.k8s.io/v1/namespaces/a/networkpolicies/x", {"fieldManager": "xpyd", "force": "true"},
         {"metadata": {"name": "x"}}, "application/apply-patch+yaml"),
        ("PATCH", "/apis/apps/v1/namespaces/a/deployments/x", {"fieldManager": "xpyd"}, {"spec": {"replicas": 1}},
         "application/merge-patch+json"),
        ("PATCH", "/apis/xpyd.dev/v1beta1/namespaces/a/disaggservices/x/status", {"fieldManager": "xpyd"},
         {"metadata": {"uid": "u"}, "status": {"plan": None}}, "application/merge-patch+json"),
        ("DELETE", "/apis/policy/v1/namespaces/a/poddisruptionbudgets/x", {},
         {"propagationPolicy": "Background", "preconditions": {"uid": "u"}}, "application/json"),
        ("GET", "/apis/xpyd.dev/v1beta1/disaggpools", {}, None, "application/json"),
        ("GET", "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/a/podgroups", {"labelSelector": "xpyd.dev/service=qwen"},
         None, "application/json"),
        ("GET", "/api/v1/nodes", {"labelSelector": "rack", "limit": "1"}, None, "application/json"),
        *(("GET", f"/apis/{version}", {}, None, "application/json") for version in (
            "scheduling.k8s.io/v1beta1", "scheduling.x-k8s.io/v1alpha1", "scheduling.volcano.sh/v1beta1")),
    ]
    assert [each[:2] for each in server.counted] == [
        ("get", "pods"), ("create", "disaggpools"), ("apply", "networkpolicies"), ("patch", "deployments"),
        ("patch", "disaggservices/status"), ("delete", "poddisruptionbudgets"), ("list", "disaggpools"),
        ("list", "podgroups"),
        ("list", "nodes"), *[("get", "discovery")] * 3]


@pytest.mark.parametrize(("code", "reason", "missing", "conflict"), [
    (404, "NotFound", True, False), (409, "AlreadyExists", False, True), (409, "Conflict", False, True),
    (403, "Forbidden", False, False), (422, "Invalid", False, False), (500, "InternalError", False, False)])
async def test_refusals_are_told_apart(server: Server, code: int, reason: str, missing: bool, conflict: bool) -> None:
    server.refuse(code, reason, "because")
    async with connect(server) as api:
        with pytest.raises(ApiError, match="because") as caught:
            await api.get("Pod", "a", "x")
    error = caught.value
    assert (error.status, error.reason, error.missing, error.conflict) == (code, reason, missing, conflict)
    assert server.counted == [("get", "pods", code)]


async def test_a_namespace_that_ends_has_a_reason_of_its_own(server: Server) -> None:
    server.refuse(403, "Forbidden", details={"causes": [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]})
    async with connect(server) as api:
        with pytest.raises(ApiError) as caught:
            await api.create("Pod", "a", {})
    assert caught.value.reason == "NamespaceTerminating"


async def test_too_many_requests_are_tried_once_more_when_the_server_says(server: Server) -> None:
    server.refuse(429, "TooManyRequests", headers={"Retry-After": "0"})
    async with connect(server) as api:
        assert await api.get("Pod", "a", "x") == {"kind": "Pod"}
        assert api.requests == 2
        for _ in range(2):
            server.refuse(429, "TooManyRequests", details={"retryAfterSeconds": 0})
        with pytest.raises(ApiError) as twice:
            await api.get("Pod", "a", "x")
        server.refuse(429, "TooManyRequests", headers={"Retry-After": str(int(PATIENCE_S) + 1)})
        with pytest.raises(ApiError) as later:
            await api.get("Pod", "a", "x")
    assert (twice.value.status, later.value.status, later.value.retry_after) == (429, 429, PATIENCE_S + 1)


async def test_silence_has_a_deadline(server: Server) -> None:
    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    server.handle = slow  # type: ignore[method-assign]
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", slow)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    server.port = free_port()
    await web.TCPSite(runner, "127.0.0.1", server.port).start()
    async with connect(server, timeout_s=0.2) as api:
        with pytest.raises(ApiError, match=r"GET /api/v1/namespaces/a/pods/x: no answer within 0\.2 s") as caught:
            await api.get("Pod", "a", "x")
    await runner.cleanup()
    assert (caught.value.status, caught.value.reason) == (0, "Timeout")
    assert server.counted == [("get", "pods", 0)]


async def test_nobody_listens(server: Server) -> None:
    server.port = free_port()
    async with connect(server) as api:
        with pytest.raises(ApiError) as caught:
            await api.get("Pod", "a", "x")
    assert (caught.value.status, caught.value.reason) == (0, "Unreachable")


async def test_nonsense_is_an_error_with_its_place(server: Server) -> None:
    server.answers = [lambda: web.Response(body=b"<html>"), lambda: web.Response(body=b'{"kind": "\xff"}'),
                      lambda: web.Response(status=502, body=b"bad gateway"),
                      lambda: web.Response(status=502, body=b'{"message": "\xff gateway"}')]
    async with connect(server) as api:
        for _ in range(2):
            with pytest.raises(ApiError, match="the answer is not JSON"):
                await api.get("Pod", "a", "x")
        for _ in range(2):
            with pytest.raises(ApiError, match="gateway") as caught:
                await api.get("Pod", "a", "x")
            assert caught.value.status == 502


async def test_width_bounds_what_is_under_way(server: Server) -> None:
    async with connect(server, width=3) as api:
        await asyncio.gather(*(api.get("Pod", "a", f"x{number}") for number in range(30)))
    assert server.most == 3
    assert len(server.asked) == 30
