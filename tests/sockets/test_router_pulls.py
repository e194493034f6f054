"""KV that is moved from decode to prefill before a turn: when, over which messages; and nothing it does loses a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_fleet import RouterFleet, fleet, request_bytes
from scripted_engine import Play, ScriptedEngine, Seen

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.router.serving import pulls as pulls_module

WORDS = "many words of a conversation "


def turns(*sizes: int) -> list[dict[str, str]]:
    """A user's and the assistant's messages by turns, of so many tokens each, about."""
    return [{"role": "assistant" if at % 2 else "user", "content": f"{at} " + WORDS * (4 * size // len(WORDS))}
            for at, size in enumerate(sizes)]


BEFORE, NOW = turns(2000, 3000, 50), turns(2000, 3000, 50, 4000, 3000)
"""The prompts of two turns; decode has said the 3,000 and the 4,000 tokens."""


def seen(engine: ScriptedEngine) -> list[dict[str, Any]]:
    return [one.body for one in engine.seen]


def pulled(body: dict[str, Any]) -> bool:
    return body.get("add_generation_prompt") is False


def transfers(engine: ScriptedEngine) -> int:
    """Pulls that an engine was asked for; a leg on a connection that broke is sent again."""
    return len({body[legs.FIELD]["transfer"] for body in seen(engine) if pulled(body)})


@pytest.fixture
async def f() -> AsyncIterator[RouterFleet]:
    async with fleet(policy="cost") as made:
        yield made


async def converse(f: RouterFleet, *, rate: float = 8000.0, tells: bool = True, of: str = "", **fields: Any) -> None:
    """The turn before, and what beats say afterwards."""
    assert (await ask(f, BEFORE, of, **fields)).status == 200
    await f.wait_quiet()
    for member in f.context.roster.members():
        member.computed_per_s, member.prefixes_seq = rate, int(tells)


async def ask(f: RouterFleet, messages: list[dict[str, str]] = NOW, of: str = "", **fields: Any) -> Any:
    """``of``: what its conversation begins with, so that it is another one."""
    said = [{"role": "system", "content": of}, *messages] if of else messages
    return await f.post("/v1/chat/completions", {"model": "tiny", "messages": said, "max_tokens": 8, **fields})


async def test_what_decode_has_said_is_moved_to_prefill_before_the_next_turn(f: RouterFleet) -> None:
    await converse(f, chat_template_kwargs={"a": 1})
    assert (await ask(f, chat_template_kwargs={"a": 1})).status == 200
    (source, answer), (sink, prefill) = seen(f.d[0])[1:], seen(f.p[0])[1:]
    for leg, role in ((source, "prefill"), (sink, "decode")):
        assert leg["messages"] == NOW[:4]
        assert (leg["max_tokens"], leg["add_generation_prompt"], leg["chat_template_kwargs"]) == (1, False, {"a": 1})
        assert leg[legs.FIELD]["role"] == role
    assert source[legs.FIELD]["transfer"] == sink[legs.FIELD]["transfer"] != prefill[legs.FIELD]["transfer"]
    assert source[legs.FIELD]["peer"]["instance"] == "p0"
    assert prefill["messages"] == answer["messages"] == NOW
    assert prefill[legs.FIELD]["peer"]["instance"] == "d0"
    text = (await f.get("/metrics")).body.decode()
    assert 'xpyd_router_pulls_total{result="ok"} 1' in text
    (member,) = [one for one in f.context.roster.members() if one.name == "p0"]
    assert member.sent_tokens < (2000 + 3000 + 50) + 3000 + 100, "prefill is believed to compute the new words alone"
    assert len(f.context.pulls) == 0


@pytest.mark.parametrize(("rate", "tells"), [(0.0, True), (8000.0, False), (1e6, True)])
async def test_it_is_left_alone_where_it_would_not_pay_or_nothing_is_known(
        f: RouterFleet, rate: float, tells: bool) -> None:
    await converse(f, rate=rate, tells=tells)
    assert (await ask(f)).status == 200
    assert not any(map(pulled, seen(f.d[0])))


@pytest.mark.parametrize("fields", [{"add_generation_prompt": True}, {"continue_final_message": False},
                                    {"messages": [*BEFORE, *turns(4000, 0, 3000)[::2]]}, {"messages": turns(9000)}])
async def test_requests_whose_end_is_their_own_and_other_conversations_are_left_alone(
        f: RouterFleet, fields: dict[str, Any]) -> None:
    await converse(f)
    assert (await ask(f, **fields)).status == 200
    assert not any(map(pulled, seen(f.d[0])))


@pytest.mark.parametrize("failing", ["source", "sink", "both"])
@pytest.mark.parametrize("how", [Play(status=400), Play(status=500), Play(die_at="request")])
async def test_a_pull_that_fails_costs_nothing_but_its_time(f: RouterFleet, failing: str, how: Play) -> None:
    await converse(f)

    def plays(one: Seen) -> Play | None:
        return how if pulled(one.body) else None

    for engine, name in ((f.d[0], "source"), (f.p[0], "sink")):
        if failing in (name, "both"):
            engine.choose = plays
    for _ in range(pulls_module.FAILURES):
        assert (await ask_anew(f)).status == 200
    assert transfers(f.d[0]) == pulls_module.FAILURES
    assert (await ask_anew(f)).status == 200
    assert transfers(f.d[0]) == pulls_module.FAILURES, "after some in a row there are none for a while"
    assert len(f.context.pulls) == 0


async def ask_anew(f: RouterFleet) -> Any:
    """Both turns of a conversation that nobody knows."""
    f.context.picker.holdings.__init__()
    await converse(f)
    answer = await ask(f)
    await f.wait_quiet()
    return answer


async def test_a_pull_that_takes_too_long_is_given_up(f: RouterFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls_module, "LIMIT_S", 0.05)
    await converse(f)
    never = asyncio.Event()
    f.d[0].choose = lambda one: Play(hold=never) if pulled(one.body) else None
    assert (await ask(f)).status == 200
    await f.wait_quiet()
    assert f.d[0].aborts == 1
    assert 'xpyd_router_pulls_total{result="late"} 1' in (await f.get("/metrics")).body.decode()


async def test_a_client_that_leaves_meanwhile_takes_both_legs_back(f: RouterFleet) -> None:
    await converse(f)
    never = asyncio.Event()
    for engine in (f.d[0], f.p[0]):
        engine.choose = lambda one: Play(hold=never) if pulled(one.body) else None
    _, writer = await f.connect()
    writer.write(request_bytes("/v1/chat/completions", {"model": "tiny", "messages": NOW, "max_tokens": 8}))
    await f.wait(lambda: sum(map(pulled, seen(f.p[0]))) == 1, "the pull")
    writer.transport.abort()
    await f.wait(lambda: (f.d[0].aborts, f.p[0].aborts) == (1, 1), "legs that are taken back")
    await f.wait(lambda: len(f.p[0].refused) == 1, "a farewell to who was to load")
    await f.wait_quiet()
    assert len(f.context.pulls) == 0
    assert [body["messages"] for body in seen(f.d[0]) if not pulled(body)] == [BEFORE], "nobody else was asked"


async def test_a_router_that_stops_refuses_who_waits_for_a_pull(f: RouterFleet) -> None:
    await converse(f)
    never = asyncio.Event()
    f.d[0].choose = lambda one: Play(hold=never) if pulled(one.body) else None
    asked = asyncio.ensure_future(ask(f))
    await f.wait(lambda: sum(map(pulled, seen(f.d[0]))) == 1, "the pull")
    f.context.abort("the router stops")
    assert (await asked).status == 503
    await f.wait_quiet()


async def test_pulls_of_one_decode_instance_are_few(f: RouterFleet) -> None:
    names = [f"conversation {at}" for at in range(3 * pulls_module.MOST_OF_ONE)]
    for name in names:
        await converse(f, of=name)
    never = asyncio.Event()
    f.d[0].choose = lambda one: Play(hold=never) if pulled(one.body) else None
    asked = [asyncio.ensure_future(ask(f, of=name)) for name in names]
    others = len(names) + 2 * pulls_module.MOST_OF_ONE
    await f.wait(lambda: sum(not pulled(one) for one in seen(f.d[0])) == others, "those that are served at once")
    assert len(f.context.pulls) == pulls_module.MOST_OF_ONE
    never.set()
    assert {(await one).status for one in asked} == {200}


async def test_the_pair_is_another_one_where_it_has_gone_meanwhile() -> None:
    async with fleet(prefills=2, decodes=1, policy="cost") as f:
        await converse(f)
        held = asyncio.Event()
        first = next(engine for engine in f.p if engine.seen)
        f.d[0].choose = lambda one: Play(hold=held) if pulled(one.body) else None
        asked = asyncio.ensure_future(ask(f))
        await f.wait(lambda: len(f.context.pulls) == 1, "the pull")
        (prefill,) = [engine for engine in f.p if any(map(pulled, seen(engine)))] or [first]
        await prefill.stop()
        f.context.watch.take(f.context.roster.on_refused(0.0, InstanceName(prefill.name), f"i-{prefill.name}", "gone"))
        held.set()
        assert (await asked).status == 200
        other = next(engine for engine in f.p if engine is not prefill)
        assert [body["messages"] for body in seen(other) if not pulled(body)][-1] == NOW
