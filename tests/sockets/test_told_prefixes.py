"""Caches told over real sockets: what routers believe follows what engines say, also through a router's new beginning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from agent_fakes import KEY
from beats import beat

from xpyd_sidecar.agent.beats import Beats
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance.candidates import PrefixCacheIndex
from xpyd_sidecar.router.balance.told_prefixes import ToldPrefixes
from xpyd_sidecar.router.fleet.heartbeat_listener import HeartbeatListener, Verdict
from xpyd_sidecar.router.fleet.roster import Roster

PROMPTS = [PromptPrefix(b"%03d" % at * 500) for at in range(600)]
KEYS = frozenset(key for prompt in PROMPTS for _, key in prompt.keys)


class ListeningRouter:
    """Of a router what hears of caches."""

    def __init__(self, port: int = 0, *, takes: bool = True) -> None:
        self.roster = Roster(beat("d0").service, started=0.0, settle_s=1.0, missed_beats=3)
        self.holdings, self.results = PrefixCacheIndex(), list[str]()
        self.listener = HeartbeatListener("r0", lambda message: len(self.roster.on_message(0.0, message)),
                                          self.results.append, lambda _: Verdict(prefixes=self._taken()))
        if takes:
            self.listener.take_prefixes = ToldPrefixes(self.roster, self.holdings).take
        self.port = self.listener.listen("127.0.0.1", port, KEY)

    def _taken(self) -> int:
        return max((member.prefixes_seq for member in self.roster.members()), default=0)

    def held(self, prompt: PromptPrefix) -> int:
        prompt.path = None
        members = self.roster.members()
        return self.holdings.held_bytes(members[0], prompt) if members else 0


@pytest.fixture
async def beats() -> AsyncIterator[list[Beats]]:
    made: list[Beats] = []
    yield made
    for each in made:
        await each.close()


async def start(beats: list[Beats], port: int) -> Beats:
    beats.append(Beats((HostPort(f"127.0.0.1:{port}"),), KEY, heartbeat_s=0.1, resolve_s=0.05))
    await beats[0].resolve_once()
    return beats[0]


async def acknowledged(sender: Beats, seq: int, held: HeldPrefixes) -> None:
    """A beat, with what is held, and its acknowledgement."""
    sender.send(beat("d0", seq=seq), held)
    async with asyncio.timeout(30):
        while sender.routers()[0].acked < seq:  # noqa: ASYNC110 (what is awaited has no event)
            await asyncio.sleep(0.005)


async def test_a_router_that_begins_anew_has_all_of_it_after_two_beats(beats: list[Beats]) -> None:
    router = ListeningRouter()
    sender, held = await start(beats, router.port), HeldPrefixes(KEYS)
    try:
        for seq in (1, 2, 3):
            await acknowledged(sender, seq, held)
        assert all(router.held(prompt) == len(prompt) for prompt in PROMPTS)
        fewer = HeldPrefixes(KEYS - {key for _, key in PROMPTS[0].keys[2:]})
        await acknowledged(sender, 4, fewer)
        await acknowledged(sender, 5, fewer)
        assert router.held(PROMPTS[0]) == 512
        router.listener.close()
        router = ListeningRouter(router.port)
        await acknowledged(sender, 6, fewer)  # its acknowledgement says that nothing is known there
        for seq in (7, 8):
            await acknowledged(sender, seq, fewer)
        assert router.held(PROMPTS[0]) == 512
        assert all(router.held(prompt) == len(prompt) for prompt in PROMPTS[1:])
        assert set(router.results) == {"taken"}
    finally:
        router.listener.close()


async def test_a_router_that_takes_none_is_sent_none(beats: list[Beats]) -> None:
    router = ListeningRouter(takes=False)
    try:
        sender = await start(beats, router.port)
        for seq in range(1, 6):
            await acknowledged(sender, seq, HeldPrefixes(KEYS))
        assert len(router.results) == 5
        assert router.held(PROMPTS[0]) == 0
    finally:
        router.listener.close()
