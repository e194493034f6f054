"""Requests that end engines and are alike, though no two are equal, before a router with sockets and engines that come
back; and routers that tell each other.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from beats import Beater, beat
from made_streams import MadeReplay
from more_cases import more
from msgspec import Raw
from poisons import Revenants, asked, check_whole, code_of, line
from router_fleet import KEY, RouterFleet, fleet
from scripted_engine import Play

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.contract.membership import Ack, Heartbeat
from xpyd_sidecar.router.api.bodies import RequestHash, hash_of
from xpyd_sidecar.router.api.labels import Label, labels_of
from xpyd_sidecar.router.fleet.member import DeathVerdict
from xpyd_sidecar.router.serving.poison_ledger import Word

LOOPS = ("uvloop",)
POISONS, HONEST, AT_ONCE = 15, 150, 5
KINDS: dict[str, tuple[int, float, Any]] = {
    "a grammar": (4, 0.1, lambda draw: {"prompt": f"{draw.random()}", "structured_outputs": {"grammar": "root ::= (a)*"}}),
    "a prefix": (4, 0.1, lambda draw: {"prompt": "agent seven mends the parser " * 9 + f"{draw.random()}"}),
    "nothing in common": (3 * POISONS, 0.8, lambda draw: {"prompt": "".join(draw.choices("abcdefgh", k=200))}),
}
"""Deaths at most, seconds between two of them, and what one is like."""


@pytest.fixture(autouse=True)
def _all_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.serving.quarantine.SAMPLED", 1000)


def hash_of_body(body: dict[str, Any]) -> RequestHash:
    return hash_of("completions", {name: Raw(json.dumps(value).encode()) for name, value in body.items()})


def quarantined(f: RouterFleet) -> set[RequestHash]:
    """Those that are told to go to quarantine from now on; the set grows."""
    told: set[RequestHash] = set()
    ledger = f.context.poison.ledger
    ask = ledger.judge_request

    def note(now: float, request: RequestHash, labels: Collection[Label] = ()) -> object:
        said = ask(now, request, labels)
        if said is Word.QUARANTINE:
            told.add(request)
        return said

    ledger.judge_request = note
    return told


class Load:
    """Honest streams, some at once, from a number of clients."""

    def __init__(self, f: RouterFleet) -> None:
        self.fleet, self.said = f, line()
        self.bodies: list[dict[str, Any]] = []

    async def run(self, requests: int) -> None:
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                body = asked(self.said, f"honest {len(self.bodies)}", seed=len(self.bodies))
                self.bodies.append(body)
                check_whole(await self.fleet.post("/v1/completions", body), self.said, body)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["a grammar", *more(kind for kind in KINDS if kind != "a grammar")])
async def test_fifteen_poisons_among_150_honest_streams(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.serving.context.secrets.randbits", lambda _: 7)
    most, every_s, made = KINDS[kind]
    draw = random.Random(7)
    async with fleet(2, 8, MadeReplay(line())) as f:
        engines, load, told = Revenants(f, restart_s=0.3, pace_s=0.0), Load(f), quarantined(f)
        await load.run(100)
        engines.pace_s = 0.02
        await asyncio.sleep(1.1)  # until they count
        honest = asyncio.ensure_future(load.run(HONEST))
        codes = []
        for number in range(POISONS):
            body = {"model": "tiny", "max_tokens": 24, "user": f"poison {number}", **made(draw)}
            codes.append(code_of(await f.post("/v1/completions", body)))
            await asyncio.sleep(every_s)
        await honest
        assert codes == ["poison_request"] * POISONS
        assert len(engines.deaths) <= most, engines.deaths
        assert max(Counter(engines.deaths).values()) <= 3
        assert not told & {hash_of_body(body) for body in load.bodies}, "honest ones go where they like"
        await engines.settle()
        await f.wait_quiet()


# ---- quarantine


def bad(number: int) -> dict[str, Any]:
    """What requests of a kind have in common."""
    return {"structured_outputs": {"grammar": f"g{number}"}}


BAD = bad(0)


def labels_of_body(body: dict[str, Any]) -> dict[Label, str]:
    raw = {name: Raw(json.dumps(value).encode()) for name, value in body.items()}
    return labels_of("completions", body["model"], raw, raw["prompt"])


def suspect(f: RouterFleet, number: int = 0) -> None:
    """Two engines died of one request with a grammar, alone; before it sixty others ended well."""
    poison = f.context.poison
    for _ in range(60):
        poison.ledger.alike.traffic.add(labels_of_body({"model": "tiny", "prompt": "as always", "max_tokens": 8}))
    body = {"model": "tiny", "prompt": f"{number} is the first one of that kind", **bad(number)}
    for life in range(2):
        engine = InstanceName(f"gone{number}.{life}"), Incarnation("i0")
        poison.note_break(*engine, hash_of_body(body), labels_of_body(body))
        poison.on_verdict(*engine, DeathVerdict.DIED)


async def test_what_is_like_them_goes_to_one_instance_one_at_a_time_and_others_do_not_wait() -> None:
    async with fleet(1, 4) as f:
        suspect(f)
        gates = [asyncio.Event() for _ in range(3)]
        left = iter(gates)
        for engine in f.d:
            engine.choose = lambda seen: Play(hold=next(left)) if "structured_outputs" in seen.body else None
        held = [asyncio.ensure_future(f.complete(prompt=f"like it {number}", **BAD)) for number in range(3)]
        await f.wait(lambda: len(f.context.poison) == 2 and any(engine.open for engine in f.d), "one to go, two to be held")
        [there] = [engine for engine in f.d if engine.open]
        assert there.open == 1
        assert [(await f.complete(prompt=f"innocent {number}")).status for number in range(8)] == [200] * 8
        assert len(there.seen) == 1, "others keep away from a suspect while there are other instances"
        for gate in gates:
            gate.set()
        assert [answer.status for answer in await asyncio.gather(*held)] == [200] * 3
        body = {"model": "tiny", "prompt": "like it, too", "max_tokens": 8, **BAD}
        said = f.context.poison.ledger.judge_request(0.0, hash_of_body(body), labels_of_body(body))
        assert said is Word.GO, "the first one that ended well cleared what they have in common"
        await f.wait_quiet()


async def test_suspects_of_that_kind_go_to_the_same_instance_while_it_can_be_picked() -> None:
    async with fleet(1, 4, policy="round_robin") as f:
        used = []
        for number in range(3):
            suspect(f, number)
            before = [len(engine.seen) for engine in f.d]
            assert (await f.complete(prompt=f"like it {number}", **bad(number))).status == 200
            used += [engine.name for engine, seen in zip(f.d, before, strict=True) if len(engine.seen) > seen]
        assert len(set(used)) == 1, used


async def test_metrics_the_log_and_the_answer_say_what_they_have_in_common(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(2, 4, MadeReplay(line())) as f:
        engines = Revenants(f, restart_s=0.1, pace_s=0.0)
        suspect(f)
        with caplog.at_level("ERROR"):
            answer = await f.post("/v1/completions", {"model": "tiny", "prompt": "like it", "max_tokens": 24,
                                                      "user": "poison", **BAD})
        assert (answer.status, code_of(answer), len(engines.deaths)) == (502, "poison_request", 1)
        words = answer.json["error"]["message"]
        assert words.startswith("3 engines have died of requests that have this in common: this value of structured_out")
        [told] = [record for record in caplog.records
                  if record.getMessage().startswith("requests are refused that are alike")]
        assert told.label in words
        page = (await f.get("/metrics")).body.decode()
        assert 'xpyd_router_poison_labels{state="refused"} 1.0' in page
        other = await f.complete(prompt="another", **BAD)
        assert code_of(other) == "poison_request"
        assert len(engines.deaths) == 1
        await engines.settle()
        await f.wait_quiet()


# ---- among routers


async def told_by(f: RouterFleet, message: Heartbeat) -> Ack:
    """What a router answers an agent."""
    agent = Beater(f.router.members_port, KEY)
    try:
        return await agent.say(message)
    finally:
        agent.close()


async def test_a_router_tells_what_it_refuses_and_another_one_refuses_it_too() -> None:
    async with fleet(1, 2) as one, fleet(1, 2) as other:
        engines = Revenants(one, restart_s=60.0, pace_s=0.0)
        suspect(one)
        await one.post("/v1/completions", {"model": "tiny", "prompt": "like it", "max_tokens": 8, "user": "poison", **BAD})
        assert len(engines.deaths) == 1
        ack = await told_by(one, beat("d0"))
        assert len(ack.poisons) == 2
        assert {len(key) for key in ack.poisons} == {16, 32}
        assert (await other.complete(prompt="like it too", **BAD)).status == 200
        other.context.poison.ledger.alike.traffic.__init__()
        other.beat(other.d[0], seq=9, interval_s=60.0, poisons=ack.poisons)
        other.context.poison.tick()
        assert code_of(await other.complete(prompt="like it again", **BAD)) == "poison_request"
        assert (await other.complete(prompt="another")).status == 200
        assert (await told_by(other, beat("d9", Role.PREFILL))).poisons == (), "what it has from others it does not tell on"
        for task in engines._dying.values():
            task.cancel()
