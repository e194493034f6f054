"""Every way an engine dies in mid-stream, over sockets: the client has one whole answer, or is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from made_streams import MadeReplay, made_line
from recorded import Line, Seen, Step, seen_of
from router_fleet import Answer, RouterFleet, fleet, request_bytes
from scripted_engine import Play, ScriptedEngine, attempts
from scripted_engine import Seen as Asked

from xpyd_sidecar.contract.ids import Incarnation, State
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.observing.record import Record

PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
USAGE = {"stream_options": {"include_usage": True}}
WAYS: dict[str, dict[str, Any]] = {"continue": {}, "replay": {"presence_penalty": 0.5}}
DEATHS = {
    "kill -9 of the API server between chunks": Play(close_after=5),
    "kill -9 of the API server inside a chunk": Play(die_after=5),
    "kill -9 of the pod": Play(down_after=5),
    "kill -9 of the engine core": Play(error_after=5),
    "SIGTERM, an abort chunk": Play(abort_after=5),
    "SIGTERM, silence with the socket open": Play(silent_after=5),
    "a proxy that ends the body": Play(cut_after=5),
}


def line_of(api: Api) -> Line:
    line = made_line(api, random.Random(5))
    line.prompt[:] = [11, 12, 13]
    for at, step in enumerate(line.steps):
        line.steps[at] = Step(1000 + at, step.text if at % 4 else "", step.logprobs)
    return line


def asked(line: Line, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", **line.body, "stream": True, "max_tokens": 24, **fields}


def wanted(line: Line, body: dict[str, Any]) -> Seen:
    return seen_of(list(MadeReplay(line).composed(line, 0, body, "r")))


def check(answer: Answer, line: Line, body: dict[str, Any]) -> None:
    assert (answer.status, answer.complete) == (200, True)
    assert answer.events[-1] == "[DONE]"
    seen, right = seen_of(answer.events), wanted(line, body)
    assert (seen.texts, seen.finish, seen.usage, seen.logprobs) == (right.texts, right.finish, right.usage, right.logprobs)
    assert (len(seen.names), len(seen.created), seen.roles) == (1, 1, right.roles)
    assert (seen.tokens[0], seen.prompt) == ([], None), "ids are the router's own"


class Kills:
    """The first decode legs of each request play these, all others run to their end."""

    def __init__(self, *plays: Play) -> None:
        self.left = list(plays)
        self.where: list[str] = []
        self.begun = asyncio.Event()
        """A decode engine has a leg."""

    def on(self, engine: ScriptedEngine) -> None:
        def choose(_: Asked) -> Play | None:
            self.where.append(engine.name)
            self.begun.set()
            return self.left.pop(0) if self.left else None
        engine.choose = choose


@asynccontextmanager
async def failing(api: Api, *plays: Play, prefills: int = 1, decodes: int = 2,
                  **settings: Any) -> AsyncIterator[tuple[RouterFleet, Line, Kills, list[Record]]]:
    line, kills = line_of(api), Kills(*plays)
    async with fleet(prefills, decodes, MadeReplay(line), **settings) as f:
        records: list[Record] = f.records()
        for engine in f.d:
            kills.on(engine)
        yield f, line, kills, records
        await f.wait_quiet()


def engine_of(f: RouterFleet, name: str) -> ScriptedEngine:
    return next(engine for engine in f.d if engine.name == name)


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_stream_goes_on_elsewhere(api: Api, way: str, death: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.serving.attempts.STREAM_STALL_S", 0.1)
    async with failing(api, DEATHS[death]) as (f, line, kills, records):
        body = asked(line, **WAYS[way], **USAGE)
        check(await f.post(PATHS[api], body), line, body)
        assert len(set(kills.where)) == 2
        again = engine_of(f, kills.where[1]).seen[0].body
        given = (again["kv_transfer_params"].get("prompt_token_ids") if api == "chat" else again["prompt"])
        if way == "continue":
            assert given[:4] == [11, 12, 13, 1000]
            assert again["max_tokens"] == 24 - (len(given) - 3)
        else:
            assert given in (None, "text")
            assert again["max_tokens"] == 24
        assert again["kv_transfer_params"]["attempt"] == 2, "prefilled by prefill"
        await f.wait_quiet()  # these decodes do not wait for prefill
        # The first leg may have been taken back before it arrived.
        [prefilled] = [seen.body for seen in f.p[0].seen if seen.body["kv_transfer_params"]["attempt"] == 2]
        assert prefilled.get("prompt") == again.get("prompt"), "both legs have the same prompt"
        ids = [one["kv_transfer_params"].get("prompt_token_ids") for one in (prefilled, again)]
        assert ids[0] == ids[1]
        [record] = records
        assert (record.outcome, record.continued, record.retries) == ("ok", 1, 2)
        assert (record.tokens, record.prompt_tokens) == (24, 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_three_failures_in_a_row(api: Api, way: str) -> None:
    # A replay that breaks off before it said anything new has not gone on.
    after = (9, 4, 6) if way == "continue" else (4, 3, 9)
    plays = [Play(close_after=after[0]), Play(close_after=after[1]), Play(error_after=after[2])]
    async with failing(api, *plays, decodes=3) as (f, line, kills, records):
        body = asked(line, **WAYS[way], **USAGE)
        check(await f.post(PATHS[api], body), line, body)
        assert len(kills.where) == 4
        await f.wait_quiet()
        assert records[0].continued == (3 if way == "continue" else 2)


class Renamed(MadeReplay):
    """An engine that names its streams as it likes."""

    def stream(self, path: str, body: dict[str, Any], name: str) -> list[bytes]:
        return super().stream(path, body, f"{name}-of-my-own")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_stream_keeps_its_id_where_the_other_engine_names_it_otherwise(api: Api, way: str) -> None:
    async with failing(api, Play(close_after=5)) as (f, line, kills, _):
        first = f.d[0].replay
        f.d[1].replay = Renamed(line)
        body = asked(line, **WAYS[way], **USAGE)
        answer = await f.post(PATHS[api], body)
        check(answer, line, body)
        assert len(set(kills.where)) == 2
        assert ("of-my-own" in answer.events[0]["id"]) == (engine_of(f, kills.where[0]).replay is not first)


async def test_a_stream_that_decode_began_alone_goes_on_with_prefill_again() -> None:
    never = asyncio.Event()
    async with failing("completions", Play(hold=never), Play(close_after=5)) as (f, line, kills, _):
        f.p[0].plays.append(Play(hold=kills.begun, status=500))
        body = asked(line, **USAGE)
        check(await f.post(PATHS["completions"], body), line, body)
        await f.wait_quiet()
        assert len(kills.where) == 3
        legs = [seen.body.get("kv_transfer_params", {}).get("attempt")
                for seen in sorted((*f.d[0].seen, *f.d[1].seen), key=lambda seen: seen.at)]
        assert legs == [1, None, 2], "prefill failed one leg, which says nothing of the rest of the stream"
        assert attempts(f.p[0]) == [1, 2]


async def test_tries_without_progress_are_bounded() -> None:
    async with failing("completions", *[Play(close_after=4)] * 9, decodes=6) as (f, line, kills, _):
        answer = await f.post(PATHS["completions"], asked(line, presence_penalty=0.5))
        assert answer.events[-1]["error"]["code"] == "engine_failed"
        assert len(kills.where) == f.context.limits.stream_legs


@pytest.mark.parametrize("fields", [{"stop": ["\x00never\x00"]}, {"logprobs": 1},
                                    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_shaped_streams_go_on_too(fields: dict[str, Any], version: str) -> None:
    async with failing("completions", Play(close_after=12), Play(die_after=3), decodes=3) as (f, line, _, _):
        body = asked(line, **fields)
        answer = await f.raw(request_bytes(PATHS["completions"], body, version=version))
        check(answer, line, body)


async def test_a_stream_whose_finish_reason_is_there_is_ended_here() -> None:
    for after in (24, 25):  # before usage, before [DONE]
        async with failing("completions", Play(close_after=after)) as (f, line, kills, records):
            body = asked(line, **USAGE)
            check(await f.post(PATHS["completions"], body), line, body)
            assert len(kills.where) == 1, "nobody else is asked"
            await f.wait_quiet()
            assert records[0].outcome == "ok"


@pytest.mark.parametrize(("fields", "settings"), [
    ({"temperature": 0.7}, {}), ({"temperature": None}, {}), ({}, {"failover": "error"}), ({}, {"decodes": 1})])
async def test_what_cannot_go_on_ends_with_an_error_event(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    async with failing("completions", Play(close_after=5), **settings) as (f, line, kills, records):
        line.body.update({"temperature": fields.get("temperature", 0)})
        answer = await f.post(PATHS["completions"], asked(line, **fields))
        assert answer.events[-1]["error"]["code"] == "engine_failed"
        assert len(kills.where) == 1
        await f.wait_quiet()
        assert records[0].outcome == "broken"


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_no_ids_are_asked_for_where_they_are_of_no_use(api: Api) -> None:
    async with failing(api, failover="error") as (f, line, _, _):
        check(await f.post(PATHS[api], asked(line)), line, asked(line))
        assert "return_token_ids" not in f.d[0].seen[0].body if f.d[0].seen else f.d[1].seen[0].body
    async with failing(api) as (f, line, _, _):
        for fields in ({"presence_penalty": 1}, {"stream": False}, {"temperature": 0.9, "n": 2}):
            await f.post(PATHS[api], asked(line, **fields))
        bodies = [seen.body for engine in f.d for seen in engine.seen]
        assert len(bodies) == 3
        assert not any("return_token_ids" in body for body in bodies)


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("fields", [
    {"temperature": 0.9}, {"temperature": None}, {"temperature": 0}, {"presence_penalty": 1, **USAGE},
    {"temperature": 0.9, "presence_penalty": 1, **USAGE}])
async def test_tokens_are_counted_whether_or_not_a_stream_can_go_on(api: Api, fields: dict[str, Any]) -> None:
    async with failing(api) as (f, line, _, records):
        answer = await f.post(PATHS[api], asked(line, **fields))
        assert answer.status == 200
        await f.wait_quiet()
        [record] = records
        assert record.outcome == "ok"
        assert record.prompt_tokens > 0
        assert record.tokens > 1
        assert b'"token_ids":[' not in answer.body, "the client did not ask for them"
        for usage in [event["usage"] for event in answer.events if isinstance(event, dict) and not event["choices"]]:
            assert "stream_options" in fields
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (record.prompt_tokens, record.tokens)


async def test_another_answer_is_told_apart_and_none_of_it_is_relayed() -> None:
    async with failing("completions", Play(close_after=9)) as (f, line, kills, records):
        body = asked(line, presence_penalty=0.5)
        for engine in f.d:
            other = line_of("completions")
            other.steps[1] = Step(7, "another answer", {})
            choose = engine.choose

            def second(seen: Asked, choose: Any = choose, engine: Any = engine, other: Line = other) -> Play | None:
                if kills.where:
                    engine.replay = MadeReplay(other)
                found: Play | None = choose(seen)
                return found

            engine.choose = second
        answer = await f.post(PATHS["completions"], body)
        assert "cannot go on as it began" in answer.events[-1]["error"]["message"]
        assert "another" not in answer.body.decode().split('"error"')[0]
        await f.wait_quiet()
        assert (records[0].outcome, records[0].legs[-1].result) == ("broken", "differs")


async def test_an_engine_that_does_not_take_the_ids_is_asked_to_replay() -> None:
    async with failing("chat", Play(close_after=9), Play(status=400), decodes=3) as (f, line, kills, _):
        check(await f.post(PATHS["chat"], asked(line)), line, asked(line))
        last = engine_of(f, kills.where[2]).seen[0].body
        assert "prompt_token_ids" not in last["kv_transfer_params"]


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_prefill_of_the_second_half_fails_too(api: Api) -> None:
    retried = asyncio.Event()
    async with failing(api, Play(close_after=9), Play(hold=retried), prefills=2) as (f, line, kills, records):
        def choose(seen: Asked) -> Play | None:
            attempt = seen.body["kv_transfer_params"]["attempt"]
            if attempt == 3:
                retried.set()
            return Play(status=500) if attempt == 2 else None

        for engine in f.p:
            engine.choose = choose
        check(await f.post(PATHS[api], asked(line)), line, asked(line))
        assert len(kills.where) == 2, "decode waits while prefill is tried again"
        await f.wait_quiet()
        legs = [one.body["kv_transfer_params"] for engine in f.p for one in engine.seen]
        seen = sorted(legs, key=lambda leg: leg["attempt"])
        assert [leg["attempt"] for leg in seen] == [1, 2, 3]
        assert seen[1].get("prompt_token_ids") == seen[2].get("prompt_token_ids")
        assert records[0].outcome == "ok"


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_without_prefill_decode_goes_on_alone(api: Api) -> None:
    async with failing(api, Play(close_after=9), prefills=0) as (f, line, kills, _):
        check(await f.post(PATHS[api], asked(line)), line, asked(line))
        again = engine_of(f, kills.where[1]).seen[0].body
        params = again.get("kv_transfer_params")
        assert params is None if api == "completions" else list(params) == ["prompt_token_ids"]


async def test_on_no_prefill_reject_holds_for_the_second_half() -> None:
    gone = asyncio.Event()
    async with failing("completions", Play(hold_after=(5, gone), close_after=9), on_no_prefill="reject") as (
            f, line, kills, records):
        task = asyncio.create_task(f.post(PATHS["completions"], asked(line)))
        await f.wait(lambda: bool(kills.where and f.p[0].seen and f.p[0].seen[0].finished), "prefill")
        await f.p[0].stop()
        f.context.watch.suspect(f.context.picker.selection(PromptPrefix(b"")).pair(alone=False).prefill, "gone")
        gone.set()
        answer = await task
        assert answer.events[-1]["error"]["code"] == "unavailable"
        await f.wait_quiet()
        assert records[0].outcome == "broken"


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_client_that_goes_while_its_stream_moves_aborts_both_legs(api: Api) -> None:
    held, prefilled = asyncio.Event(), asyncio.Event()
    async with failing(api, Play(hold_after=(0, prefilled), close_after=9), Play(hold=held)) as (f, line, kills, records):
        f.p[0].choose = lambda seen: Play(hold=held) if seen.body["kv_transfer_params"]["attempt"] == 2 else None
        reader, writer = await f.connect()
        writer.write(request_bytes(PATHS[api], asked(line)))
        await f.wait(lambda: bool(kills.where and f.p[0].seen and f.p[0].seen[0].finished), "the first legs")
        prefilled.set()
        await f.wait(lambda: len(kills.where) == 2 and len(f.p[0].seen) == 2, "the second legs")
        writer.close()
        await f.wait_quiet()
        assert engine_of(f, kills.where[1]).aborts == 1
        assert f.p[0].aborts == 1
        assert records[0].outcome == "client_gone"
        assert reader is not None


async def test_an_engine_that_came_back_may_take_its_stream_again() -> None:
    async with failing("completions", Play(close_after=6), Play(close_after=6)) as (f, line, kills, records):
        check(await f.post(PATHS["completions"], asked(line)), line, asked(line))
        assert kills.where[0] == kills.where[2] != kills.where[1]
        await f.wait_quiet()
        assert records[0].continued == 2


async def test_a_restarted_engine_moves_its_streams_at_once() -> None:
    held = asyncio.Event()
    async with failing("chat", Play(hold_after=(7, held))) as (f, line, kills, _):
        task = asyncio.create_task(f.post(PATHS["chat"], asked(line)))
        await f.wait(lambda: bool(kills.where), "a decode leg")
        await asyncio.sleep(0.05)
        first = engine_of(f, kills.where[0])
        f.beat(first, incarnation=Incarnation("new"))
        check(await task, line, asked(line))
        await f.wait(lambda: first.aborts == 1, "the leg on the old one is closed")


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_moves_before_a_drain_runs_out_of_time(way: str) -> None:
    """The engine still runs and would go on for ever: the stream is taken from it, whole and exact."""
    held = asyncio.Event()
    async with failing("completions", Play(hold_after=(7, held))) as (f, line, kills, records):
        body = asked(line, **WAYS[way], **USAGE)
        task = asyncio.create_task(f.post(PATHS["completions"], body))
        await f.wait(lambda: f.context.observer.metrics.in_flight == 1 and bool(kills.where), "a decode leg")
        first = engine_of(f, kills.where[0])
        f.beat(first, state=State.DRAINING, seq=2)
        await asyncio.sleep(0.05)
        assert not first.aborts, "a drain alone leaves it"
        f.beat(first, state=State.DRAINING, seq=3, leaving=True)
        check(await task, line, body)
        await f.wait(lambda: first.aborts == 1, "the leg on the old one is closed")
        await f.wait_quiet()
        assert (records[0].outcome, len(set(kills.where))) == ("ok", 2)


# ---- first token from prefill


FIRST = {"first_token": "prefill"}


def speaking(line: Line) -> None:
    line.steps[0] = Step(1000, "first", line.steps[0].logprobs)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_the_first_token_is_prefills_while_decode_has_said_nothing(api: Api, version: str) -> None:
    held = asyncio.Event()
    async with failing(api, Play(hold=held), **FIRST) as (f, line, _, records):
        speaking(line)
        body = asked(line, min_tokens=4, logit_bias={"5": 1}, **USAGE)
        reader, writer = await f.connect()
        writer.write(request_bytes(PATHS[api], body, version=version))
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"first")
        assert b"[DONE]" not in head
        held.set()
        rest = await reader.read() if version == "1.0" else await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        raw = (head + rest).split(b"\r\n\r\n", 1)[1]
        check(Answer(200, {}, raw if version == "1.0" else unchunked(raw), True), line, body)
        prefill = f.p[0].seen[0].body
        assert (prefill["stream"], prefill["max_tokens"], prefill["min_tokens"]) == (True, 1, 1)
        assert prefill["logit_bias"] == {"5": 1}
        await f.wait_quiet()
        assert (records[0].outcome, records[0].continued, records[0].tokens) == ("ok", 0, 24)


def unchunked(raw: bytes) -> bytes:
    out = b""
    while raw:
        size, _, rest = raw.partition(b"\r\n")
        out, raw = out + rest[:int(size, 16)], rest[int(size, 16) + 2:]
    return out


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_decode_that_is_first_is_not_disturbed(api: Api) -> None:
    async with failing(api, **FIRST) as (f, line, _, _):
        speaking(line)
        f.p[0].default = Play(before=0.1)
        check(await f.post(PATHS[api], asked(line, **USAGE)), line, asked(line, **USAGE))


@pytest.mark.parametrize("play", [Play(die_at="request"), Play(close_after=4), Play(error_after=0), Play(status=500)])
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_stream_that_prefill_began_goes_on_wherever_decode_lives(api: Api, play: Play) -> None:
    held = asyncio.Event()
    play = Play(**{**vars(play), "hold": held})
    async with failing(api, play, **FIRST) as (f, line, kills, records):
        speaking(line)
        task = asyncio.create_task(f.post(PATHS[api], asked(line, **USAGE)))
        await f.wait(lambda: bool(f.p[0].seen and f.p[0].seen[0].finished and kills.where), "prefill's token")
        held.set()
        if play.die_at == "request":
            await engine_of(f, kills.where[0]).stop()
        check(await task, line, asked(line, **USAGE))
        await f.wait_quiet()
        assert records[0].outcome == "ok"


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_token_that_decode_contradicts_is_an_error(api: Api) -> None:
    held = asyncio.Event()
    async with failing(api, Play(hold=held), **FIRST) as (f, line, kills, records):
        speaking(line)
        other = line_of(api)
        other.steps[0] = Step(7, "other", {})
        for engine in f.d:
            engine.replay = MadeReplay(other)
        reader, writer = await f.connect()
        writer.write(request_bytes(PATHS[api], asked(line)))
        async with asyncio.timeout(30):
            await reader.readuntil(b"first")
            await kills.begun.wait()
            held.set()
            assert b"cannot go on as it began" in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        await f.wait_quiet()
        assert (records[0].outcome, records[0].legs[-1].result) == ("broken", "differs")


@pytest.mark.parametrize("fields", [{"stop": "x"}, {"logprobs": 1}, {"return_token_ids": True}, {"presence_penalty": 0.3},
                                    {"max_tokens": 1}, {"temperature": 0.4}, {"stream": False},
                                    {"structured_outputs": {"regex": "a"}}])
async def test_prefill_is_silent_where_its_token_may_be_another(fields: dict[str, Any]) -> None:
    async with failing("completions", **FIRST) as (f, line, _, _):
        speaking(line)
        await f.post(PATHS["completions"], asked(line, **fields))
        await f.wait_quiet()
        assert f.p[0].seen[0].body["stream"] is False


async def test_a_token_without_text_or_with_another_finish_reason_is_left_to_decode() -> None:
    for stop in ([], [1000]):
        async with failing("completions", **FIRST) as (f, line, _, _):
            if stop:
                speaking(line)
            body = asked(line, stop_token_ids=stop, **USAGE)
            check(await f.post(PATHS["completions"], body), line, body)
