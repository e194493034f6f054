"""Engines that fail, hang, break off or crawl while their health check is answered: clients notice next to nothing, whoever
is bad gets nothing more, and is back soon after it is well. Times of the router are shortened by ten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter, sleep

import pytest
from beats import beat
from engine_zoo import TOKENS, Kind, Zoo, zoo
from more_cases import more
from router_fleet import KEY, fleet
from scripted_engine import Play, ScriptedEngine, Seen

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.core_steps import CoreSteps
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.fleet import first_bytes, outliers

LOOPS = ("uvloop",)
AUTH = {"Authorization": f"Bearer {keys.admin_token(KEY)}"}


@pytest.fixture(autouse=True)
def _times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_bytes, "FLOOR_S", 0.4)
    monkeypatch.setattr(first_bytes, "PAUSE_S", 0.4)
    monkeypatch.setattr(first_bytes, "UNKNOWN", 0.0005)
    for name in ("CANARY_S", "TRIAL_S", "WINDOW_S", "LOAD_S"):
        monkeypatch.setattr(outliers, name, getattr(outliers, name) / 10)
    for name in ("EJECTED_S", "AGAIN_S"):
        monkeypatch.setattr(outliers, name, tuple(each / 10 for each in getattr(outliers, name)))


async def _suffers(one: Zoo) -> None:
    await one.run(3.0)
    told = f"{one.kind} under {one.fleet.context.config.policy}: {one.failures[:3]}"
    assert len(one.failures) <= 0.02 * one.asked, told
    if one.kind is Kind.SLOW:
        assert not one.failures, told
        return
    for _ in range(20):  # with one of eight, or where all is slow, it takes a while until three streams were there
        if not one.member.ejected:
            await one.run(1.0)
    assert one.member.ejected, told
    failed, ejected, since = len(one.failures), perf_counter(), len(one.ended)
    await one.run(1.0)
    assert len(one.failures) == failed, told
    assert not one.got(ejected), f"requests still go there: {told}"
    assert max(took for _, took in one.ended[since:]) < 15.0, told
    one.cure()
    await one.fleet.wait(lambda: not one.member.ejected, f"it to be back: {told}", 15.0)
    back = perf_counter()
    while not one.got(back):
        assert perf_counter() < back + 30.0, f"it is back and gets nothing: {told}"
        await one.run(0.2, rate=60.0)
    assert len(one.failures) == failed, told


@pytest.mark.parametrize("decodes", [2, *more([8])])
@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
async def test_an_engine_that_is_bad_costs_clients_nothing_under_every_policy(kind: Kind, decodes: int) -> None:
    async def under(policy: str) -> None:
        async with zoo(kind, decodes=decodes, policy=policy) as one:
            await _suffers(one)

    async with asyncio.TaskGroup() as group:
        for policy in policies.names():
            group.create_task(under(policy))


@pytest.mark.parametrize("kind", [Kind.FAILS, Kind.HANGS], ids=lambda kind: kind.name)
async def test_of_two_prefills_the_one_that_is_bad_is_ejected_and_decode_is_not(kind: Kind) -> None:
    async with zoo(kind, role=Role.PREFILL, prefills=2, policy="round_robin") as one:
        def waits(seen: Seen) -> Play | None:
            """As decode does: without its KV it gives nothing."""
            leg = seen.body.get("kv_transfer_params")
            served = leg is None or any(each.body["kv_transfer_params"]["transfer"] == leg["transfer"] and each.finished
                                        for each in one.fleet.p[1].seen)
            return None if served else Play(chunks=TOKENS, before=0.15)

        for engine in one.fleet.d:
            engine.choose = waits
        await one.run(3.0)
        assert one.member.ejected, one.failures
        assert not one.failures
        assert [member.name for member in one.fleet.context.roster.members() if member.ejected] == ["p0"]


async def test_whole_answers_that_never_come_eject_too_and_go_on_elsewhere() -> None:
    async with zoo(Kind.HANGS, policy="round_robin") as one:
        answers = await asyncio.gather(*(one.fleet.complete(prompt=f"w{i}") for i in range(12)))
        assert [answer.status for answer in answers] == [200] * 12
        assert one.member.ejected
        assert one.member.hung
        assert one.bad.canaries, "nobody's request proved it: a canary did"
        page = (await one.fleet.ask("/metrics")).body.decode()
        assert 'xpyd_router_canaries_total{result="silent"} 1.0' in page
        assert 'xpyd_router_instances{role="decode",state="ejected"} 1.0' in page
        assert 'xpyd_router_legs_total{result="silent",role="decode"}' in page


async def test_an_only_instance_stays_however_it_fails() -> None:
    async with zoo(Kind.FAILS, decodes=1) as one:
        for i in range(12):
            assert (await one.fleet.complete(prompt=f"q{i}")).status == 500
        await asyncio.sleep(0.5)
        assert not one.member.ejected
        one.cure()
        assert (await one.fleet.complete()).status == 200


async def test_a_request_that_fails_everywhere_ejects_nobody() -> None:
    async with zoo(Kind.FAILS, decodes=3) as one:
        one.cure()
        for engine in one.fleet.d:
            engine.choose = lambda seen: Play(status=500) if seen.body["prompt"].startswith("bad") else None
        for i in range(30):
            assert (await one.fleet.complete(prompt=f"bad {i}")).status == 500
            assert (await one.fleet.complete(prompt=f"good {i}")).status == 200
        await asyncio.sleep(0.5)
        assert not [member.name for member in one.fleet.context.roster.members() if member.ejected]


async def test_one_body_of_one_client_ejects_nobody_however_often_it_comes() -> None:
    async with zoo(Kind.FAILS, decodes=2) as one:
        one.cure()
        one.bad.choose = lambda seen: Play(status=500)  # and canaries are answered
        for _ in range(20):
            assert (await one.fleet.complete(prompt="the same")).status == 200
        assert not one.member.ejected
        for i in range(6):
            assert (await one.fleet.complete(prompt=f"another {i}")).status == 200
        assert one.member.ejected


async def test_another_routers_verdict_is_looked_into_and_a_router_that_hears_of_its_own_does_nothing() -> None:
    async with zoo(Kind.HANGS) as one:
        f = one.fleet
        f.beat(one.bad, seq=2, interval_s=60.0, ejected_by=("r0",))
        await asyncio.sleep(0.3)
        assert not one.bad.canaries
        f.beat(one.bad, seq=3, interval_s=60.0, ejected_by=("r1",))
        await f.wait(lambda: bool(one.member.ejected), "a canary to convict, without any request")
        assert not one.bad.seen
        [shown] = [each for each in (await f.ask("/fleet", headers=AUTH)).json["instances"] if each["instance"] == "d0"]
        assert (shown["ejected_by"], bool(shown["ejected"])) == (["r1"], True)
    async with zoo(Kind.SLOW) as one:
        one.fleet.beat(one.bad, seq=2, interval_s=60.0, ejected_by=("r1",))
        await one.fleet.wait(lambda: bool(one.bad.canaries), "its canary")
        await asyncio.sleep(0.5)
        assert not one.member.ejected, "here it answers"


async def test_a_stopped_router_accuses_nobody() -> None:
    """What came while this process stood still lies unread: nobody was silent."""
    async with zoo(Kind.SLOW) as one:
        one.cure()
        await one.run(0.4)
        asking = [asyncio.create_task(one.fleet.complete(prompt=f"s{i}", stream=True)) for i in range(8)]
        await asyncio.sleep(0.02)
        sleep(6.0)  # noqa: ASYNC251 (it stands for a process that is stopped)
        assert {answer.status for answer in await asyncio.gather(*asking)} == {200}
        await asyncio.sleep(0.3)
        assert not [member.name for member in one.fleet.context.roster.members() if member.ejected]


async def test_a_core_that_does_not_step_is_stalled_and_what_had_not_begun_goes_on_elsewhere(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's server goes on, and nothing else is known of it but its steps: canaries are not sent here."""
    monkeypatch.setattr(first_bytes, "FLOOR_S", 3600.0)
    monkeypatch.setattr(first_bytes, "UNKNOWN", 1.0)
    async with zoo(Kind.HANGS, policy="round_robin") as one:
        f, turns = one.fleet, 0

        async def beats() -> None:
            nonlocal turns
            for seq in range(2, 10_000):
                turns += 1
                f.beat(f.d[0], seq=seq, interval_s=0.2, core=CoreSteps(5, 1.0))
                f.beat(f.d[1], seq=seq, interval_s=0.2, core=CoreSteps(turns, 1.0))
                await asyncio.sleep(0.1)

        beating = asyncio.create_task(beats())
        try:
            answers = await asyncio.gather(*(f.complete(prompt=f"w{i}", stream=i % 3 == 0) for i in range(12)))
            assert [answer.status for answer in answers] == [200] * 12
            assert one.member.ejected.startswith("stalled: ")
            told = (await f.ask("/fleet", headers=AUTH)).json["instances"]
            shown = {each["instance"]: each["stalled_s"] for each in told}
            assert shown["d1"] == shown["p0"] == 0.0
            assert one.member.hung
            said = [f.context.watch.verdict(beat(engine.name, Role.DECODE, engine.address)) for engine in f.d[:2]]
            assert [(each.stalled, each.hold) for each in said] == [(True, False), (False, False)], "though it was left"
            assert one.bad.aborts == 6
            await f.wait(lambda: not one.bad.open, "nothing to be left there")
        finally:
            beating.cancel()


