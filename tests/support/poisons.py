"""Requests that end the engines that serve them, and honest ones beside them, before scripted engines.

    killer = Killer(f.d, f.p)            engines die of a request whose ``user`` begins with ``poison``
    killer.dead                          names of those that did, in order
    killer.how = Play(down_after=3)      die in mid-stream instead of at the request
    back = Revenants(f, restart_s=0.3)   those that die are back after a while, as another incarnation
    back.deaths                          of which request each died, by its ``user``

An engine that died refuses connections, and its agent is taken to beat on, as one does beside an engine that crashed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

from made_streams import MadeReplay, made_line
from recorded import Line, Step, seen_of
from router_fleet import Answer, RouterFleet
from scripted_engine import Play, ScriptedEngine, Seen

from xpyd_sidecar.contract.ids import Incarnation

TOKENS = 24


_stopping: set[asyncio.Future[None]] = set()


def stop(engine: ScriptedEngine) -> None:
    """End it, soon."""
    task = asyncio.ensure_future(engine.stop())
    _stopping.add(task)
    task.add_done_callback(_stopping.discard)


class Killer:
    """Decides for every leg whether its engine dies of it."""

    def __init__(self, engines: Iterable[ScriptedEngine], *, pace_s: float = 0.0) -> None:
        """``pace_s``: between the tokens of honest streams."""
        self.dead: list[str] = []
        self.how: Play | None = None
        self.pace_s = pace_s
        for engine in engines:
            engine.choose = self._chooser(engine)

    def _chooser(self, engine: ScriptedEngine) -> Any:
        def choose(seen: Seen) -> Play | None:
            if not str(seen.body.get("user", "")).startswith("poison"):
                return Play(delay=self.pace_s) if self.pace_s else None
            if engine.name not in self.dead:
                self.dead.append(engine.name)
            if self.how is not None and seen.body.get("stream"):
                return self.how
            stop(engine)
            return Play(die_at="request")
        return choose


class Revenants:
    """Decode engines that die of such requests, and are started again."""

    def __init__(self, f: RouterFleet, *, restart_s: float, pace_s: float) -> None:
        """``pace_s``: between the tokens of honest streams."""
        self._fleet, self._restart_s, self.pace_s = f, restart_s, pace_s
        self.deaths: list[str] = []
        self._lives = dict.fromkeys((engine.name for engine in f.d), 0)
        self._dying: dict[str, asyncio.Task[None]] = {}
        for engine in f.d:
            engine.choose = self._chooser(engine)

    def _chooser(self, engine: ScriptedEngine) -> Any:
        def choose(seen: Seen) -> Play | None:
            user = str(seen.body.get("user", ""))
            if not user.startswith("poison"):
                return Play(delay=self.pace_s)
            if engine.name not in self._dying:
                self.deaths.append(user)
                self._dying[engine.name] = asyncio.ensure_future(self._die(engine))
            return Play(die_at="request")
        return choose

    async def _die(self, engine: ScriptedEngine) -> None:
        await engine.stop()
        await asyncio.sleep(self._restart_s)
        self._lives[engine.name] += 1
        life = self._lives[engine.name]
        await engine.start()
        self._fleet.beat(engine, incarnation=Incarnation(f"i{life}-{engine.name}"), seq=life + 1, interval_s=60.0)
        del self._dying[engine.name]

    async def settle(self) -> None:
        """Wait until all are back."""
        await asyncio.gather(*self._dying.values())


def line() -> Line:
    """What every honest stream says, for which any engine can go on."""
    found = made_line("completions", random.Random(5))
    found.prompt[:] = [11, 12, 13]
    for at, step in enumerate(found.steps):
        found.steps[at] = Step(1000 + at, step.text if at % 4 else "", step.logprobs)
    return found


def asked(said: Line, prompt: str, **fields: Any) -> dict[str, Any]:
    """A greedy stream."""
    return {"model": "tiny", **said.body, "prompt": prompt, "stream": True, "max_tokens": TOKENS, **fields}


def check_whole(answer: Answer, said: Line, body: dict[str, Any]) -> None:
    """It is the whole stream, and nothing of it came twice."""
    assert (answer.status, answer.complete) == (200, True), answer.body
    assert answer.events[-1] == "[DONE]", answer.events[-2:]
    seen, right = seen_of(answer.events), seen_of(list(MadeReplay(said).composed(said, 0, body, "r")))
    assert (seen.texts, seen.finish) == (right.texts, right.finish)


def code_of(answer: Answer) -> Any:
    """The code of an error answer, or of the error event that ends a stream."""
    if answer.status != 200:
        return answer.json["error"]["code"]
    return next((event["error"]["code"] for event in answer.events if isinstance(event, dict) and "error" in event), None)
