"""Older engines over real sockets: they join by their own heartbeat, and pair by request id."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from beats import SERVICE
from older_engine import ID, OlderEngine, Wire
from processes import free_port
from router_fleet import KEY, RouterFleet, fleet

from xpyd_sidecar.contract import p2p
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.fleet.heartbeat_listener import GuestListener
from xpyd_sidecar.router.workers.owner import OwnerRouter

LOOPS = ("router",)


@contextlib.asynccontextmanager
async def older(prefills: int = 1, decodes: int = 1, *, wait: bool = True, engine: dict[str, Any] | None = None,
                **settings: Any) -> AsyncIterator[tuple[RouterFleet, list[OlderEngine], list[OlderEngine]]]:
    wire = Wire()
    ps = [OlderEngine("P", wire, **(engine or {})) for _ in range(prefills)]
    ds = [OlderEngine("D", wire, **(engine or {})) for _ in range(decodes)]
    async with fleet(0, 0, compat="p2p", **settings) as f:
        assert f.router.guests_port not in (0, f.router.members_port)
        try:
            for each in (*ps, *ds):
                await each.start(f.router.guests_port)
            if wait:
                await f.wait(lambda: picked(f) == (prefills, decodes), "the engines to join")
            yield f, ps, ds
        finally:
            for each in (*ps, *ds):
                await each.stop()


def picked(f: RouterFleet) -> tuple[int, int]:
    roster = f.context.roster
    return len(roster.pickable(Role.PREFILL)), len(roster.pickable(Role.DECODE))


@contextlib.asynccontextmanager
async def plain(port: int) -> AsyncIterator[Any]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield socket
    finally:
        context.destroy(linger=0)


async def test_older_engines_join_and_pair_by_request_id() -> None:
    async with older() as (f, [p], [d]):
        answer = await f.complete(prompt="hello", max_tokens=7)
        assert (answer.status, answer.json["choices"][0]["text"]) == (200, "hello answered")
        [request] = p.ids
        assert d.ids == [request]
        found = ID.fullmatch(request)
        assert found is not None
        assert found.groups()[:2] == (p.zmq_address, d.zmq_address)
        assert (p.seen[0]["max_tokens"], d.seen[0]["max_tokens"]) == (1, 7)
        assert "max_completion_tokens" not in p.seen[0]
        assert "kv_transfer_params" not in p.seen[0]
        assert "kv_transfer_params" not in d.seen[0]
        assert {m.fingerprint for m in f.context.roster.members()} == {"p2p"}
        assert p.wire.stored == {}


async def test_a_stream_of_an_older_engine_is_relayed_whole() -> None:
    async with older() as (f, [p], [d]):
        answer = await f.complete(prompt="hello", stream=True)
        assert (answer.status, answer.complete, answer.text) == (200, True, "hello answered")
        assert answer.events[-1] == "[DONE]"
        assert "stream" not in p.seen[0] or p.seen[0]["stream"] is False
        assert d.ids == p.ids
        await f.wait_quiet()


async def test_a_decode_that_refuses_connections_is_replaced_with_another_id() -> None:
    async with older(decodes=2) as (f, _, ds):
        await ds[0].stop()
        for _ in range(4):
            assert (await f.complete()).status == 200
        assert len(ds[1].ids) == 4
        assert all(ds[1].zmq_address in request for request in ds[1].ids)
        await f.wait_quiet()


async def test_a_prefill_that_never_ends_is_given_up_and_decode_is_not_asked() -> None:
    async with older(pair_timeout_s=0.3) as (f, [p], [d]):
        p.hold = asyncio.Event()
        answer = await f.complete()
        assert answer.status == 503
        assert "did not finish within 0.3 s" in answer.json["error"]["message"]
        assert d.seen == []
        await f.wait_quiet()


@pytest.mark.unsanitized
async def test_a_router_of_several_processes_serves_them_too() -> None:
    wire = Wire()
    p, d = OlderEngine("P", wire), OlderEngine("D", wire)
    config = SidecarConfig(service=SERVICE, instance=InstanceName("r0"), key_file="", run_dir="", router=RouterConfig(
        host="127.0.0.1", port=free_port(), members_port=0, compat="p2p", workers=2, heartbeat_s=0.2, resolve_s=0.0))
    owner = OwnerRouter(config, KEY)
    try:
        await owner.start()
        for each in (p, d):
            await each.start(owner.guests_port)
        f = RouterFleet(owner, [], [])
        await f.wait(lambda: picked(f) == (1, 1), "the engines to join")
        joined = owner._index  # heartbeats go on and raise it, faster than an idle worker reports
        await f.wait(lambda: owner._legs.applied() >= joined, "workers that know")
        for _ in range(6):
            assert (await f.complete(prompt="hello")).json["choices"][0]["text"] == "hello answered"
        assert d.ids == p.ids
    finally:
        await owner.end()
        for each in (p, d):
            await each.stop()


async def test_prefills_token_bound_is_also_set_where_a_chat_names_it_otherwise() -> None:
    async with older() as (f, [p], [d]):
        p.seen.clear()
        await f.post("/v1/chat/completions", {"model": "m", "messages": [], "prompt": "x", "max_completion_tokens": 5})
        assert (p.seen[0]["max_tokens"], p.seen[0]["max_completion_tokens"]) == (1, 1)
        assert d.seen[0]["max_completion_tokens"] == 5


async def test_decode_is_asked_when_prefill_has_answered_and_not_before() -> None:
    """One that is asked earlier stops its whole engine until the KV is there."""
    async with older() as (f, [p], [d]):
        p.hold = asyncio.Event()
        asked = asyncio.ensure_future(f.complete())
        await f.wait(lambda: bool(p.seen), "prefill's leg")
        await asyncio.sleep(0.1)
        assert d.seen == []
        p.hold.set()
        assert (await asked).status == 200
        await f.wait(lambda: not f.context.pool.calls, "the calls to end")


async def test_a_prefill_that_fails_is_replaced_and_the_new_id_is_on_both_legs() -> None:
    async with older(prefills=2) as (f, ps, [d]):
        ps[0].status = 500
        for _ in range(4):
            assert (await f.complete()).status == 200
        assert ps[0].seen
        assert len(d.ids) == 4
        assert set(d.ids) <= set(ps[1].ids)
        assert all(ps[1].zmq_address in request for request in d.ids)


async def test_no_older_decode_is_asked_without_a_prefill() -> None:
    """It would find no address in the request id; demo proxies end in ZeroDivisionError here."""
    async with older(prefills=0) as (f, [], [d]):
        answer = await f.complete()
        assert answer.status == 503
        assert "pair by request id" in answer.json["error"]["message"]
        assert d.seen == []
    async with older() as (f, [p], [d]):
        p.status = 500
        answer = await f.complete()
        assert answer.status == 503
        assert "answered 500" in answer.json["error"]["message"]
        answer = await f.complete(n=2)
        assert answer.status == 503
        assert d.seen == []
        await f.wait_quiet()


async def test_no_instance_alive_is_an_answer_with_a_reason() -> None:
    async with older(0, 0) as (f, _, _):
        answer = await f.complete()
        assert (answer.status, answer.json["error"]["message"]) == (503, "no decode instance is known")


async def test_a_client_that_goes_while_decodes_leg_is_held_leaves_nothing_behind() -> None:
    async with older() as (f, [p], [d]):
        p.hold = asyncio.Event()
        asked = asyncio.ensure_future(f.complete())
        await f.wait(lambda: bool(p.seen), "prefill's leg")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await f.wait_quiet()
        assert d.seen == []


async def test_two_by_two_use_all_four_pairs() -> None:
    """One shared counter for both roles only ever uses two of them."""
    async with older(2, 2) as (f, _, ds):
        for _ in range(8):
            assert (await f.complete()).status == 200
        found = [ID.fullmatch(request) for d in ds for request in d.ids]
        assert len({each.groups()[:2] for each in found if each is not None}) == 4


async def test_an_engine_whose_heart_beats_before_its_server_listens_gets_no_request() -> None:
    async with older(wait=False) as (f, _, _), plain(f.router.guests_port) as socket:
        await socket.send(msgspec.msgpack.encode({"type": "D", "http_address": "127.0.0.1:1", "zmq_address": "h:1"}))
        await f.wait(lambda: len(f.context.roster.members()) == 3, "it to be known")
        await f.wait(lambda: picked(f) == (1, 1), "the others to be picked")
        assert all(m.http != ("127.0.0.1:1",) for m in f.context.roster.pickable(Role.DECODE))


async def test_an_engine_that_only_lost_beats_is_kept_and_a_dead_one_is_not() -> None:
    async with older(decodes=2, missed_beats=1) as (f, _, ds):
        for member in f.context.roster.members():
            member.interval_s = 0.1
        ds[0].silence()
        await ds[1].stop()
        roster = f.context.roster
        gone = f"p2p:{ds[1].address}"
        for member in roster.members():
            member.interval_s = 0.1
        await f.wait(lambda: all(m.name != gone for m in roster.members()), "the dead one to be evicted")
        assert f"p2p:{ds[0].address}" in [m.name for m in roster.members()]


@pytest.mark.parametrize(("raw", "words"), [
    (msgspec.msgpack.encode({"type": "X", "http_address": "h:1", "zmq_address": "h:2"}), "type: 'X'"),
    (b"\xc1", "not a heartbeat known here"), (b"", "not a heartbeat known here"),
    (msgspec.msgpack.encode({"type": "P"}), "zmq_address: ''"),
])
async def test_an_unknown_type_does_not_end_the_listener(raw: bytes, words: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with older(0, 0) as (f, _, _), plain(f.router.guests_port) as socket:
        await socket.send(raw)
        await socket.send(msgspec.msgpack.encode({"type": "D", "http_address": "127.0.0.1:1", "zmq_address": "h:1"}))
        await f.wait(lambda: len(f.context.roster.members()) == 1, "the next heartbeat")
        [line] = [r for r in caplog.records if "older engine refused" in r.message]
        assert words in line.getMessage()
        assert line.__dict__["peer"] == "127.0.0.1"


async def test_a_role_that_changed_is_taken_and_the_identity_may_come_back() -> None:
    async with older(0, 0) as (f, _, _):
        for kind in ("P", "D", "P"):
            async with plain(f.router.guests_port) as socket:
                await socket.send(msgspec.msgpack.encode(
                    {"type": kind, "http_address": "127.0.0.1:1", "zmq_address": "h:1"}))
                role = Role.PREFILL if kind == "P" else Role.DECODE
                await f.wait(lambda role=role: [m.role for m in f.context.roster.members()] == [role],  # type: ignore[misc]
                             "the role")


async def test_engines_that_want_parameters_get_those_of_prefills_answer() -> None:
    moriio = {"zmq_address": "host:127.0.0.1,handshake:6301,notify:61005", "params": True, "transfer_mode": "READ",
              "dp_size": 1, "tp_size": 2}
    async with older(engine=moriio) as (f, [p], [d]):
        assert (await f.complete()).status == 200
        asked, given = p.seen[0]["kv_transfer_params"], d.seen[0]["kv_transfer_params"]
        assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
        assert given == {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [1, 2],
                         "remote_engine_id": p.zmq_address, "transfer_id": asked["transfer_id"]}
        assert p.ids == d.ids
        assert asked["transfer_id"] in p.ids[0]


async def test_the_plain_port_is_closed_unless_it_is_asked_for() -> None:
    async with fleet(1, 1) as f:
        assert (f.router.guests, f.router.guests_port) == (None, 0)


async def test_agents_still_need_the_key_where_older_engines_are_served() -> None:
    async with older(0, 0) as (f, _, _), plain(f.router.members_port) as stranger:
        await stranger.send(msgspec.msgpack.encode({"type": "D", "http_address": "127.0.0.1:1", "zmq_address": "h:1"}))
        await asyncio.sleep(0.2)
        assert f.context.roster.members() == []


async def test_a_port_that_is_taken_is_named() -> None:
    async with older(0, 0) as (f, _, _):
        other = GuestListener(f.context.service, lambda _: None, lambda _: None, list)
        with pytest.raises(ConfigError, match=r"router\.compat: members_port"):
            other.listen("127.0.0.1", f.router.guests_port)
        other.close()


async def test_a_heartbeat_that_is_too_large_ends_its_connection_alone() -> None:
    async with older(0, 0) as (f, _, _):
        async with plain(f.router.guests_port) as socket:
            await socket.send(b"x" * (p2p.MAX_MESSAGE + 1))
            await asyncio.sleep(0.1)
        async with plain(f.router.guests_port) as socket:
            await socket.send(msgspec.msgpack.encode({"type": "D", "http_address": "127.0.0.1:1", "zmq_address": "h:1"}))
            await f.wait(lambda: len(f.context.roster.members()) == 1, "the other's heartbeat")
