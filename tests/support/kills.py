"""Kills at random points of recorded streams, before a router in this process: what clients have of them afterwards.

    report = await kill_streams(f, kills=960, seed=1)
    report.check()

Engines die in the ways that real ones do (a stream's connection ends, an error event, an abort chunk, a silent stream with
the socket open) or as a whole, with everything they serve; some streams are killed again where they went on.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from judge import judge
from recorded import Request, load
from recorded_requests import PATHS
from router_fleet import Answer, RouterFleet, request_bytes
from scripted_engine import Play, ScriptedEngine, Seen

from xpyd_sidecar.contract.ids import Incarnation

ANSWER_S = 60.0
AT_ONCE = 12
SHARE = 0.5
"""Of the requests that are killed; of those, ``AGAIN`` are killed once more where they went on."""
AGAIN = 0.15


class Way(Enum):
    """How an engine dies on a stream."""

    CLOSE = "the connection ends"
    HALF = "the connection ends inside a chunk"
    CUT = "the body ends properly, without [DONE]"
    ERROR = "an error event, [DONE], a clean end"
    ABORT = "an abort chunk, [DONE], a clean end"
    DOWN = "the whole engine ends"
    SILENT = "silent with the socket open, new connections refused"


FIELDS = {Way.CLOSE: "close_after", Way.HALF: "die_after", Way.CUT: "cut_after", Way.ERROR: "error_after",
          Way.ABORT: "abort_after", Way.DOWN: "down_after", Way.SILENT: "silent_after"}
WEIGHTS = {Way.CLOSE: 25, Way.HALF: 15, Way.CUT: 10, Way.ERROR: 15, Way.ABORT: 15, Way.DOWN: 40, Way.SILENT: 20}
WHOLE = frozenset({Way.DOWN, Way.SILENT})


@dataclass
class Report:
    """What came of it."""

    kills: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    answers_200: int = 0
    killed: int = 0
    """Requests of which at least one stream was killed, and that another engine can finish."""
    finished: int = 0
    """Of those."""
    convicted: int = 0
    """Requests that ended an engine as a whole, and were refused for that (decision 0025)."""
    not_repeatable: int = 0
    """Killed requests that no other engine can finish the same way: an error event is right."""
    wrong: int = 0
    lost_tokens: int = 0
    duplicated: int = 0
    untouched_failed: int = 0
    """Requests that failed without any kill of theirs."""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    @property
    def whole(self) -> int:
        """Engines that died as a whole."""
        return sum(self.ways[way.value] for way in WHOLE)

    @property
    def finished_share(self) -> float:
        return self.finished / self.killed if self.killed else 1.0

    def judged(self, request: Request, answer: Answer, words: str) -> bool:
        """Count an answer; whether it finished. ``words`` come before what is wrong with it."""
        if answer.status != 200:
            return False
        self.answers_200 += 1
        verdict = judge(request, answer.events, complete=answer.complete)
        if verdict.fault:
            self.faults.append(words + verdict.fault)
            self.lost_tokens += verdict.kind == "lost"
            self.duplicated += verdict.kind == "duplicated"
            self.wrong += verdict.kind == "wrong"
        return verdict.finished

    def check(self) -> None:
        """The goals: nothing duplicated, lost or wrong; 99 % of the killed streams finish."""
        assert not self.faults, self.faults[:5]
        assert self.finished_share >= 0.99, (self.finished_share, self.unfinished[:5])
        assert self.convicted <= 0.05 * self.kills, self.told()
        assert not self.untouched_failed, self.unfinished[:5]

    def told(self) -> dict[str, Any]:
        """For the results file."""
        shown = asdict(self) | {"finished_share": round(self.finished_share, 4), "seconds": round(self.seconds, 1)}
        return shown | {"faults": self.faults[:20], "unfinished": self.unfinished[:20], "ways": dict(self.ways)}


class Killer:
    """Decides for every decode leg whether it dies, how and where."""

    def __init__(self, fleet: RouterFleet, source: random.Random) -> None:
        self._fleet = fleet
        self._random = source
        self._planned: dict[str, int] = {}
        self._down: set[ScriptedEngine] = set()
        self._at: dict[str, ScriptedEngine] = {}
        """Where each request is that has not ended."""
        self._met: set[str] = set()
        """Those of them that are, or were, on an engine that dies as a whole. None meets two such deaths: of one that does,
        a router must take it that it ends engines."""
        self._starts = 0
        self.done: dict[str, list[tuple[Way, int, str]]] = {}
        """Kills by request: how, behind how many events, where."""
        for engine in fleet.d:
            engine.choose = self._chooser(engine)

    def plan(self, request_id: str, times: int) -> None:
        """Kill the next ``times`` streams of this request."""
        self._planned[request_id] = times

    def _chooser(self, engine: ScriptedEngine) -> Any:
        def choose(seen: Seen) -> Play | None:
            name = seen.headers.get("x-request-id", "")
            self._at[name] = engine
            if engine in self._down:
                self._met.add(name)
            if not self._planned.get(name) or engine.replay is None:
                return None
            self._planned[name] -= 1
            way = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            if way in WHOLE and (self._met or len(self._fleet.d) - len(self._down) < 3):
                way = Way.CLOSE  # somebody must be left, also for a second kill
            if way in WHOLE:
                self._down.add(engine)
                self._met.update(other for other, where in self._at.items() if where is engine)
            at = self._random.randint(0, len(engine.replay.stream(seen.path, seen.body, name)))
            self.done.setdefault(name, []).append((way, at, engine.name))
            return Play(**{FIELDS[way]: at})
        return choose

    async def ended(self, request_id: str) -> None:
        """A request is over: start what died as a whole on it again, as a new incarnation."""
        self._at.pop(request_id, None)
        self._met.discard(request_id)
        for way, _, name in self.done.get(request_id, ()):
            if way in WHOLE:
                [engine] = [one for one in self._fleet.d if one.name == name]
                if engine in self._down:
                    await engine.stop()
                    engine.port = 0  # its old one may be somebody's by now
                    await engine.start()
                    self._starts += 1
                    self._fleet.beat(engine, incarnation=Incarnation(f"again-{self._starts}"), interval_s=60.0)
                    self._down.discard(engine)


async def kill_streams(fleet: RouterFleet, kills: int, seed: int, requests: list[Request] | None = None, *,
                       whole: int = 2) -> Report:
    """Send recorded requests, ``SHARE`` of them to be killed, until so many kills are done, and so many engines have died
    as a whole: one at a time dies so, thus a slow machine sees fewer of those among the same number of kills."""
    source = random.Random(seed)
    corpus = requests or load().requests
    killer = Killer(fleet, source)
    report = Report()
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def worker(mine: int) -> None:
        number = 0
        while report.kills < kills or report.whole < whole:
            number += 1
            name = f"k{mine}-{number}"
            request = source.choice(corpus)
            if source.random() < SHARE:
                killer.plan(name, 2 if source.random() < AGAIN else 1)
            await _one(fleet, killer, report, request, name)

    async with asyncio.TaskGroup() as group:
        for mine in range(AT_ONCE):
            group.create_task(worker(mine))
    report.seconds = loop.time() - began
    for engine in fleet.d:
        report.faults += [f"{engine.name} was asked what nobody should ask: {words}" for words in engine.unknown]
    return report


async def _one(fleet: RouterFleet, killer: Killer, report: Report, request: Request, name: str) -> None:
    report.requests += 1
    # Means nothing without a beam search; but so no two requests are equal, of which one would be blamed for the other.
    body = {"model": "tiny", **request.body, "length_penalty": 1 + report.requests / 1e6, "stream": True}
    answer = await fleet.raw(request_bytes(PATHS[request.api], body, headers={"X-Request-Id": name}), ANSWER_S)
    kills = killer.done.get(name, [])
    report.kills += len(kills)
    report.ways.update(way.value for way, _, _ in kills)
    await killer.ended(name)
    words = f"{name} ({request.name}; {', '.join(f'{way.name} at {at} on {where}' for way, at, where in kills)}): "
    finished = report.judged(request, answer, words)
    if request.way == "error":
        report.not_repeatable += bool(kills)
    elif b'"poison_request"' in answer.body and any(way in WHOLE for way, _, _ in kills):
        report.convicted += 1
        return
    elif kills:
        report.killed += 1
        report.finished += finished
    elif not finished:
        report.untouched_failed += 1
    if not finished and request.way != "error":
        report.unfinished.append(words + f"{answer.status} {answer.body[-400:].decode(errors='replace')}")
