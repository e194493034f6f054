from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from beats import Beater, beat, bye

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import ServiceName
from xpyd_sidecar.contract.membership import Up
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.fleet import heartbeat_listener as me
from xpyd_sidecar.router.fleet.heartbeat_listener import HeartbeatListener, Verdict
from xpyd_sidecar.router.fleet.member import BeatRefused
from xpyd_sidecar.router.fleet.roster import Roster

LOOPS = ("uvloop",)
KEY = keys.ServiceKey(bytes(32))


class Taken:
    def __init__(self) -> None:
        self.messages: list[Up] = []
        self.counts: dict[str, int] = {}

    def take(self, message: Up) -> None:
        if message.v != 1:
            raise BeatRefused(f"version {message.v} is not understood here")
        self.messages.append(message)

    def count(self, result: str) -> None:
        self.counts[result] = self.counts.get(result, 0) + 1


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[HeartbeatListener, int, Taken]]:
    taken = Taken()
    members = HeartbeatListener("r0", taken.take, taken.count)
    try:
        yield members, members.listen("127.0.0.1", 0, KEY), taken
    finally:
        members.close()


@contextlib.asynccontextmanager
async def beater(port: int, key: keys.ServiceKey = KEY, identity: bytes = b"") -> AsyncIterator[Beater]:
    made = Beater(port, key, identity)
    try:
        yield made
    finally:
        made.close()


async def test_beats_and_goodbyes_are_taken_and_acknowledged() -> None:
    async with listening() as (_, port, taken), beater(port) as agent:
        first, second = beat("d0", seq=4), bye("d0")
        ack = await agent.say(first)
        assert (ack.seq, ack.router, ack.refused, ack.v) == (4, "r0", "", 1)
        assert (await agent.say(second)).seq == -1
        assert taken.messages == [first, second]
        assert taken.counts == {"taken": 2}


@pytest.mark.parametrize("raw", [
    msgspec.msgpack.encode({"t": "dance", "v": 1}),
    msgspec.msgpack.encode({"type": "P", "http_address": "a", "zmq_address": "b"}),
    msgspec.msgpack.encode([1, 2]), b"", b"\xc1", b"\xff" * 1000, msgspec.msgpack.encode({"t": "beat", "v": 1}),
    msgspec.msgpack.encode({"t": "beat", "v": 1, "service": "x", "instance": "x", "seq": 1, "role": "cook", "epoch": 1,
                            "state": "ready"}),
])
async def test_an_unknown_message_is_refused_with_a_reason_and_does_not_end_the_listener(
        raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with listening() as (_, port, taken), beater(port) as agent:
        ack = await agent.say(raw)
        assert ack.refused.startswith("not a message known here")
        assert (await agent.say(beat("d0"))).refused == ""
        assert taken.counts == {"undecodable": 1, "taken": 1}
        [line] = [r for r in caplog.records if "refused" in r.message]
        assert line.__dict__["peer"] == "127.0.0.1"
        await agent.say(raw)
        assert len([r for r in caplog.records if "refused" in r.message]) == 1, "said once a minute"


async def test_a_newer_version_is_refused_and_unknown_fields_are_not() -> None:
    async with listening() as (_, port, taken), beater(port) as agent:
        assert "version 2" in (await agent.say(beat("d0", v=2))).refused
        newer = msgspec.msgpack.encode(msgspec.to_builtins(beat("d0")) | {"t": "beat", "a_new_field": [1]})
        assert (await agent.say(newer)).refused == ""
        assert taken.messages == [beat("d0")]


async def test_who_does_not_hold_the_key_is_not_heard() -> None:
    async with listening() as (_, port, taken):
        async with beater(port, keys.mint()) as stranger:
            await stranger.send(beat("evil"))
            with pytest.raises(TimeoutError):
                await stranger.ack(0.2)
        context = zmq.asyncio.Context()
        plain = context.socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"tcp://127.0.0.1:{port}")
        with contextlib.suppress(zmq.Again):  # it may have been told already that it is not welcome
            await plain.send(msgspec.msgpack.encode(beat("evil")), zmq.NOBLOCK)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.transport.abort()
        plain.close()
        context.term()
        async with beater(port) as agent:
            await agent.say(beat("d0"))
        assert [m.instance for m in taken.messages] == ["d0"]
        assert reader is not None