@pytest.mark.parametrize("honest", [0, 8])
async def test_a_request_that_hangs_cores_does_not_walk_through_all_of_them(monkeypatch: pytest.MonkeyPatch,
                                                                          honest: int) -> None:
    """Alone it stops two; where others are in flight beside it, three at most, and all of those are answered."""
    monkeypatch.setattr(first_bytes, "FLOOR_S", 3600.0)
    monkeypatch.setattr(first_bytes, "UNKNOWN", 1.0)
    async with fleet(0, 8) as f:
        hung: list[str] = []

        def chooser(engine: ScriptedEngine) -> Callable[[Seen], Play]:
            def choose(seen: Seen) -> Play:
                if seen.body.get("user") == "poison" and engine.name not in hung:
                    hung.append(engine.name)
                    engine.default = Play(hold=asyncio.Event())  # for canaries
                return Play(hold=asyncio.Event()) if engine.name in hung else Play(before=0.3)
            return choose

        async def beats() -> None:
            turns = dict.fromkeys((engine.name for engine in f.d), 0)
            for seq in range(2, 10_000):
                for engine in f.d:
                    turns[engine.name] += engine.name not in hung
                    f.beat(engine, seq=seq, interval_s=0.2, core=CoreSteps(turns[engine.name], 1.0))
                await asyncio.sleep(0.1)

        async def honestly(number: int) -> list[int]:
            answers = [await f.complete(prompt=f"h{number} {turn}", stream=number % 2 == 0) for turn in range(6)]
            return [answer.status for answer in answers]

        for engine in f.d:
            engine.choose = chooser(engine)
        beating = asyncio.create_task(beats())
        try:
            others = [asyncio.create_task(honestly(number)) for number in range(honest)]
            answer = await f.complete(prompt="p", user="poison")
            assert (answer.status, answer.json["error"]["code"]) == (502, "poison_request")
            assert len(hung) == 2 if not honest else 2 <= len(hung) <= 3, hung
            assert [await one for one in others] == [[200] * 6] * honest
            again = await f.complete(prompt="p", user="poison")
            assert again.status == 502
            assert len(hung) <= 3
        finally:
            beating.cancel()
