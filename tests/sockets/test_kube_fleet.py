"""Which routers are asked, how often, and what is believed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from aiohttp import web
from kube_documents import pod
from processes import free_port

from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.kube.routers import fleet as module
from xpyd_operator.kube.routers.fleet import EVERY_S, FORGET_S, HURRY_S, Fleets
from xpyd_operator.kube.routers.observe import RouterAnswers
from xpyd_sidecar.contract import signing
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.keys import ServiceKey, derive
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.signing import CallVerifier

KEY = ServiceKey(b"k" * 32)


class Routers:
    """Routers on loopback addresses 127.0.0.N, all at one port; what each says is written in a test."""

    def __init__(self) -> None:
        self.port = free_port()
        self.says: dict[int, str] = {}
        self.asked: list[int] = []
        self.receivers: dict[int, CallVerifier] = {}
        self.tokens: list[str] = []
        self.known: dict[int, tuple[FleetInstance, ...]] = {}
        self._runners: list[web.AppRunner] = []

    async def start(self, number: int, says: str = "settled") -> Facts:
        self.says[number] = says
        app = web.Application()

        async def answer(request: web.Request) -> web.StreamResponse:
            self.asked.append(number)
            says = self.says[number]
            name = f"qwen-e{number}"
            receiver = self.receivers.setdefault(number, CallVerifier(derive(KEY, "admin call"), name))
            self.tokens.append(request.headers.get("Authorization", ""))
            if receiver.refusal(request.headers.get(signing.HEADER, ""), request.method, request.path):
                return web.Response(status=401)
            if says == "slow":
                await asyncio.sleep(5)
            if says == "huge":
                return web.Response(body=b" " * 4096)
            if says == "broken":
                return web.Response(body=b"{")
            known = Fleet(ServiceName("qwen"), name, 1.0, settled=says == "settled", instances=self.known.get(number, ()))
            return web.Response(body=msgspec.json.encode(known), status=503 if says == "failing" else 200)

        app.add_routes([web.get("/fleet", answer)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, f"127.0.0.{number}", self.port).start()
        return self.pod(number)

    def pod(self, number: int) -> Facts:
        ports = [{"name": "http", "containerPort": 1}, {"name": "admin", "containerPort": self.port}]
        made = pod(number, status=pod(number)["status"] | {"podIP": f"127.0.0.{number}"})
        return facts(made | {"spec": {"containers": [{"name": "main"}, {"name": "sidecar", "ports": ports}]}})

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


@pytest.fixture
async def routers() -> AsyncIterator[Routers]:
    made = Routers()
    yield made
    await made.close()


@pytest.fixture
async def fleets() -> AsyncIterator[Fleets]:
    async with aiohttp.ClientSession() as session:
        yield Fleets(session, timeout_s=1.0)


async def ask(fleets: Fleets, routers: Routers, route: list[Facts], learn: list[Facts], now: float, *, limit: int = 9,
              picture: object = None) -> RouterAnswers:
    """What is known once the answers are there, also those that nobody waits for."""
    routers.asked.clear()
    told = await fleets.ask(route, learn, lambda pod: KEY, now, limit=limit, picture=hash(picture))
    if fleets._later is None:
        return told
    await fleets._later
    return await fleets.ask(route, learn, lambda pod: KEY, now, limit=limit, picture=hash(picture))


async def test_one_settled_router_tells_for_all(routers: Routers, fleets: Fleets) -> None:
    one, two = await routers.start(11), await routers.start(12, "learning")
    told = await ask(fleets, routers, [one], [two], 100.0)
    assert told.fleet is not None
    assert (told.fleet.router, told.settled) == ("qwen-e11", frozenset({"qwen-e11"}))
    assert fleets.hurried
    routers.says[12] = "settled"
    assert (await ask(fleets, routers, [one], [two], 100.0 + HURRY_S)).settled == {"qwen-e11", "qwen-e12"}
    assert not fleets.hurried


async def test_an_operator_that_was_held_up_while_it_connected_waits_for_the_answer(
        routers: Routers, fleets: Fleets) -> None:
    """The router is on another thread, and answers at once."""
    known = msgspec.json.encode(Fleet(ServiceName("qwen"), "qwen-e11", 1.0, settled=True, instances=()))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            accepted.set()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(known), known))
            connection.recv(1)

    accepted = threading.Event()
    with socket.create_server(("127.0.0.11", routers.port)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        asking = asyncio.create_task(ask(fleets, routers, [routers.pod(11)], [], 100.0))
        while not accepted.wait(0.02):  # noqa: ASYNC110 (the loop does not run meanwhile, so nothing is sent yet)
            await asyncio.sleep(0)
        time.sleep(1.5)  # noqa: ASYNC251 (it is held up beyond its deadline)
        assert (await asking).settled == {"qwen-e11"}


async def test_nothing_is_asked_again_too_soon_unless_something_changed(routers: Routers, fleets: Fleets) -> None:
    one = await routers.start(11)
    await ask(fleets, routers, [one], [], 100.0)
    again = await ask(fleets, routers, [one], [], 100.0 + EVERY_S - 0.1)
    assert (routers.asked, again.fleet is not None) == ([], True)
    await ask(fleets, routers, [one], [], 100.0 + EVERY_S)
    assert routers.asked == [11]
    await ask(fleets, routers, [one], [], 100.1 + EVERY_S, picture="other")
    assert routers.asked == [11]


async def test_while_nothing_is_under_way_nobody_waits_for_an_answer(routers: Routers, fleets: Fleets) -> None:
    one = await routers.start(11)
    first = await ask(fleets, routers, [one], [], 100.0)
    routers.says[11] = "slow"
    calm = await fleets.ask([one], [], lambda pod: KEY, 100.0 + EVERY_S, limit=9, picture=hash(None))
    assert calm == first, "the answer before counts until there is another one"
    assert not (await ask(fleets, routers, [one], [], 100.0 + 2 * EVERY_S)).settled, "silence counts once it lasts"


async def test_routers_are_asked_in_turn_beside_the_one_that_told_last(routers: Routers, fleets: Fleets) -> None:
    pods = [await routers.start(number) for number in (11, 12, 13, 14)]
    first = (await ask(fleets, routers, pods, [], 100.0)).fleet
    assert first is not None
    assert sorted(routers.asked) == [11, 12, 13, 14]
    others = set()
    for turn in range(1, 9):
        told = await ask(fleets, routers, pods, [], 100.0 + turn * EVERY_S)
        assert told.fleet is not None
        assert told.fleet.router == first.router
        assert int(first.router.removeprefix("qwen-e")) in routers.asked
        assert len(routers.asked) <= 2
        others |= set(routers.asked)
        assert len(told.settled) == 4
    assert others == {11, 12, 13, 14}


async def test_the_number_of_requests_is_bounded(routers: Routers, fleets: Fleets) -> None:
    pods = [await routers.start(number) for number in (11, 12, 13, 14)]
    await ask(fleets, routers, pods[:1], pods[1:], 100.0, limit=2)
    assert sorted(routers.asked) == [11, 12]


@pytest.mark.parametrize("says", ["learning", "failing", "broken", "slow", "huge"])
async def test_a_router_that_cannot_tell_is_not_believed(
    routers: Routers, fleets: Fleets, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_MAX", 1024)
    one = await routers.start(11, says)
    told = await ask(fleets, routers, [one], [], 100.0)
    assert (told, fleets.hurried) == (RouterAnswers(), True)


async def test_another_router_takes_over(routers: Routers, fleets: Fleets) -> None:
    one, two = await routers.start(11), await routers.start(12)
    await ask(fleets, routers, [one, two], [], 100.0)
    routers.says[11] = "failing"
    told = [await ask(fleets, routers, [one, two], [], 100.0 + turn * EVERY_S) for turn in (1, 2, 3)][-1]
    assert told.fleet is not None
    assert (told.fleet.router, told.settled) == ("qwen-e12", {"qwen-e12"})


async def test_one_that_has_gone_is_forgotten(routers: Routers, fleets: Fleets) -> None:
    one = await routers.start(11)
    assert (await ask(fleets, routers, [one], [], 100.0)).settled == {"qwen-e11"}
    assert (await ask(fleets, routers, [], [], 101.0 + EVERY_S)) == RouterAnswers()
    assert not fleets.hurried


async def test_nobody_is_there_at_the_address(routers: Routers, fleets: Fleets) -> None:
    assert (await ask(fleets, routers, [routers.pod(11)], [], 100.0)) == RouterAnswers()


async def test_an_old_answer_is_not_believed_for_ever(routers: Routers, fleets: Fleets) -> None:
    pods = [await routers.start(number) for number in (11, 12)]
    await ask(fleets, routers, pods, [], 100.0)
    routers.says[11] = routers.says[12] = "failing"
    for turn in range(1, 4):
        told = await ask(fleets, routers, pods, [], 100.0 + turn * EVERY_S)
    assert told == RouterAnswers()
    assert EVERY_S < FORGET_S


async def test_pods_that_speak_the_other_scheme_still_are_asked(routers: Routers, fleets: Fleets) -> None:
    """While a service goes over to HTTPS, its older pods speak plain HTTP."""
    told = await fleets.ask([await routers.start(11)], [], lambda pod: KEY, 100.0, limit=9, tls=True)
    assert told.fleet is not None
    assert routers.asked == [11]


async def test_calls_are_signed_and_carry_no_token(routers: Routers, fleets: Fleets) -> None:
    assert (await ask(fleets, routers, [await routers.start(11)], [], 100.0)).fleet is not None
    assert routers.tokens == [""]


async def test_a_pod_whose_key_is_not_known_is_not_asked(routers: Routers, fleets: Fleets) -> None:
    told = await fleets.ask([await routers.start(11)], [], lambda pod: None, 100.0, limit=9)
    assert (told.fleet, routers.asked) == (None, [])


async def test_while_pods_have_several_keys_one_gets_clients_once_it_knows_a_pair(routers: Routers, fleets: Fleets) -> None:
    """A router with the newest key hears of nobody with another one: it would have nobody for its clients."""
    old = msgspec.structs.replace(await routers.start(11), key="qwen-key-11111111")
    new = msgspec.structs.replace(await routers.start(12), key="qwen-key-22222222")
    routers.known[11] = (instance("d0", Role.DECODE), instance("p0", Role.PREFILL), instance("d1", Role.DECODE, "f-2"))
    routers.known[12] = (instance("d1", Role.DECODE, "f-2"),)
    told = await ask(fleets, routers, [old], [new], 100.0)
    assert told.settled == {"qwen-e11"}
    assert told.fleet is not None
    assert len(told.fleet.instances) == 3
    routers.known[12] = (instance("d1", Role.DECODE, "f-2"), instance("p1", Role.PREFILL, "f-2"))
    told = await ask(fleets, routers, [old], [new], 110.0)
    assert told.settled == {"qwen-e11", "qwen-e12"}
    assert told.fleet is not None
    assert len(told.fleet.instances) == 3, "the one with the older key hears of all"
    same = msgspec.structs.replace(new, key=old.key)
    routers.known[12] = ()
    assert (await ask(fleets, routers, [old], [same], 120.0)).settled == {"qwen-e11", "qwen-e12"}


def instance(name: str, role: Role, fingerprint: str = "f-1") -> FleetInstance:
    return FleetInstance(
        instance=InstanceName(name), role=role, epoch=1, state=State.READY, incarnation=Incarnation("a"),
        fingerprint=Fingerprint(fingerprint), http=(), control=(), model="m", load=Load(), drained=False, in_flight=0,
        beat_age_s=1.0)


async def test_everyone_is_asked_and_those_that_know_the_roster_are_believed(routers: Routers, fleets: Fleets) -> None:
    pods = [await routers.start(number, says) for number, says in
            ((11, "settled"), (12, "learning"), (13, "broken"), (14, "failing"), (15, "settled"))]
    answers = await fleets.fetch_fleets([*pods, routers.pod(16)], lambda pod: KEY)
    assert {uid: fleet.router for uid, fleet in answers.items()} == {pods[0].uid: "qwen-e11", pods[4].uid: "qwen-e15"}
    assert sorted(routers.asked) == [11, 12, 13, 14, 15]


@pytest.mark.parametrize(("ports", "port"), [
    ([{"name": "http", "containerPort": 10001}, {"name": "admin", "containerPort": 10002}], 10002),
    ([{"name": "http", "containerPort": 10001}, {"name": "members", "containerPort": 30001}], 10001),
    ([], 0),
])
def test_a_router_is_asked_where_its_container_says_and_one_of_the_release_before_where_clients_come(
        ports: list[dict[str, object]], port: int) -> None:
    for name, kind in (("sidecar", "initContainers"), ("router", "containers")):
        others = [{"name": "main", "ports": [{"name": "admin", "containerPort": 1}]}]
        spec = {"containers": others, kind: [*others, {"name": name, "ports": ports}]}
        assert facts(pod(1) | {"spec": spec}).admin_port == port
