"""A request that ends the engines which serve it, before a router with sockets: who dies, who finishes, who is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from beats import bye
from made_streams import MadeReplay
from msgspec import Raw
from poisons import Killer, asked, check_whole, code_of, line, stop
from router_fleet import Answer, RouterFleet, fleet, request_bytes
from scripted_engine import Play, Seen, wait_for_kv
from scripted_engine import ScriptedEngine as Engine

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, State
from xpyd_sidecar.router.api.bodies import RequestHash, hash_of
from xpyd_sidecar.router.fleet.member import DeathVerdict

LOOPS = ("uvloop",)
MID_STREAM = Play(down_after=3)


def seed(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Policies draw the same in every run."""
    monkeypatch.setattr("xpyd_sidecar.router.serving.context.secrets.randbits", lambda _: number)


async def thrice(f: RouterFleet, **body: Any) -> list[Answer]:
    """Ask as OpenAI's client does after a 502."""
    body = {"model": "tiny", "user": "poison", "max_tokens": 24, **body}
    return [await f.post("/v1/completions", body) for _ in range(3)]


SHAPES: dict[str, tuple[dict[str, Any], Play | None]] = {
    "a greedy stream, killed at once": ({"stream": True, "temperature": 0}, None),
    "a greedy stream, killed after its first tokens": ({"stream": True, "temperature": 0}, MID_STREAM),
    "a seeded stream, killed after its first tokens": ({"stream": True, "seed": 4}, MID_STREAM),
    "a sampled stream, killed after its first tokens": ({"stream": True}, MID_STREAM),
    "a whole answer": ({}, None),
    "several sequences, by decode alone": ({"n": 2}, None),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_alone_it_ends_two_engines_however_often_its_client_asks(shape: str) -> None:
    fields, how = SHAPES[shape]
    async with fleet(2, 8, MadeReplay(line())) as f:
        killer = Killer(f.d)
        killer.how = how
        answers = await thrice(f, prompt="poison", **fields)
        assert len(killer.dead) == 2, killer.dead
        assert answers[-1].status == 502
        assert code_of(answers[-1]) == "poison_request"
        words = answers[-1].json["error"]["message"]
        assert words.startswith("2 engines have died of this request"), words
        innocent = asked(line(), "innocent")
        check_whole(await f.post("/v1/completions", innocent), line(), innocent)
        assert len(killer.dead) == 2
        await f.wait_quiet()


PASSED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "why?"}]},
    "/v1/responses": {"input": "why?"},
    "/v1/embeddings": {"input": "why?"},
    "/tokenize": {"prompt": "why?"},
}


@pytest.mark.parametrize(("path", "asked_for"), [
    ("/v1/completions", {"prompt": "p"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}]}),
    *((path, PASSED[path]) for path in ("/v1/messages", "/v1/responses"))])
async def test_prefill_engines_that_it_ends_count_as_well(path: str, asked_for: dict[str, Any]) -> None:
    async with fleet(4, 4) as f:
        killer = Killer(f.p)
        wait_for_kv(*f.d)
        for _ in range(3):
            answer = await f.post(path, {"model": "tiny", "user": "poison", **asked_for})
        assert (answer.status, code_of(answer)) == (502, "poison_request")
        assert len(killer.dead) == 2
        await f.wait_quiet()


async def test_it_ends_prefill_and_decode_alike() -> None:
    async with fleet(4, 4) as f:
        killer = Killer((*f.p, *f.d))
        answers = await thrice(f, prompt="poison", stream=True, temperature=0)
        assert [code_of(answer) for answer in answers] == ["poison_request"] * 3
        assert {name[0] for name in killer.dead} == {"p", "d"}
        assert len(killer.dead) in {2, 3}, "who breaks off first has a successor before the other one is known to be dead"
        await f.wait_quiet()


async def test_one_that_ends_engines_with_its_last_token_is_found_though_its_client_has_all_of_it() -> None:
    async with fleet(2, 8, MadeReplay(line())) as f:
        killer = Killer(f.d)
        killer.how = Play(down_after=24)
        answers = await thrice(f, prompt="poison", stream=True, temperature=0)
        assert [(answer.status, code_of(answer)) for answer in answers] == [(200, None)] * 2 + [(502, "poison_request")]
        assert len(killer.dead) == 2
        await f.wait_quiet()


