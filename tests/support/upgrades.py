"""What is watched while a service is upgraded under load: a router's picture, again and again, and a stream that goes on.

    async with Watch(fetch, {"prefill": 1, "decode": 1}) as watch, Lasting(url, case, reference) as stream: …
    watch.check()
    stream.check()
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import openai
from background import Background
from corpus import Case, Reference, Verdict, judge
from engines import MODEL_NAME
from traffic import client

from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Role, State

POLL_S = 0.2


class Watch(Background):
    """Asks a router who serves and who was paired, and keeps what should never have been."""

    def __init__(self, fetch: Callable[[], Awaitable[Fleet | None]], floors: Mapping[str, int]) -> None:
        """``floors``: by role, how many must serve at each moment."""
        self.seen = 0
        self.faults: list[str] = []
        self.prints: dict[str, str] = {}
        """Fingerprint of each instance that served, by name and incarnation."""
        self.handed: dict[tuple[str, str], int] = {}
        """Hand-overs of KV seen, by the fingerprints of both sides."""
        self._fetch = fetch
        self._floors = floors
        self._looks: tuple[dict[str, str], dict[str, str]] = {}, {}
        """Fingerprint by name in the look before and in this one: names are used again."""
        self._ever: dict[str, set[str]] = {}
        """All fingerprints that a name has had."""
        self._counts: dict[tuple[str, str], int] = {}

    def check(self) -> None:
        """Fails with what was wrong."""
        assert self.seen > 20, f"the router was seen {self.seen} times"
        assert not self.faults, (len(self.faults), self.faults[:10])
        assert self.handed, "no KV was handed over"
        assert all(prefill == decode for prefill, decode in self.handed), self.handed

    async def work(self) -> None:
        """Look again and again."""
        while True:
            fleet = await self._fetch()
            if fleet is not None:
                self._take(fleet)
            await asyncio.sleep(POLL_S)

    def _take(self, fleet: Fleet) -> None:
        self.seen += 1
        serving = [each for each in fleet.instances if each.state is State.READY and not each.suspended]
        for each in serving:
            self.prints[f"{each.instance} {each.incarnation[:6]}"] = each.fingerprint
        for role, floor in self._floors.items():
            found = [each.instance for each in serving if each.role == role]
            if len(found) < floor:
                self.faults.append(f"{len(found)} of at least {floor} serve as {role}: {found}")
        if not _of(serving, Role.PREFILL) & _of(serving, Role.DECODE):
            found = [f"{each.instance} {each.fingerprint}" for each in serving]
            self.faults.append(f"no prefill and decode of one fingerprint: {found}")
        self._looks = self._looks[1], {each.instance: each.fingerprint for each in fleet.instances if each.fingerprint}
        for name, fingerprint in self._looks[1].items():
            self._ever.setdefault(name, set()).add(fingerprint)
        before, self._counts = self._counts, {(pair.prefill, pair.decode): pair.count for pair in fleet.pairs}
        for pair, count in self._counts.items():
            if (more := count - before.get(pair, 0)) > 0:
                prefill, decode = self._lives(pair)
                same = prefill & decode
                sides = (min(same), min(same)) if same else (min(prefill), min(decode))
                self.handed[sides] = self.handed.get(sides, 0) + more

    def _lives(self, pair: tuple[str, str]) -> list[set[str]]:
        """The fingerprints that both of a pair may have had. A request counts at its end: where one of them is there no
        more, the other one's name may have been taken again since it began, and be another life's in both looks.
        """
        there = [{look[name] for look in self._looks if name in look} for name in pair]
        return there if all(there) else [self._ever[name] for name in pair]


class Lasting(Background):
    """One greedy stream after the other, each as long as the model allows: one is open whatever happens meanwhile."""

    def __init__(self, url: str, case: Case, reference: Reference) -> None:
        self.ended = 0
        self.tokens: list[int] = []
        """Of the stream that is open."""
        self.faults: list[str] = []
        self._url, self._case, self._reference = url, case, reference

    def check(self) -> None:
        """What came is what the plain engine says, also of the stream that is open."""
        assert not self.faults, self.faults
        self._judge(len(self.tokens))
        assert not self.faults, self.faults
        assert self.ended or self.tokens, "no token came"

    async def work(self) -> None:
        """Ask for one stream after the other."""
        async with client(self._url, timeout_s=600.0) as api:
            while not self.faults:
                self.tokens = []
                try:
                    await self._one(api)
                except (openai.OpenAIError, OSError) as error:
                    self.faults.append(f"after {len(self.tokens)} tokens: {type(error).__name__}: {error}")
                else:
                    self._judge(self._case.max_tokens)
                    self.ended += 1

    async def _one(self, api: openai.AsyncOpenAI) -> None:
        body = self._case.body(MODEL_NAME)
        more = {name: body.pop(name) for name in ("ignore_eos", "return_token_ids")}
        async for event in await api.completions.create(**body, stream=True, extra_body=more):  # type: ignore[call-overload]
            for choice in event.choices:
                self.tokens += choice.token_ids or ()

    def _judge(self, count: int) -> None:
        so_far = Reference(self._reference.tokens[:count], self._reference.gaps[:count])
        if judge(so_far, tuple(self.tokens)) is Verdict.WRONG:
            self.faults.append(f"{len(self.tokens)} of {count} tokens, not those of the plain engine: {self.tokens[-20:]}")


def _of(serving: list[FleetInstance], role: Role) -> set[str]:
    return {each.fingerprint for each in serving if each.role is role}
