"""Beats over real sockets: acks, routers that come and go, refusals, wrong keys, names that change."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
import zmq
from agent_fakes import KEY, FakeRouter, config_of
from beats import AGENT

from xpyd_sidecar.agent import beats as beats_module
from xpyd_sidecar.agent.beat import Machine
from xpyd_sidecar.agent.beats import Beats, system_resolve
from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.process import resources
from xpyd_sidecar.router.fleet.heartbeat_listener import HeartbeatListener

Make = Callable[..., Awaitable[Beats]]
NewRouter = Callable[..., FakeRouter]


@pytest.fixture
def machine() -> Machine:
    return Machine(config_of(), AGENT)


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Beats] = []

    async def start(*routers: str, **options: object) -> Beats:
        beats = Beats(tuple(map(HostPort, routers)), KEY, heartbeat_s=0.1, resolve_s=0.05, **options)  # type: ignore[arg-type]
        made.append(beats)
        await beats.resolve_once()
        return beats

    yield start
    for beats in made:
        await beats.close()


@pytest.fixture
async def new_router() -> AsyncIterator[NewRouter]:
    made: list[FakeRouter] = []

    def new(*args: object, **options: object) -> FakeRouter:
        made.append(FakeRouter(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for router in made:
        await router.close()


@pytest.fixture
def router(new_router: NewRouter) -> FakeRouter:
    return new_router()


async def wait(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is awaited has no event)
            await asyncio.sleep(0.005)


async def wait_problem(beats: Beats, words: str) -> None:
    """Until ZeroMQ's own thread has said so of the only router: a warning tells what is known by then."""
    [link] = beats._links.values()
    await wait(lambda: words in link.problem())


async def test_a_beat_arrives_and_its_ack_is_known(make: Make, machine: Machine, router: FakeRouter) -> None:
    beats = await make(router.address)
    beat = machine.heartbeat()
    beats.send(beat)
    assert await router.wait_beat() == beat
    await wait(lambda: beats.routers()[0].acked == 1)
    view = beats.routers()[0]
    assert (view.address, view.name, view.refused) == (router.address, "r0", "")


async def test_every_router_gets_every_beat(make: Make, machine: Machine, router: FakeRouter,
                                                new_router: NewRouter) -> None:
    second = new_router(name="r1")
    beats = await make(router.address, second.address)
    for seq in (1, 2, 3):
        beats.send(machine.heartbeat())
        await wait(lambda seq=seq: {view.acked for view in beats.routers()} == {seq})
    assert [beat.seq for beat in router.beats] == [1, 2, 3]
    assert router.beats == second.beats
    assert {view.name for view in beats.routers()} == {"r0", "r1"}


async def test_a_router_that_is_back_gets_the_newest_beat_and_no_old_ones(make: Make, machine: Machine,
                                                                          new_router: NewRouter) -> None:
    router = new_router()
    beats = await make(router.address)
    beats.send(machine.heartbeat())
    await router.wait_beat()
    await router.close()
    await wait_problem(beats, "cannot be reached")  # until then a beat may go into the connection that was
    for _ in range(20):
        beats.send(machine.heartbeat())
    again = new_router(port=router.port, name="again")
    await wait(lambda: beats.routers()[0].acked == 21)
    assert beats.routers()[0].name == "again"
    assert len(again.beats) <= 2
    assert again.beats[-1].seq == 21