@pytest.mark.parametrize("path", PASSED)
async def test_requests_that_pass_through_are_found_as_well(path: str) -> None:
    async with fleet(2, 8) as f:
        killer = Killer(f.d)
        for _ in range(3):
            answer = await f.post(path, {"model": "tiny", "user": "poison", **PASSED[path]})
        assert (answer.status, code_of(answer)) == (502, "poison_request")
        assert len(killer.dead) == 2
        assert (await f.post(path, {"model": "tiny", "user": "innocent", **PASSED[path], "seed": 1})).status == 200
        text = (await f.get("/metrics")).body.decode()
        assert f'xpyd_router_passed_requests_total{{outcome="poison",path="{path}"}} 3.0' in text
        await f.wait_quiet()


async def test_engines_that_say_so_before_they_die_count_as_well() -> None:
    """vLLM's front end answers 500 to all that its engine core took along, and ends then."""
    async with fleet(1, 8) as f:
        dead: list[str] = []

        def choose(engine: Engine) -> Callable[[Seen], Play | None]:
            def chosen(seen: Seen) -> Play | None:
                if seen.body.get("user") != "poison":
                    return None
                dead.append(engine.name)
                engine.health = 503
                return Play(status=500)
            return chosen

        for engine in f.d:
            engine.choose = choose(engine)
        for path, body in (("/v1/completions", {"prompt": "b"}), ("/v1/messages", PASSED["/v1/messages"])):
            dead.clear()
            for _ in range(4):
                answer = await f.post(path, {"model": "tiny", "user": "poison", **body})
                await f.wait(lambda: all(f.context.roster.find_by_name(name).suspended for name in dead), "a look at them")
            assert (answer.status, code_of(answer)) == (502, "poison_request")
            assert len(dead) == 2
        await f.wait_quiet()


async def test_two_at_once_are_both_found_and_end_three_engines_each_at_most() -> None:
    async with fleet(2, 8) as f:
        killer = Killer(f.d)
        bodies = [{"model": "tiny", "user": f"poison {name}", "prompt": name, "stream": True} for name in "ab"]
        for _ in range(3):
            answers = await asyncio.gather(*(f.post("/v1/completions", body) for body in bodies))
        assert [(answer.status, code_of(answer)) for answer in answers] == [(502, "poison_request")] * 2
        assert len(killer.dead) <= 6, killer.dead
        assert (await f.complete(prompt="innocent")).status == 200
        await f.wait_quiet()


