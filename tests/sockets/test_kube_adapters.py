"""Agents are told their adapters: an agent on a loopback address, and what a router would say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from kube_documents import document, pod
from memory_api import MemoryApi

from xpyd_operator.kube.client.cache import OWNER_KIND, WatchCache
from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.kube.routers import calls
from xpyd_operator.kube.routers.adapters import AGAIN_S, AdapterOrders
from xpyd_sidecar.contract import adapters, signing
from xpyd_sidecar.contract.adapters import Adapter, AdapterOrder, AdapterReport
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import Load

KEY = ServiceKey(bytes(range(32)))
NAME = InstanceName("qwen-e2")
SQL = adapters.order_of((Adapter("sql", "/adapters/sql"),))
NONE = AdapterOrder()


def key_of(_: Facts) -> ServiceKey | None:
    return KEY


class Agent:
    """``told``: orders that it took; ``status``: what it answers."""

    def __init__(self) -> None:
        self.told: list[AdapterOrder] = []
        self.status = 202

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers[signing.HEADER]
        self.told.append(adapters.decode(await request.read()))
        return web.Response(status=self.status)


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    made = Agent()
    app = web.Application()
    app.add_routes([web.post(adapters.PATH, made.answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(calls, "AGENT_PORT", runner.addresses[0][1])
    yield made
    await runner.cleanup()


@pytest.fixture
async def orders() -> AsyncIterator[AdapterOrders]:
    async with aiohttp.ClientSession() as session:
        cache = WatchCache()
        cache.on_seen(OWNER_KIND, MemoryApi().put(OWNER_KIND, document()))
        owner = cache.get(OWNER_KIND, "team-a", "qwen")
        assert owner is not None
        yield AdapterOrders(session, owner, timeout_s=5.0)


def seen() -> Facts:
    body = pod(2)
    body["status"]["podIP"] = "127.0.0.1"
    return facts(body)


def fleet(order: str | None) -> Fleet:
    known: tuple[Any, ...] = (
        NAME, Role.DECODE, 1, State.READY, Incarnation("i"), Fingerprint("f"), (), (), "m", Load(), False, 0, 0.1)
    each = FleetInstance(*known, adapters=None if order is None else AdapterReport(order))
    return Fleet(ServiceName("qwen"), "r0", 9.0, True, (each,))


async def test_who_follows_another_order_is_told_and_once_in_a_while_again(agent: Agent, orders: AdapterOrders) -> None:
    await orders.distribute(SQL, [seen()], fleet(None), key_of, 100.0)
    assert (agent.told, orders.waits) == ([SQL], True)
    await orders.distribute(SQL, [seen()], fleet(None), key_of, 101.0)
    assert agent.told == [SQL], "beats take a moment"
    await orders.distribute(SQL, [seen()], fleet(None), key_of, 101.0 + AGAIN_S)
    assert agent.told == [SQL, SQL]
    await orders.distribute(SQL, [seen()], fleet(SQL.digest), key_of, 130.0)
    assert (len(agent.told), orders.waits) == (2, False)
    await orders.distribute(NONE, [seen()], fleet(SQL.digest), key_of, 131.0)
    assert agent.told[-1] == NONE, "what was told is taken back"
    await orders.distribute(NONE, [seen()], fleet(None), key_of, 150.0)
    assert len(agent.told) == 3, "who was told none needs no empty order"


async def test_nobody_is_told_before_a_router_has_heard_of_it(agent: Agent, orders: AdapterOrders) -> None:
    await orders.distribute(SQL, [seen()], None, key_of, 100.0)
    await orders.distribute(SQL, [seen()], Fleet(ServiceName("qwen"), "r0", 9.0, True, ()), key_of, 101.0)
    assert agent.told == []


async def test_an_agent_that_cannot_be_told_is_said_once_and_asked_again(
    agent: Agent, orders: AdapterOrders, caplog: pytest.LogCaptureFixture
) -> None:
    agent.status = 500
    for now in (100.0, 101.0, 102.0):
        await orders.distribute(SQL, [seen()], fleet(None), key_of, now)
    assert (len(agent.told), caplog.text.count("was not told its adapters: status 500")) == (3, 1)
    agent.status = 202
    await orders.distribute(SQL, [seen()], fleet(None), key_of, 103.0)
    assert len(agent.told) == 4


async def test_pods_of_others_and_members_of_groups_are_not_told(agent: Agent, orders: AdapterOrders) -> None:
    others = [msgspec.structs.replace(seen(), **change) for change in (
        {"owner": "another"}, {"component": "router"}, {"ip": ""})]
    await orders.distribute(SQL, others, fleet(None), key_of, 100.0)
    assert (agent.told, orders.waits) == ([], False)
