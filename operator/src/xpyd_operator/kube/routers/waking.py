"""Long polls that the operator keeps open to routers of a service of which nobody decodes (``contract.waking``).

    keep(routers, call) ─▶ one task for each router: POST /wake, signed ─┐
         ▲                                                               ├─ somebody is held ─▶ noted; a round begins
         └── the next round, with what it then wants ◀───────────────────┘

Laws
    1. One poll for each router at most, and none where ``call`` is None. Other words end the polls with the words before.
    2. An answer counts only with the signature of who has the service's key, and only where no instance was wanted; until
       it is taken, or the same router tells something else.
    3. A router that is not reached, or tells the same again at once, is asked a second later, then later, up to 5 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.kube.routers import calls
from xpyd_operator.kube.routers.fleet import KeyOf
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.waking import ANSWER_MAX, PATH, POLL_S, WakeAnswer, WakeCall

logger = logging.getLogger(__name__)
PACE_S = 1.0
LONGEST_S = 5.0
BEYOND_S = 10.0
"""A poll that was not answered so long after its time is lost."""


class WakeCaller:
    """Of one service. It has connections of its own: polls that are open must not keep other calls waiting."""

    def __init__(self, woken: Callable[[], None], *, pace_s: float = PACE_S) -> None:
        """``woken``: somebody is held: look at it soon."""
        self._woken = woken
        self._pace_s = pace_s
        self._session: aiohttp.ClientSession | None = None
        self._call: WakeCall | None = None
        self._polls: dict[str, asyncio.Task[None]] = {}
        """By the uid of the router's pod."""
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        """Routers to which a poll is kept open."""
        return len(self._polls)

    async def keep(self, routers: Sequence[Facts], key_of: KeyOf, call: WakeCall | None, *, tls: bool = False) -> None:
        """Keep polls open to these routers, with these words; None: to none.

        Args:
            routers: usable pods.
            key_of: tells the key of a pod.
            call: what to say.
            tls: whether routers should speak HTTPS by now.
        """
        if call is None:
            await self.close()
            return
        there = {each.uid: each for each in routers}
        await self._end([uid for uid in self._polls if call != self._call or uid not in there])
        self._held = {uid: held for uid, held in self._held.items() if uid in there and call.wanted < 1}
        self._call = call
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # one for each router, of which a service has 64 at most
            self._session = aiohttp.ClientSession(connector=connector)
        for uid, pod in there.items():
            if uid not in self._polls or self._polls[uid].done():
                self._polls[uid] = asyncio.create_task(self._go_on(self._session, pod, key_of, call, tls=tls))

    def take(self) -> int:
        """How many requests are held, as far as was told since the last time."""
        held = sum(self._held.values())
        self._held.clear()
        return held

    async def close(self) -> None:
        """Wait for no answer any more."""
        await self._end(list(self._polls))
        self._call = None
        self._held.clear()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _end(self, uids: Sequence[str]) -> None:
        tasks = [self._polls.pop(uid) for uid in uids]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _go_on(self, session: aiohttp.ClientSession, pod: Facts, key_of: KeyOf, call: WakeCall, *, tls: bool) -> None:
        clock, failed = asyncio.get_running_loop().time, 0
        while True:
            began, answer = clock(), None
            try:
                answer = await self._ask(session, pod, key_of(pod), call, tls=tls)
            except Exception:
                logger.exception("a poll of router %s failed", pod.name)
            failed = 0 if answer is not None else failed + 1
            if answer is not None and answer.held > 0 and call.wanted < 1:
                self._held[pod.uid] = answer.held
                self._woken()
            elif answer is not None:
                self._held.pop(pod.uid, None)  # they were served, or have left
            pause_s = min(LONGEST_S, self._pace_s * 2.0 ** min(failed, 8))
            await asyncio.sleep(max(0.0, pause_s - (clock() - began)))

    async def _ask(
        self, session: aiohttp.ClientSession, pod: Facts, key: ServiceKey | None, call: WakeCall, *, tls: bool
    ) -> WakeAnswer | None:
        """One poll; None: nothing that counts was answered."""
        try:
            answer = await calls.ask_router(session, pod, key, "POST", PATH, body=msgspec.json.encode(call), tls=tls,
                                            timeout_s=POLL_S + BEYOND_S, most=ANSWER_MAX)
            if answer is None or key is None:
                return None
            if not answer.is_signed(key):
                logger.warning("router %s: the answer to a poll has not the signature of this service", pod.name)
                return None
            return msgspec.json.decode(answer.body, type=WakeAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