@pytest.mark.parametrize("how", [None, MID_STREAM], ids=["at once", "in mid-stream"])
@pytest.mark.parametrize("number", range(4))
async def test_of_100_honest_streams_beside_it_all_finish_and_three_engines_end_at_most(
        number: int, how: Play | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seed(monkeypatch, number)
    said = line()
    async with fleet(2, 8, MadeReplay(said)) as f:
        killer = Killer(f.d, pace_s=0.02)
        killer.how = how
        bodies = [asked(said, f"honest {number}", seed=number) for number in range(100)]
        honest = [asyncio.ensure_future(f.post("/v1/completions", body)) for body in bodies]
        await f.wait(lambda: sum(len(engine.seen) for engine in f.d) == 100, "100 streams")
        answers = await thrice(f, prompt="poison", stream=True, temperature=0)
        assert code_of(answers[0]) == "poison_request"
        assert [(answer.status, code_of(answer)) for answer in answers[1:]] == [(502, "poison_request")] * 2
        for body, answer in zip(bodies, await asyncio.gather(*honest), strict=True):
            check_whole(answer, said, body)
        assert 2 <= len(killer.dead) <= 3, killer.dead
        await f.wait_quiet()


# ---- what is no death by itself


class Breaking:
    """Engines on which the leg of a request breaks off, and which do then as the test says."""

    def __init__(self, f: RouterFleet, then: Callable[[Engine], object]) -> None:
        self.broke: list[str] = []
        for engine in f.d:
            engine.choose = self._chooser(engine, then)

    def _chooser(self, engine: Engine, then: Callable[[Engine], object]) -> Callable[[Seen], Play | None]:
        def choose(seen: Seen) -> Play | None:
            if seen.body.get("user") != "breaks" or len(self.broke) >= 3:
                return None
            self.broke.append(engine.name)
            then(engine)
            return Play(die_at="request")
        return choose


async def breaks(f: RouterFleet) -> Answer:
    """Ask for what breaks off, three times at most."""
    return await f.complete(prompt="b", user="breaks")


def nobody_is_suspected(f: RouterFleet) -> bool:
    poison = f.context.poison
    return poison.counts() == (0, 0, 0, 0) and not poison.alert


async def test_a_cut_connection_while_health_answers_accuses_nobody() -> None:
    async with fleet(1, 4) as f:
        breaking = Breaking(f, lambda _: None)
        for _ in range(3):
            await breaks(f)
        assert (await breaks(f)).status == 200
        assert len(breaking.broke) == 3
        await f.wait(lambda: nobody_is_suspected(f), "all engines known to live")
        await f.wait_quiet()


async def test_an_engine_that_drains_and_goes_accuses_nobody() -> None:
    async with fleet(1, 5) as f:
        def drain(engine: Engine) -> None:
            f.beat(engine, state=State.DRAINING, seq=2, interval_s=60.0)
            stop(engine)

        breaking = Breaking(f, drain)
        for _ in range(3):
            await breaks(f)
        assert (await breaks(f)).status == 200
        assert len(breaking.broke) == 3
        assert f.context.poison.counts()[0] == 0
        await f.wait_quiet()


async def test_an_engine_that_says_goodbye_accuses_nobody() -> None:
    async with fleet(1, 5) as f:
        breaking = Breaking(f, lambda engine: (stop(engine), f.context.watch.on_message(bye(engine.name))))
        for _ in range(3):
            await breaks(f)
        assert (await breaks(f)).status == 200
        assert len(breaking.broke) == 3
        assert f.context.poison.counts()[0] == 0
        await f.wait_quiet()


async def test_engines_whose_agents_are_silent_too_went_with_their_machines() -> None:
    async with fleet(1, 5, missed_beats=1) as f:
        for engine in f.d[:3]:
            f.beat(engine, seq=2, interval_s=0.05)
        await asyncio.sleep(0.2)
        assert len(f.context.roster.pickable(Role.DECODE)) == 5
        breaking = Breaking(f, stop)
        for engine in f.d[3:]:
            engine.choose = lambda _: Play(before=0.05)
        for _ in range(3):
            await breaks(f)
        assert (await breaks(f)).status == 200
        assert f.context.poison.counts()[0] == 0
        assert len(breaking.broke) <= 3
        await f.wait_quiet()


async def test_an_engine_that_was_restarted_at_once_has_died() -> None:
    async with fleet(1, 5) as f:
        breaking = Breaking(f, lambda engine: f.beat(engine, incarnation=Incarnation("i1"), seq=2, interval_s=60.0))
        answer = await breaks(f)
        assert (answer.status, code_of(answer)) == (502, "poison_request")
        assert len(breaking.broke) == 2
        await f.wait_quiet()


# ---- suspects


async def suspect(f: RouterFleet, *hashes: RequestHash) -> None:
    """Two engines died with all of these."""
    for number in range(2):
        engine = InstanceName(f"gone{number}"), Incarnation("i0")
        for one in hashes:
            f.context.poison.note_break(*engine, one)
        f.context.poison.on_verdict(*engine, DeathVerdict.DIED)


def hash_of_prompt(prompt: str) -> RequestHash:
    return hash_of("completions", {"model": Raw(b'"tiny"'), "prompt": Raw(json.dumps(prompt).encode()),
                                   "max_tokens": Raw(b"8")})


async def test_suspects_go_alone_among_them_and_one_that_ends_is_cleared() -> None:
    async with fleet(1, 2) as f:
        names = ["a", "b", "c"]
        await suspect(f, *map(hash_of_prompt, names))
        gate = asyncio.Event()
        at_once: list[int] = []

        def choose(seen: Seen) -> Play | None:
            if seen.body["prompt"] not in names:
                return None
            at_once.append(max(engine.open for engine in f.d) + 1)
            return Play(hold=gate)
        for engine in f.d:
            engine.choose = choose
        asked = [asyncio.ensure_future(f.complete(prompt=name)) for name in names]
        await f.wait(lambda: sum(engine.open for engine in f.d) == 2, "two suspects on two engines")
        assert [len(engine.seen) for engine in f.d] == [1, 1]
        await f.wait(lambda: f.context.poison.counts() == (2, 3, 0, 1), "the third to be held")
        assert (await f.complete(prompt="innocent")).status == 200, "others do not wait for them"
        gate.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 3
        await f.wait_quiet()
        assert f.context.poison.counts() == (2, 0, 0, 0)
        assert not f.context.poison.alert


async def test_one_that_is_held_keeps_its_deadline_and_may_leave() -> None:
    def suspected(f: RouterFleet) -> None:
        for number in range(2):  # of which nobody says whether they died
            f.context.poison.note_break(InstanceName(f"gone{number}"), Incarnation("i0"), hash_of_prompt("a"))

    async with fleet(1, 1) as f:
        suspected(f)
        _, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 8}))
        await f.wait(lambda: len(f.context.poison) == 1, "one that waits")
        writer.transport.abort()
        await f.wait(lambda: len(f.context.poison) == 0, "it has left")
        assert not any(engine.seen for engine in (*f.p, *f.d))
    async with fleet(1, 1, request_timeout_s=0.5) as f:
        suspected(f)
        late = await f.complete(prompt="a")
        assert (late.status, code_of(late)) == (504, "engine_timeout")
        assert not any(engine.seen for engine in (*f.p, *f.d))
        await f.wait_quiet()


