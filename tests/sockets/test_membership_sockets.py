"""Membership at scale over real sockets: agents' DEALERs with CURVE, a whole router, and beats that are lost on the way."""

from __future__ import annotations

import asyncio
import logging
import random

import msgspec
import pytest
import zmq
from beats import beat
from router_fleet import KEY, fleet
from scripted_engine import ScriptedEngine

from xpyd_sidecar.agent.beats import dealer
from xpyd_sidecar.contract.ids import AgentId, Role

LOOPS = ("uvloop",)
pytestmark = [pytest.mark.unsanitized, pytest.mark.test_all]
AGENTS = 256
INTERVAL_S = 0.5


async def test_256_agents_over_sockets_with_a_tenth_of_beats_lost_and_nobody_is_evicted(
        caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rng = random.Random(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = await ScriptedEngine("all").start()
    sockets = []
    async with fleet(0, 0, heartbeat_s=INTERVAL_S, missed_beats=2) as f:
        try:
            for index in range(AGENTS):
                socket = dealer(context, KEY, INTERVAL_S)
                socket.connect(f"tcp://127.0.0.1:{f.router.members_port}")
                sockets.append(socket)
                if index % 16 == 15:
                    await asyncio.sleep(0.01)
            await f.wait(lambda: all(socket.poll(0, zmq.POLLOUT) for socket in sockets), "connections", 60.0)
            lost = sent = acked = 0

            def all_acked() -> bool:
                nonlocal acked
                for socket in sockets:
                    while socket.poll(0):
                        socket.recv()
                        acked += 1
                return acked == sent

            for turn in range(16):
                for index, socket in enumerate(sockets):
                    if turn > 3 and rng.random() < 0.1:
                        lost += 1
                        continue
                    message = beat(f"e{index}", (Role.PREFILL, Role.DECODE)[index % 2], engine.address, seq=turn,
                                   agent=AgentId("a"), interval_s=INTERVAL_S)
                    socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
                    sent += 1
                    if index % 16 == 15:
                        await asyncio.sleep(INTERVAL_S * 16 / AGENTS)
            roster = f.context.roster
            await f.wait(lambda: sum(len(roster.pickable(role)) for role in Role) == AGENTS, "all to be picked")
            await f.wait(all_acked, "acks of all beats that were sent")
            assert lost > 200
            assert len(roster.members()) == AGENTS
            assert [r.getMessage() for r in caplog.records if "evicted" in r.getMessage()] == []
        finally:
            for socket in sockets:
                socket.close(linger=0)
            context.term()
            await engine.stop()
