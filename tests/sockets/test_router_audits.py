"""Audits of a router: what they ask, what they count, and that no client notices any of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from router_fleet import RouterFleet, fleet
from scripted_engine import Play, ScriptedEngine, Seen

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.router.fleet.member import EngineTarget, FleetMember
from xpyd_sidecar.router.serving import audits as serving_audits

STREAM = {"stream": True, "temperature": 0}


def said(logprob: float, chat: bool = False) -> bytes:
    """An answer of one token with its log probability."""
    top = {"token_id:5": logprob, "token_id:6": -7.0}
    shown: dict[str, Any] = {"tokens": ["token_id:5"], "token_logprobs": [logprob], "top_logprobs": [top]}
    if chat:
        listed = [{"token": token, "logprob": value} for token, value in top.items()]
        shown = {"content": [{"token": "token_id:5", "logprob": logprob, "top_logprobs": listed}]}
    return json.dumps({"choices": [{"logprobs": shown}]}).encode()


def of_audit(seen: Seen) -> bool:
    return seen.headers.get("x-request-id", "").startswith("audit-")


def of_handing(seen: Seen) -> bool:
    """One that comes with KV from elsewhere."""
    return of_audit(seen) and "kv_transfer_params" in seen.body


def tells(handed: float, alone: float) -> Callable[[Seen], Play | None]:
    """A decode engine whose answer depends on where its KV came from."""
    def choose(seen: Seen) -> Play | None:
        if not of_audit(seen):
            return None
        logprob = handed if "kv_transfer_params" in seen.body else alone
        return Play(body=said(logprob, "messages" in seen.body))

    return choose


def with_odds(f: RouterFleet, handed: float = -0.5, alone: float = -0.5) -> None:
    for engine in (*f.p, *f.d):
        engine.choose = tells(handed, alone)


def audits(f: RouterFleet) -> dict[str, float]:
    """How many ended so."""
    return {result: value for (result,), value in f.context.observer.metrics._counts["xpyd_router_audits"].items()}


async def audited(f: RouterFleet, **expected: int) -> None:
    await f.wait(lambda: audits(f) == expected, f"{expected}, not {audits(f)}")


def pair(f: RouterFleet, result: str) -> float | None:
    labels = {"prefill": "p0", "decode": "d0", "result": result}
    value = f.context.observer.metrics.registry.get_sample_value("xpyd_router_pair_audits_total", labels)
    return None if value is None else float(value)


def asked(engine: ScriptedEngine) -> list[dict[str, Any]]:
    """Bodies of audits that came to it."""
    return [seen.body for seen in engine.seen if of_audit(seen)]


@pytest.mark.parametrize("fields", [STREAM, {"stream": False}, {"stream": True, "temperature": 1}])
async def test_the_prompt_is_computed_twice_each_time_by_itself_and_compared(fields: dict[str, Any]) -> None:
    async with fleet(audit=1.0) as f:
        with_odds(f, -0.5, -0.5625)
        assert (await f.complete(**fields)).status == 200
        await audited(f, equal=1)
        (first,), (alone, handed) = asked(f.p[0]), asked(f.d[0])
        for body in (first, handed, alone):
            assert (body["prompt"], body["max_tokens"], body["temperature"]) == ("hi", 1, 0)
            assert body["stream"] is False
        assert handed["logprobs"] == alone["logprobs"] == 5
        assert "logprobs" not in first, "prefill would compile for what nobody looks at"
        assert first["cache_salt"] == handed["cache_salt"] != alone["cache_salt"]
        assert first["kv_transfer_params"]["transfer"] == handed["kv_transfer_params"]["transfer"]
        assert (first["kv_transfer_params"]["role"], handed["kv_transfer_params"]["role"]) == ("prefill", "decode")
        assert first["kv_transfer_params"]["peer"]["instance"] == "d0"
        assert "kv_transfer_params" not in alone
        assert (pair(f, "equal"), pair(f, "differs")) == (1, 0)
        buckets = f.context.observer.metrics.registry.get_sample_value
        assert buckets("xpyd_router_audit_difference_bucket", {"le": "0.03"}) == 0
        assert buckets("xpyd_router_audit_difference_bucket", {"le": "0.1"}) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_wrong_kv_is_counted_for_its_pair_and_said_in_the_log(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(audit=1.0) as f:
        with_odds(f, -2.5, -0.5)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert (await f.post("/v1/chat/completions", body)).status == 200
            await audited(f, differs=3)
        assert (pair(f, "equal"), pair(f, "differs")) == (0, 3)
        (line, *_more) = [record for record in caplog.records if "audit" in record.message]
        assert line.message == "an audit: log probabilities differ by 2"
        assert (vars(line)["prefill"], vars(line)["decode"]) == ("p0", "d0")


async def test_nothing_of_it_shows_to_clients_or_in_what_is_known_of_instances() -> None:
    held = asyncio.Event()
    async with fleet(audit=1.0) as f:
        f.d[0].choose = lambda seen: Play(body=said(-0.5), hold=held) if of_handing(seen) else tells(-0.5, -0.5)(seen)
        f.p[0].choose = lambda seen: Play(status=500) if of_audit(seen) and held.is_set() else tells(0, 0)(seen)
        answer = await f.complete(**STREAM)
        assert (answer.complete, answer.events[-1]) == (True, "[DONE]")
        await f.wait(lambda: len(asked(f.d[0])) == 2, "an audit that hangs")
        assert [member.in_flight for member in f.context.roster.members()] == [0, 0]
        assert not f.context.servings
        assert (await f.complete(**STREAM)).complete, "clients are served beside it"
        held.set()
        await audited(f, equal=1, failed=1)
        f.context.observer.settle()
        metrics = f.context.observer.metrics
        assert (metrics.requests_total, metrics.requests_failed) == (2, 0)
        assert all(member.pickable and not member.doubted for member in f.context.roster.members())
        await f.wait(lambda: not f.context.pool.calls, "no call is left")


async def test_one_runs_a_few_wait_and_the_others_are_counted() -> None:
    held = asyncio.Event()
    async with fleet(audit=1.0) as f:
        f.d[0].choose = lambda seen: Play(body=said(-0.5), hold=held) if of_audit(seen) else None
        f.p[0].choose = tells(0, 0)
        for _ in range(serving_audits.MAX_WAITING + 4):
            assert (await f.complete(**STREAM)).complete
        await audited(f, full=3)
        assert len(f.context.audits) == serving_audits.MAX_WAITING + 1
        await f.wait(lambda: len(asked(f.d[0])) == 1, "the one that runs")
        held.set()
        await audited(f, full=3, equal=serving_audits.MAX_WAITING + 1)
        assert len(f.context.audits) == 0


async def test_what_fails_counts_as_that_and_a_leg_that_is_given_up_is_taken_back() -> None:
    async with fleet(audit=1.0) as f:
        f.p[0].choose = lambda seen: Play(die_at="request") if of_audit(seen) else None
        f.d[0].choose = lambda seen: Play(hold=asyncio.Event()) if of_handing(seen) else tells(0, 0)(seen)
        assert (await f.complete(**STREAM)).complete
        await audited(f, failed=1)
        await f.wait(lambda: len(f.d[0].refused) == 1, "decode hears that the leg will not come")
        (transfer,) = {body["kv_transfer_params"]["transfer"] for body in asked(f.d[0]) if "kv_transfer_params" in body}
        assert f.d[0].refused[0].body["kv_transfer_params"]["transfer"] == transfer
        assert all(member.pickable for member in f.context.roster.members())


async def test_answers_without_log_probabilities_are_no_finding() -> None:
    async with fleet(audit=1.0) as f:
        assert (await f.complete(**STREAM)).complete
        await audited(f, failed=1)
        assert (pair(f, "equal"), pair(f, "differs")) == (None, None)


async def test_audits_wait_for_engines_with_nothing_to_do_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_audits, "WAIT_S", 0.3)
    async with fleet(audit=1.0) as f:
        with_odds(f)
        f.beat(f.p[0], seq=5, interval_s=60.0, load=Load(waiting=3))
        assert (await f.complete(**STREAM)).complete
        await audited(f, late=1)
        assert not asked(f.p[0])
        monkeypatch.setattr(serving_audits, "WAIT_S", 60.0)
        f.beat(f.p[0], seq=6, interval_s=60.0, load=Load())
        assert (await f.complete(**STREAM)).complete
        await audited(f, late=1, equal=1)


async def test_one_that_takes_too_long_or_is_in_the_way_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(audit=1.0) as f:
        f.p[0].choose = tells(0, 0)
        f.d[0].choose = lambda seen: Play(hold=asyncio.Event()) if of_handing(seen) else tells(0, 0)(seen)
        monkeypatch.setattr(serving_audits, "RUN_S", 0.2)
        assert (await f.complete(**STREAM)).complete
        await audited(f, late=1)
        monkeypatch.setattr(serving_audits, "RUN_S", 60.0)
        assert (await f.complete(**STREAM)).complete
        await f.wait(lambda: f.d[0].open == 1, "an audit that hangs")
        f.context.draining = True
        await audited(f, late=1, busy=1)
        await f.wait(lambda: f.d[0].open == 0, "its leg to be closed")
        assert len(f.context.audits) == 0


async def test_an_engine_that_compiles_for_its_first_log_probabilities_has_time_and_is_not_called_slow(
        monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = asyncio.Event()
    monkeypatch.setattr(serving_audits, "RUN_S", 0.5)
    async with fleet(audit=1.0) as f:
        with_odds(f)
        f.d[0].choose = lambda seen: Play(body=said(-0.5), hold=compiled) if of_audit(seen) else None
        assert (await f.complete(**STREAM)).complete
        await f.wait(lambda: bool(asked(f.d[0])), "an audit that waits for the compiler")
        await asyncio.sleep(2.5)  # two ticks
        assert (audits(f), asked(f.p[0])) == ({}, []), "nothing is held for it by prefill meanwhile"
        monkeypatch.setattr(serving_audits, "RUN_S", 60.0)
        compiled.set()
        await audited(f, equal=1)
        monkeypatch.setattr(serving_audits, "RUN_S", 0.5)
        f.d[0].choose = lambda seen: Play(hold=asyncio.Event()) if of_audit(seen) else None
        assert (await f.complete(**STREAM)).complete
        await audited(f, equal=1, late=1)  # it has compiled: now it is slow


async def test_an_engine_that_was_started_again_compiles_again_and_what_is_known_of_engines_has_a_bound(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_audits, "MAX_WARM", 2)

    def life(name: str, incarnation: str, rank: int | None = None) -> EngineTarget:
        return EngineTarget(InstanceName(name), Incarnation(incarnation), Fingerprint(""), HostPort(""), HostPort(""),
                            FleetMember(InstanceName(name)), rank)

    async with fleet(audit=1.0) as f:
        audits = f.context.audits
        assert audits is not None
        audits.mark_warm(life("d7", "a"))
        assert audits.warm(life("d7", "a"))
        assert not audits.warm(life("d7", "b"))
        assert not audits.warm(life("d7", "a", 1)), "each data-parallel rank compiles by itself"
        audits.mark_warm(life("d7", "a", 1))
        audits.mark_warm(life("d8", "a"))
        assert (audits.warm(life("d7", "a")), audits.warm(life("d8", "a"))) == (False, True)


@pytest.mark.parametrize("patience_s", [0.2, 60.0])
async def test_what_is_given_up_while_an_engine_compiles_counts_as_warming(
        monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    monkeypatch.setattr(serving_audits, "WARM_S", patience_s)
    async with fleet(audit=1.0) as f:
        with_odds(f)
        f.d[0].choose = lambda seen: Play(hold=asyncio.Event()) if of_audit(seen) else None
        assert (await f.complete(**STREAM)).complete
        await f.wait(lambda: len(f.context.audits) == 0 or f.d[0].open == 1, "an audit that waits for the compiler")
        f.context.draining = patience_s == 60.0  # it is in the way
        await audited(f, warming=1)
        f.context.draining = False
        await f.wait(lambda: f.d[0].open == 0, "its request to be closed")
        assert (pair(f, "equal"), pair(f, "differs")) == (None, None)


@pytest.mark.parametrize("spoils", ["alone", "retried", "refused"])
async def test_only_answers_with_kv_from_prefill_and_without_trouble_are_audited(spoils: str) -> None:
    async with fleet(prefills=2, audit=1.0) as f:
        with_odds(f)
        if spoils == "retried":
            f.d[0].plays.append(Play(status=500))
            f.d[0].choose = lambda seen: None
        fields = {"alone": {"n": 2}, "retried": {}, "refused": {}}[spoils]
        if spoils == "refused":
            f.d[0].plays.append(Play(status=400))
            f.d[0].choose = lambda seen: None
        await f.complete(stream=True, **fields)
        await f.wait_quiet()
        assert (audits(f), len(f.context.audits)) == ({}, 0)


async def test_a_share_of_them_is_audited_and_without_one_none() -> None:
    async with fleet(audit=0.25) as f:
        with_odds(f)
        f.context.audits._chance = Random(7).random
        chance, chosen = Random(7).random, 0
        for _ in range(40):
            chosen += chance() < 0.25
            assert (await f.complete(**STREAM)).complete
            await f.wait(lambda: len(f.context.audits) == 0, "no audit to wait")
        assert 4 < chosen < 20
        await audited(f, equal=chosen)
    async with fleet() as f:
        assert f.context.audits is None
        assert (await f.complete(**STREAM)).complete


async def test_what_still_waits_when_the_router_ends_is_counted() -> None:
    async with fleet(audit=1.0) as f:
        f.d[0].choose = lambda seen: Play(hold=asyncio.Event()) if of_handing(seen) else tells(0, 0)(seen)
        f.p[0].choose = tells(0, 0)
        for _ in range(3):
            assert (await f.complete(**STREAM)).complete
        await f.wait(lambda: len(asked(f.d[0])) == 2 and len(f.context.audits) == 3, "one that hangs, and two that wait")
        f.context.abort("the router stopped")
        await audited(f, busy=3)