async def test_no_more_than_so_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.serving.quarantine.MAX_HELD", 2)
    async with fleet(1, 1) as f:
        await suspect(f, *map(hash_of_prompt, "abcd"))
        gate = asyncio.Event()
        f.d[0].choose = lambda _: Play(hold=gate)
        held = []
        for number, name in enumerate("abc"):
            held.append(asyncio.ensure_future(f.complete(prompt=name)))
            await f.wait(lambda number=number: len(f.context.poison) == number, "it is held")  # type: ignore[misc]
        full = await f.complete(prompt="d")
        assert (full.status, code_of(full)) == (503, "unavailable")
        gate.set()
        assert [answer.status for answer in await asyncio.gather(*held)] == [200] * 3
        await f.wait_quiet()


# ---- what operators see


async def test_metrics_and_the_access_log_say_it(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(2, 5, access_log=True) as f:
        Killer(f.d)
        with caplog.at_level("INFO"):
            await thrice(f, prompt="poison")
            await f.wait_quiet()
            text = (await f.get("/metrics")).body.decode()
        assert 'xpyd_router_requests_total{api="completions",outcome="poison"} 3.0' in text
        for line_ in ("xpyd_router_engine_deaths_total 2.0", "xpyd_router_poison_suspects 1.0",
                      "xpyd_router_poison_refused 1.0", "xpyd_router_poison_held 0.0"):
            assert line_ in text, line_
        told = [record for record in caplog.records if record.name == "xpyd_sidecar.access"]
        assert [record.getMessage() for record in told] == ["poison"] * 3
        assert all("2 engines have died of this request" in record.detail for record in told)
        assert [record.status for record in told] == [502] * 3
        [judged] = [record for record in caplog.records if record.getMessage().startswith("a request is refused")]
        assert judged.engines.count("d") == 2
        assert judged.request_hash in told[0].detail


async def test_a_router_without_deaths_makes_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("xpyd_sidecar.router.serving.attempts.hash_of", lambda kind, _: made.append(kind))
    async with fleet(1, 1) as f:
        for _ in range(4):
            for stream in (True, False):
                assert (await f.complete(prompt="hi", stream=stream)).status == 200
        await f.wait_quiet()
        f.context.observer.tell()
        assert not made


@pytest.mark.parametrize("rule", ["decode", "reject"])
async def test_what_was_held_before_its_first_legs_has_all_of_prefills_time_then(rule: str,
                                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(1, 1, pair_timeout_s=3.0, load_limit_s=0.0, on_no_prefill=rule) as f:
        poison, held = f.context.poison, []
        poison.alert = True
        monkeypatch.setattr(poison, "comes", lambda one: bool(held.append(one) or True))
        f.p[0].default = Play(before=1.3)
        task = asyncio.create_task(f.complete(stream=True))
        await f.wait(lambda: bool(held), "the request to be held")
        await asyncio.sleep(3.2)
        poison.alert = False
        held[0].go_on()
        answer = await task
        assert (answer.status, f.p[0].aborts, len(f.d[0].seen)) == (200, 0, 1)