async def test_lost_acks_are_warned_of_and_their_return_is_said(make: Make, machine: Machine, router: FakeRouter,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    router.ack = False
    beats = await make(router.address)
    for _ in range(6):
        beats.send(machine.heartbeat())
        await asyncio.sleep(0.1)
    warnings = [one.getMessage() for one in caplog.records
                if (one.name, one.levelname) == (beats_module.__name__, "WARNING")]
    assert len(warnings) == 1
    assert f"router {router.address} has not acknowledged" in warnings[0]
    assert beats.routers()[0].acked == -1
    router.ack = True
    beats.send(machine.heartbeat())
    await wait(lambda: beats.routers()[0].acked > 0)
    async with asyncio.timeout(30):
        while "acknowledges again" not in caplog.text:  # unless it was held up since then for longer than beats may be
            beats.send(machine.heartbeat())
            await asyncio.sleep(0.01)


async def test_one_that_stood_still_itself_says_nothing_of_its_routers(make: Make, machine: Machine, router: FakeRouter,
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    beats = await make(router.address)
    beats.send(machine.heartbeat())
    await wait(lambda: beats.routers()[0].acked == 1)
    time.sleep(0.5)  # noqa: ASYNC251 (the loop stands still)
    beats.send(machine.heartbeat())
    await wait(lambda: beats.routers()[0].acked == 2)
    assert "has not acknowledged" not in caplog.text


async def test_a_router_with_another_key_never_acks_and_the_warning_says_so(make: Make, machine: Machine,
                                                                           new_router: NewRouter,
                                                                           caplog: pytest.LogCaptureFixture) -> None:
    router = new_router(ServiceKey(bytes(32)))
    beats = await make(router.address)
    await wait_problem(beats, "service key")
    for _ in range(6):
        beats.send(machine.heartbeat())
        await asyncio.sleep(0.1)
    assert router.beats == []
    assert beats.routers()[0].acked == -1
    assert "does it hold another service key?" in caplog.text


async def test_routers_of_the_key_before_and_of_ours_hear_the_same_beats(make: Make, machine: Machine, router: FakeRouter,
                                                                          new_router: NewRouter) -> None:
    """While keys change both kinds are there; what once answered is not asked with the other key again."""
    before = ServiceKey(bytes(range(32)))
    older = new_router(before, name="older")
    beats = await make(router.address, older.address, before=before)

    async def beat_until(*names: str) -> None:
        async with asyncio.timeout(30):
            while {view.name for view in beats.routers() if view.acked > 0} != set(names):
                beats.send(machine.heartbeat())
                await asyncio.sleep(0.05)

    await beat_until("r0", "older")
    last = machine.heartbeat()
    beats.send(last)
    await wait(lambda: all(view.acked == last.seq for view in beats.routers()))
    assert router.beats[-1] == older.beats[-1] == last
    await older.close()
    again = new_router(port=older.port, name="newer")  # a router with our key comes at the same address
    await beat_until("r0", "newer")
    assert again.beats[-1].instance == last.instance


async def test_a_router_that_takes_neither_key_is_warned_of(make: Make, machine: Machine, new_router: NewRouter,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    router = new_router(ServiceKey(bytes(32)))
    beats = await make(router.address, before=ServiceKey(bytes(range(32))))
    for _ in range(12):
        beats.send(machine.heartbeat())
        await asyncio.sleep(0.05)
    assert (router.beats, beats.routers()[0].acked) == ([], -1)
    assert f"router {router.address} has not acknowledged" in caplog.text


async def test_a_router_that_is_not_there_cannot_be_reached(make: Make, machine: Machine, router: FakeRouter,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    address = router.address
    await router.close()
    beats = await make(address)
    await wait_problem(beats, "cannot be reached")
    for _ in range(6):
        beats.send(machine.heartbeat())
        await asyncio.sleep(0.1)
    assert "cannot be reached" in caplog.text


async def test_a_refusal_is_logged_with_its_reason_and_counts_as_heard(make: Make, machine: Machine, router: FakeRouter,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    router.refusal = "service 'other' is not ours"
    beats = await make(router.address)
    beats.send(machine.heartbeat())
    await wait(lambda: beats.routers()[0].refused != "")
    assert beats.routers()[0].acked == 1
    assert "service 'other' is not ours" in caplog.text


async def test_goodbye_is_seen_and_waited_for(make: Make, machine: Machine, router: FakeRouter) -> None:
    beats = await make(router.address)
    beats.send(machine.heartbeat())
    await wait(lambda: beats.routers()[0].acked == 1)
    began = asyncio.get_running_loop().time()
    await beats.close(machine.last_message(), linger_s=30.0)
    assert asyncio.get_running_loop().time() - began < 15.0
    assert [bye.instance for bye in router.goodbyes] == ["test-e0"]


async def test_goodbye_to_a_dead_router_ends_within_its_bound(make: Make, machine: Machine, new_router: NewRouter) -> None:
    router = new_router()
    beats = await make(router.address)
    beats.send(machine.heartbeat())
    await wait(lambda: beats.routers()[0].acked == 1)
    await router.close()
    async with asyncio.timeout(30):
        await beats.close(machine.last_message(), linger_s=0.2)


async def test_a_name_stands_for_all_its_addresses_as_they_change(make: Make, machine: Machine,
                                                                 new_router: NewRouter) -> None:
    first = new_router(host="127.0.0.2", name="first")
    second = new_router(host="127.0.0.3", port=first.port, name="second")
    answers: list[Sequence[str] | OSError] = [["127.0.0.2"], ["127.0.0.2", "127.0.0.3"], OSError("no name service"),
                                              ["127.0.0.3"]]

    async def resolve(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("routers.test", first.port)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    beats = await make(f"routers.test:{first.port}", resolve=resolve)
    beats.send(machine.heartbeat())
    await first.wait_beat()
    await beats.resolve_once()
    assert (await second.wait_beat()).seq == 1, "a router that joins hears the newest beat at once"
    await beats.resolve_once()
    assert len(beats.routers()) == 2, "a failed lookup keeps the addresses"
    await beats.resolve_once()
    assert [view.address for view in beats.routers()] == [second.address]
    beats.send(machine.heartbeat())
    assert (await second.wait_beat()).seq == 2
    assert [beat.seq for beat in first.beats] == [1]


async def test_a_lookup_that_hangs_is_given_up_and_said(make: Make, monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(beats_module, "RESOLVE_TIMEOUT_S", 0.05)

    async def resolve(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return []

    beats = await make("routers.test:30001", resolve=resolve)
    assert beats.routers() == ()
    assert "router address routers.test:30001: no answer to the lookup within 0.05 s" in caplog.text


async def test_an_endless_list_of_addresses_is_cut(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return [f"127.1.{high}.{low}" for high in range(2) for low in range(100)]

    beats = await make("routers.test:1", resolve=resolve)
    assert len(beats.routers()) == beats_module.MAX_ADDRESSES
    assert "200 addresses" in caplog.text


async def test_an_answer_that_is_no_ack_is_said_and_survived(make: Make, machine: Machine,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    from xpyd_sidecar.process import curve

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.linger = 0
    curve.serve(sock, KEY, "membership")
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    beats = await make(f"127.0.0.1:{port}")
    beats.send(machine.heartbeat())
    await wait(lambda: bool(sock.poll(0)))
    peer, _ = sock.recv_multipart()
    sock.send_multipart([peer, b"\xc1"])
    await wait(lambda: "router sent what is no ack" in caplog.text)
    assert beats.routers()[0].acked == -1
    sock.close()
    context.term()


async def test_the_system_resolver_passes_addresses_through_and_takes_one_family() -> None:
    assert await system_resolve("127.0.0.1", 1) == ["127.0.0.1"]
    assert await system_resolve("localhost", 1) == ["127.0.0.1"]
    assert await system_resolve("::1", 1) == ["::1"]


async def test_the_routers_own_socket_tells_of_its_open_legs(make: Make, machine: Machine) -> None:
    taken: list[object] = []

    def take(message: object) -> int:
        taken.append(message)
        return 2

    members = HeartbeatListener("real", take, lambda _: None)
    try:
        beats = await make(f"127.0.0.1:{members.listen('127.0.0.1', 0, KEY)}")
        beat = machine.heartbeat()
        beats.send(beat)
        await wait(lambda: beats.routers()[0].acked == 1)
        assert taken == [beat]
        assert (beats.routers()[0].name, beats.routers()[0].in_flight) == ("real", 2)
        await beats.close(machine.last_message())
        assert taken[1:] == [machine.last_message()]
    finally:
        members.close()


@pytest.mark.parametrize("lacking", ["dealer", "monitor"])
async def test_a_router_that_there_is_no_file_for_is_told_as_soon_as_there_is_one(
        make: Make, router: FakeRouter, lacking: str, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    if lacking == "dealer":
        monkeypatch.setattr(beats_module, "dealer", fails)
    else:
        monkeypatch.setattr(zmq.Socket, "get_monitor_socket", fails)
    beats = await make(router.address)
    beats.send(Machine(config_of(), AGENT).heartbeat())
    await beats.resolve_once()
    assert beats.routers() == ()
    why = resources.WORDS[errno.EMFILE]
    assert [record.message for record in caplog.records] == [f"router {router.address} is told nothing yet: {why}"]
    monkeypatch.undo()
    await beats.resolve_once()
    assert [each.address for each in beats.routers()] == [router.address]
    await router.wait_beat()