async def test_a_flood_is_taken_in_turns_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(me, "PER_LOOK", 7)
    monkeypatch.setattr(me, "PACE_S", 0.01)
    async with listening() as (_, port, taken), beater(port) as agent:
        for seq in range(500):
            await agent.send(beat("d0", seq=seq))
        assert [(await agent.ack()).seq for _ in range(500)] == list(range(500))
        assert len(taken.messages) == 500


async def test_a_flood_of_garbage_does_not_keep_another_agent_from_being_heard(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The queue is fair between peers, and a turn of the loop is bounded: requests and other agents get theirs."""
    monkeypatch.setattr(me, "PER_LOOK", 7)  # the flood lasts for seconds, however late ZMQ's thread brings the agent's beat
    async with listening() as (_, port, taken), beater(port) as flooder, beater(port) as agent:
        await agent.say(beat("d0"))
        await flooder.send(b"\xc1")
        await flooder.ack()
        for _ in range(3000):
            await flooder.send(b"\xc1" * 100)
        answer = asyncio.ensure_future(agent.say(beat("d0", seq=2)))
        most, before = 0, taken.counts["undecodable"]
        while not answer.done():
            await asyncio.sleep(0)
            most, before = max(most, taken.counts["undecodable"] - before), taken.counts["undecodable"]
        assert answer.result().refused == ""
        assert before < 3000, "it did not wait for the flood to end"
        assert most <= me.PER_LOOK, "requests get their turn"
        lines = [r for r in caplog.records if "refused" in r.message]
        assert len(lines) == 1, "the log does not grow with the flood"


async def test_a_message_of_several_frames_is_refused() -> None:
    async with listening() as (_, port, _taken), beater(port) as agent:
        await agent._socket.send_multipart([b"a", b"b", b"c"])
        assert (await agent.ack()).refused == "a message is one frame, not 3"
        assert (await agent.say(beat("d0"))).refused == ""


async def test_a_failure_inside_costs_one_message_and_not_the_listener() -> None:
    async with listening() as (members, port, taken), beater(port) as agent:
        members._take = lambda _: 1 // 0
        assert "router failed" in (await agent.say(beat("d0"))).refused
        members._take = taken.take
        assert (await agent.say(beat("d0"))).refused == ""
        assert taken.counts == {"failed": 1, "taken": 1}


@pytest.mark.parametrize(("fields", "words"), [
    ({"load": {"running": -1}}, "$.load.running"), ({"load": {"kv_usage": float("nan")}}, "$.load.kv_usage"),
    ({"interval_s": 0.0}, "$.interval_s"), ({"interval_s": float("nan")}, "$.interval_s"), ({"epoch": -1}, "$.epoch"),
    ({"seq": -2}, "$.seq"), ({"role": "cook"}, "$.role"), ({"http": ["h:1"] * 1025}, "$.http"), ({"state": 5}, "$.state"),
])
async def test_a_field_that_cannot_be_is_named_in_the_refusal(fields: dict[str, object], words: str) -> None:
    async with listening() as (_, port, taken), beater(port) as agent:
        plain = msgspec.to_builtins(beat("d0")) | {"t": "beat"} | fields
        assert words in (await agent.say(msgspec.msgpack.encode(plain))).refused
        assert taken.messages == []


async def test_a_single_message_is_taken_at_once_and_a_stream_of_them_in_batches() -> None:
    async with listening() as (members, port, _taken), beater(port) as agent:
        await agent.say(beat("d0"))
        await asyncio.sleep(3 * me.PACE_S)
        loop, took = asyncio.get_running_loop(), []
        for seq in range(20):
            began = loop.time()
            await agent.say(beat("d0", seq=seq))
            took.append(loop.time() - began)
            if took[-1] < me.PACE_S:
                break
            await asyncio.sleep(3 * me.PACE_S)
        assert min(took) < me.PACE_S
        looks = 0
        inner = members
        go_on = inner._go_on

        def counted() -> None:
            nonlocal looks
            looks += 1
            go_on()

        inner._go_on = counted  # type: ignore[method-assign]
        began = loop.time()
        for seq in range(100):
            await agent.send(beat("d0", seq=seq))
        for _ in range(100):
            await agent.ack()
        assert looks <= 2 + (loop.time() - began) / me.PACE_S, "each look took several"


async def test_a_beat_of_the_release_before_is_taken_and_ours_is_read_by_it() -> None:
    """Neighbouring releases meet during an upgrade: fields that one of them does not know are left out or ignored."""
    class Before(msgspec.Struct, frozen=True, tag="beat", tag_field="t"):
        v: int
        service: str
        instance: str
        seq: int
        role: str
        epoch: int
        state: str
        agent: str

    async with listening() as (_, port, taken), beater(port) as agent:
        short = Before(1, "test", "d0", 1, "decode", 1, "ready", "a")
        assert (await agent.say(msgspec.msgpack.encode(short))).refused == ""
        assert taken.messages[0].instance == "d0"
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(beat("d0")), type=Before)
    assert (read.instance, read.state) == ("d0", "ready")


async def test_a_beat_for_another_service_is_refused_with_both_names() -> None:
    roster = Roster(ServiceName("mine"), started=0.0, settle_s=1.0, missed_beats=3)
    async with listening() as (members, port, _), beater(port) as agent:
        members._take = lambda message: len(roster.on_message(1.0, message))
        assert (await agent.say(beat("d0"))).refused == "this router serves 'mine', not 'test'"
        assert roster.members() == []


async def test_an_agent_that_comes_back_with_the_same_identity_is_heard() -> None:
    async with listening() as (_, port, taken):
        for seq in range(3):
            async with beater(port, identity=b"d0") as agent:
                assert (await agent.say(beat("d0", seq=seq))).seq == seq
        assert len(taken.messages) == 3


async def test_an_oversized_message_is_dropped_and_the_socket_lives() -> None:
    async with listening() as (_, port, taken):
        async with beater(port) as agent:
            await agent.send(b"x" * (me.MAX_MESSAGE + 1))
            with pytest.raises(TimeoutError):
                await agent.ack(0.2)
        async with beater(port) as agent:
            assert (await agent.say(beat("d0"))).refused == ""
        assert taken.counts == {"taken": 1}


async def test_a_port_that_is_taken_is_named() -> None:
    async with listening() as (_, port, _taken):
        other = HeartbeatListener("r1", lambda _: None, lambda _: None)
        with pytest.raises(ConfigError, match=rf"router\.members_port: cannot bind 127\.0\.0\.1:{port}"):
            other.listen("127.0.0.1", port, KEY)
        other.close()


async def test_the_log_of_refusals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(me, "LOG_PEERS", 3)
    async with listening() as (members, port, _), beater(port) as agent:
        for i in range(10):
            await agent.say(msgspec.msgpack.encode({"t": f"kind{i}"}))
        assert len(members._said) <= 3


async def test_answers_of_a_batch_leave_at_its_end_each_to_its_sender() -> None:
    """Waking ZMQ's own thread for each costs more than the answer."""
    async with listening() as (members, port, taken), contextlib.AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(beater(port, identity=b"a%d" % i)) for i in range(5)]
        for agent in agents:
            await agent.say(beat("d0"))
        answered: list[list[tuple[bytes, bytes]]] = []
        whole = members._send

        def note(socket: zmq.Socket[bytes], answers: list[tuple[bytes, bytes]]) -> None:
            answered.append(answers)
            whole(socket, answers)

        members._send = note  # type: ignore[method-assign]
        for seq, agent in enumerate(agents):
            await agent.send(beat("d0", seq=seq))
        assert [(await agent.ack()).seq for agent in agents] == list(range(5))
        assert sorted(sender for answers in answered for sender, _ in answers) == [b"a%d" % i for i in range(5)]
        assert len(taken.messages) == 10


async def test_an_acknowledgement_says_what_the_router_thinks_of_the_instance() -> None:
    taken = Taken()
    thinks = {"d0": Verdict(ejected=True), "d1": Verdict(stalled=True), "d2": Verdict(hold=True)}
    members = HeartbeatListener("r0", taken.take, taken.count, lambda message: thinks.get(message.instance, Verdict()))
    try:
        async with beater(members.listen("127.0.0.1", 0, KEY)) as agent:
            acks = [await agent.say(beat(f"d{index}")) for index in range(4)]
    finally:
        members.close()
    assert [(ack.ejected, ack.stalled, ack.hold) for ack in acks] == [
        (True, False, False), (False, True, False), (False, False, True), (False, False, False)]
