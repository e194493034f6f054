"""Asking the routers of a service what they know, each answer within a deadline.

One settled router tells load, drain state and fingerprints for all; the one that told last is preferred, so that its counts
go on. Pods that only learn the roster are asked too, since they get clients once they are settled (while pods have several
keys: and know a pair, as none with the newest key hears of engines with another one); and the routers in turn, so that
one that has lost the roster is noticed. While nothing is under way nobody waits for an answer: it counts from the next
round on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Sequence

import aiohttp
import msgspec

from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.kube.routers import calls
from xpyd_operator.kube.routers.observe import RouterAnswers
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role, State
from xpyd_sidecar.contract.keys import ServiceKey

KeyOf = Callable[[Facts], ServiceKey | None]
"""The key of a pod's service as that pod has it; None where it is not known."""
FLEET = "/fleet"
ANSWER_MAX = 16 << 20
EVERY_S = 5.0
HURRY_S = 1.0
"""While some pod that learns the roster is not settled yet, or no router tells."""
FORGET_S = 60.0
"""How long a router that was settled is taken to be so without being asked again."""


class Fleets:
    """The routers of one service. ``limit``: most requests at a time."""

    def __init__(self, session: aiohttp.ClientSession, *, timeout_s: float = 2.0) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._asked_at = float("-inf")
        self._picture: Hashable = None
        self._told_by = ""
        self._turn = 0
        self._fleet: Fleet | None = None
        self._later: asyncio.Task[None] | None = None
        self._settled: dict[str, float] = {}
        """uid → when its router last said that it is settled."""
        self.hurried = False
        """Some router was not settled when it was last asked: it is worth asking again soon."""

    async def ask(
        self, routers: Sequence[Facts], learners: Sequence[Facts], key_of: KeyOf, now: float, *, limit: int,
        tls: bool = False, picture: Hashable = None, prefill: bool = True,
    ) -> RouterAnswers:
        """What is known now; asks at most once in 5 s, or in one while something is under way or ``picture`` changed.

        Args:
            routers: usable pods whose router clients reach.
            learners: usable pods whose router only learns the roster.
            key_of: tells the key of a pod.
            now: unix seconds.
            limit: most requests.
            tls: whether routers should speak HTTPS by now.
            picture: what the caller saw; another value than last time makes the question due at once.
            prefill: whether prefill instances are asked for.
        """
        every = (*routers, *learners)
        due_s = HURRY_S if self._waits(every) else EVERY_S
        if picture != self._picture or not 0 <= now - self._asked_at < due_s:
            told = any(each.uid == self._told_by for each in routers)
            calm = told and picture == self._picture and not self._waits(every)
            self._picture, self._asked_at = picture, now
            self.close()
            chosen = self._choose(routers, learners, limit)
            held = {each.uid for each in learners} if len({each.key for each in every}) > 1 else None
            look = self._look(chosen, now, held, lambda pod: self._one(pod, key_of(pod), tls), prefill=prefill)
            if calm:
                self._later = asyncio.create_task(look)
            else:
                await look
        there = {each.uid for each in every}
        self._settled = {uid: when for uid, when in self._settled.items() if uid in there and now - when < FORGET_S}
        self.hurried = self._waits(every)
        names = frozenset(each.name for each in every if each.uid in self._settled)
        return RouterAnswers(self._fleet, names)

    async def fetch_fleets(
        self, routers: Sequence[Facts], key_of: KeyOf, *, tls: bool = False
    ) -> dict[str, Fleet]:
        """Ask each settled router for its fleet, by the uid of its pod: each counts its own requests."""
        answers = await asyncio.gather(*(self._one(each, key_of(each), tls) for each in routers))
        return {
            each.uid: answer
            for each, answer in zip(routers, answers, strict=True)
            if answer is not None and answer.settled
        }

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._later is not None:
            self._later.cancel()
            self._later = None

    async def _look(
        self, chosen: Sequence[Facts], now: float, held: Collection[str] | None,
        one: Callable[[Facts], Awaitable[Fleet | None]], *, prefill: bool,
    ) -> None:
        """``held``: those who get clients only once they know a pair, where pods have several keys."""
        answers = await asyncio.gather(*(one(each) for each in chosen))
        kept = [None if answer is not None and held and pod.uid in held and not _pairs(answer, prefill=prefill) else answer
                for pod, answer in zip(chosen, answers, strict=True)]
        self._note(now, chosen, kept, fullest=held is not None)

    def _waits(self, pods: Sequence[Facts]) -> bool:
        return bool(pods) and (self._fleet is None or any(each.uid not in self._settled for each in pods))

    def _note(self, now: float, chosen: Sequence[Facts], answers: Sequence[Fleet | None], *, fullest: bool) -> None:
        told: dict[str, Fleet] = {}
        for each, answer in zip(chosen, answers, strict=True):
            if answer is not None and answer.settled:
                self._settled[each.uid] = now
                told[each.uid] = answer
            else:
                self._settled.pop(each.uid, None)
        if self._told_by not in told:
            self._told_by = next((each.uid for each in chosen if each.uid in told), "")
        if fullest and told:  # routers with the newest key do not hear of engines with another one
            self._told_by = max((self._told_by, *told), key=lambda uid: len(told[uid].instances))
        self._fleet = told.get(self._told_by)

    def _choose(self, routers: Sequence[Facts], learners: Sequence[Facts], limit: int) -> list[Facts]:
        new = [each for each in routers if each.uid not in self._settled]
        last = [each for each in routers if each.uid == self._told_by]
        self._turn += 1
        turn = [routers[self._turn % len(routers)]] if routers else []
        rest = list(routers) if self._fleet is None else []
        return _distinct((*last, *turn, *learners, *new, *rest))[:limit]

    async def _one(self, pod: Facts, key: ServiceKey | None, tls: bool) -> Fleet | None:
        try:
            answer = await calls.ask_router(self._session, pod, key, "GET", FLEET, tls=tls, timeout_s=self._timeout_s,
                                            most=ANSWER_MAX)
            return None if answer is None else msgspec.json.decode(answer.body, type=Fleet)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


def _pairs(fleet: Fleet, *, prefill: bool) -> bool:
    """Whether a router knows somebody of both roles who can serve together."""
    ready = [each for each in fleet.instances if each.state is State.READY and not each.suspended]
    decode = {each.fingerprint for each in ready if each.role is Role.DECODE}
    return bool(decode & {each.fingerprint for each in ready if each.role is Role.PREFILL} if prefill else decode)


def _distinct(pods: Iterable[Facts]) -> list[Facts]:
    return list({each.uid: each for each in pods}.values())
