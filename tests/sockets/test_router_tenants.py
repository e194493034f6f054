"""Tenants over real sockets: what they may use, what they may take, what they are charged, and what is told of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from beats import Beater, beat, bye
from recorded import load
from replay import Replay
from router_fleet import KEY, Answer, RouterFleet, fleet
from scripted_engine import Play

from xpyd_sidecar.contract import tenants
from xpyd_sidecar.contract.demand import RouterDemand, TenantDemand

SECRETS = {name: tenants.new_key() for name in ("a", "b", "c")}
A, B, C = ({"Authorization": f"Bearer {SECRETS[name]}"} for name in ("a", "b", "c"))


def write(file: Path, **those: dict[str, Any]) -> str:
    entries = [{"name": name, "digests": [tenants.digest_of(SECRETS[name])], **fields} for name, fields in those.items()]
    file.write_text(json.dumps({"tenants": entries}))
    return str(file)


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, *, prefills: int = 1, replay: Replay | None = None,
                  settings: dict[str, Any] | None = None, **those: dict[str, Any]) -> AsyncIterator[RouterFleet]:
    file = write(tmp_path / "keys", **those)
    async with fleet(prefills, 1, replay, api_key_file=file, model="tiny", **(settings or {})) as f:
        yield f


async def complete(f: RouterFleet, headers: dict[str, str], **fields: Any) -> Answer:
    return await f.post("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 8, **fields}, headers=headers)


async def recorded_stream(f: RouterFleet, headers: dict[str, str]) -> int:
    """A stream whose tokens can be counted; how many its client got."""
    one = next(each for each in load().requests if each.way != "error" and each.api == "completions")
    answer = await f.post("/v1/completions", {**one.body, "model": "tiny", "stream": True}, headers=headers)
    assert answer.status == 200
    return sum(1 for event in answer.events if event != "[DONE]" and event["choices"])


def account(f: RouterFleet, name: str) -> Any:
    found = f.context.quotas.account(name)
    assert found is not None
    return found


async def test_only_keys_of_tenants_pass(tmp_path: Path) -> None:
    async with serving(tmp_path, a={}) as f:
        assert (await complete(f, A)).status == 200
        assert (await complete(f, B)).status == 401
        assert (await complete(f, {})).status == 401
        assert (await complete(f, {"x-api-key": SECRETS["a"]})).status == 200


async def test_a_tenant_uses_its_own_models_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, a={"models": ["tiny"]}, b={"models": ["large", "huge"]}) as f:
        assert (await complete(f, A)).status == 200
        refused = await complete(f, B)
        assert refused.status == 403
        error = refused.json["error"]
        assert (error["code"], error["param"], error["type"]) == ("model_not_allowed", "model", "permission_error")
        assert error["message"] == "tenant 'b' may not use model 'tiny'; it may use 'large', 'huge'"
        assert (await f.post("/v1/embeddings", {"model": "tiny", "input": "x"}, headers=B)).status == 403
        assert (await f.post("/v1/embeddings", {"input": "x"}, headers=B)).status == 403, "the service's own is meant"
        form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nlarge\r\n--b--\r\n'
        sent = await f.post("/v1/audio/transcriptions", form,
                            headers={**B, "Content-Type": "multipart/form-data; boundary=b"})
        assert sent.status == 403, "a form's model is not read"
        assert [one["id"] for one in (await f.get("/v1/models", headers=A)).json["data"]] == ["tiny"]
        assert (await f.get("/v1/models", headers=B)).json["data"] == []
        assert (await f.get("/v1/models/tiny", headers=B)).status == 404
        assert len(f.d[0].seen) == 1
        assert account(f, "b").in_flight == 0


async def test_an_engine_never_reads_another_model_than_was_judged(tmp_path: Path) -> None:
    """A field that stands there twice may be read either way."""
    async with serving(tmp_path, a={"models": ["tiny"]}) as f:
        twice = b'{"model": "large", "input": "x", "mod\\u0065l": "tiny"}'
        sent = await f.post("/v1/embeddings", twice, headers={**A, "Content-Type": "application/json"})
        assert sent.status == 200
        assert int(f.d[0].seen[-1].headers["content-length"]) < len(twice) - len(b'"model": "large"')
        other = b'{"model": "tiny", "input": "x", "model": "large"}'
        assert (await f.post("/v1/embeddings", other, headers={**A, "Content-Type": "application/json"})).status == 403


async def test_tokens_of_a_minute_are_taken_settled_and_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, a={"tokensPerMinute": 60}, b={}) as f:
        account(f, "a")._level = 30.0
        first = await complete(f, A)
        assert first.status == 200
        assert first.headers["x-ratelimit-limit-tokens"] == "60"
        usage = first.json["usage"]
        await f.wait_quiet()
        left = account(f, "a")._level
        assert left == pytest.approx(30 - usage["prompt_tokens"] - usage["completion_tokens"], abs=2.0)
        account(f, "a")._level = -20.5
        refused = await complete(f, A)
        assert refused.status == 429
        assert refused.json["error"]["message"] == "tenant 'a' has its 60 tokens a minute"
        assert 19 <= int(refused.headers["retry-after"]) <= 21
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert 45 <= float(refused.headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 51
        unbounded = await complete(f, B)
        assert unbounded.status == 200
        assert "x-ratelimit-limit-tokens" not in unbounded.headers


async def test_a_day_ends_and_requests_in_flight_are_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, a={"tokensPerDay": 1_000}, b={"inFlight": 1}, c={}) as f:
        account(f, "a").today = 1_000
        account(f, "a").refusal(0.0, 0.0)
        refused = await complete(f, A)
        assert refused.status == 200, "a day begins with the first request that is seen in it"
        account(f, "a").today = 1_000
        refused = await complete(f, A)
        assert (refused.status, refused.json["error"]["message"]) == (429, "tenant 'a' has its 1000 tokens a day")
        assert 1 <= int(refused.headers["retry-after"]) <= 86_400
        go = asyncio.Event()
        f.d[0].default = Play(hold=go)
        held = asyncio.create_task(complete(f, B))
        await f.wait(lambda: account(f, "b").in_flight == 1, "a request in flight")
        refused = await complete(f, B)
        assert (refused.status, refused.json["error"]["message"]) == (429, "tenant 'b' has its 1 requests in flight")
        other = asyncio.create_task(complete(f, C))
        go.set()
        assert [(await held).status, (await other).status] == [200, 200]
        await f.wait(lambda: account(f, "b").in_flight == 0, "its end")
        assert (await complete(f, B)).status == 200


async def test_a_stream_is_charged_for_what_its_client_got(tmp_path: Path) -> None:
    async with serving(tmp_path, replay=Replay(load()), a={"tokensPerDay": 10**6}) as f:
        records = f.records()
        answer = await recorded_stream(f, A)
        await f.wait(lambda: bool(records), "the record")
        record = records[0]
        assert (record.tenant, record.model) == ("a", "tiny")
        assert record.tokens == answer
        assert record.charged == account(f, "a").today == record.prompt_tokens + record.tokens > record.tokens


async def test_cached_tokens_count_at_their_weight(tmp_path: Path) -> None:
    async with serving(tmp_path, replay=Replay(load()), a={"cachedWeight": 0.25}, b={}) as f:
        records = f.records()
        f.p[0].cached = 4
        for headers in (A, B):
            await recorded_stream(f, headers)
        await f.wait(lambda: len(records) == 2, "the records")
        one, other = records
        assert one.cached_tokens == other.cached_tokens == 4
        assert (other.charged, one.charged) == (other.prompt_tokens + other.tokens, other.charged - 3)
        assert one.prompt_tokens >= 4


async def test_what_no_engine_did_costs_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, settings={"queue_size": 0, "max_in_flight": 1}, a={"tokensPerDay": 10**6}, b={}) as f:
        refused = await complete(f, A, model="other")
        assert refused.status == 404
        assert (await complete(f, A, priority="high")).status == 400
        go = asyncio.Event()
        f.d[0].default = Play(hold=go)
        held = asyncio.create_task(complete(f, B))
        await f.wait(lambda: len(f.context.servings) == 1, "the one that is served")
        assert (await complete(f, A)).status == 503
        go.set()
        assert (await held).status == 200
        await f.wait_quiet()
        f.d[0].default = Play(status=400)
        assert (await complete(f, A)).status == 400
        await f.wait_quiet()
        assert (account(f, "a").today, account(f, "a").in_flight) == (0, 0)


async def test_who_goes_while_its_request_waits_pays_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, settings={"max_in_flight": 1}, a={"tokensPerDay": 10**6}, b={}) as f:
        go = asyncio.Event()
        f.d[0].default = Play(hold=go)
        held = asyncio.create_task(complete(f, B))
        await f.wait(lambda: len(f.context.servings) == 1, "the one that is served")
        waiting = asyncio.create_task(complete(f, A))
        await f.wait(lambda: len(f.context.line) == 1, "the one that waits")
        assert account(f, "a").today > 0
        waiting.cancel()
        await f.wait(lambda: account(f, "a").in_flight == 0, "its end")
        assert account(f, "a").today == 0
        go.set()
        assert (await held).status == 200


async def test_a_request_that_is_held_after_its_instance_went_is_taken_and_charged_once(tmp_path: Path) -> None:
    async with serving(tmp_path, prefills=0, settings={"hold_s": 60.0}, a={"tokensPerDay": 10**6, "inFlight": 1}) as f:
        records = f.records()
        f.d[0].refuse()
        waiting = asyncio.create_task(complete(f, A))
        await f.wait(lambda: len(f.context.hold) == 1, "the one that is held")
        assert [record.outcome for record in records] == ["held"]
        assert account(f, "a").in_flight == 1
        taken = account(f, "a").today
        assert taken > 0
        assert (await complete(f, A)).status == 429
        f.context.watch.on_message(bye("d0"))
        await f.d[0].start()
        f.beat(f.d[0], interval_s=60.0, incarnation="again")
        assert (await waiting).status == 200
        await f.wait(lambda: account(f, "a").in_flight == 0, "its end")
        assert account(f, "a").today == records[-1].charged > 0


async def test_a_tenants_priority_is_clamped_to_its_own_band(tmp_path: Path) -> None:
    async with serving(tmp_path, a={"priority": {"least": -4, "most": 2}}, b={}) as f:
        for headers in (A, B):
            for asked in (-8, 8):
                assert (await complete(f, headers, priority=asked)).status == 200
        assert [seen.body["priority"] for seen in f.d[0].seen] == [-4, 2, 0, 8]


async def test_an_isolated_tenant_has_a_salt_of_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path, a={"isolation": "tenant"}, b={"isolation": "tenant"}, c={}) as f:
        for headers, fields in ((A, {}), (A, {}), (B, {}), (A, {"cache_salt": "x"}), (C, {"cache_salt": "x"}), (C, {})):
            assert (await complete(f, headers, **fields)).status == 200
        salts = [seen.body.get("cache_salt") for seen in f.d[0].seen]
        assert salts == [seen.body.get("cache_salt") for seen in f.p[0].seen], "both engines, or no KV is found"
        assert salts[0] == salts[1]
        assert len(set(salts[1:])) == 5
        assert salts[4:] == ["x", None]
        assert all(len(salt) == 64 and int(salt, 16) for salt in salts[:4])
        for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/messages", {"messages": [], "max_tokens": 4})):
            assert (await f.post(path, {"model": "tiny", **body}, headers=A)).status == 200
            assert f.d[0].seen[-1].body["cache_salt"] == salts[0]
        assert (await f.post("/tokenize", {"model": "tiny", "prompt": "x"}, headers=A)).status == 200
        assert "cache_salt" not in f.d[0].seen[-1].body
        refused = await f.post("/v2/embed", {"model": "tiny", "texts": []}, headers=A)
        assert (refused.status, refused.json["error"]["code"]) == (403, "not_isolated")
        assert (await f.post("/v2/embed", {"model": "tiny", "texts": []}, headers=C)).status == 200
        assert (await complete(f, A, cache_salt=5)).status == 400


async def test_the_access_log_has_what_a_bill_is_made_of_and_no_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xpyd_sidecar.access")
    async with serving(tmp_path, replay=Replay(load()), a={"models": ["tiny"]}, b={"models": ["large"]}) as f:
        tokens = await recorded_stream(f, A)
        assert (await complete(f, B, prompt="a secret")).status == 403
        await f.wait_quiet()
        f.context.observer.tell()
    lines = [vars(each) for each in caplog.records if each.name == "xpyd_sidecar.access"]
    served = next(line for line in lines if line["status"] == 200)
    assert (served["tenant"], served["model"], served["completion_tokens"]) == ("a", "tiny", tokens)
    assert served["charged_tokens"] == served["prompt_tokens"] + tokens
    refused = next(line for line in lines if line["status"] == 403)
    assert refused["tenant"] == "b"
    assert "secret" not in str(lines)
    assert not any(key in caplog.text or key in str(lines) for key in SECRETS.values())


async def test_usage_is_told_by_tenant_on_the_admin_port_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, replay=Replay(load()), a={}, b={"models": ["large"]}) as f:
        tokens = await recorded_stream(f, A)
        assert (await complete(f, B)).status == 403
        await f.wait_quiet()
        page = (await f.ask("/metrics")).body.decode()
        assert 'xpyd_router_tenant_requests_total{outcome="ok",tenant="a"} 1.0' in page
        assert 'xpyd_router_tenant_requests_total{outcome="refused",tenant="b"} 1.0' in page
        assert f'xpyd_router_tenant_tokens_total{{kind="completion",tenant="a"}} {tokens}.0' in page
        refused = await f.get("/metrics", headers=A)
        assert (refused.status, refused.json["error"]["code"]) == (403, "admin_port")


async def test_a_changed_document_is_taken_over_and_a_bad_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, a={}) as f:
        write(tmp_path / "keys", a={"tokensPerMinute": 0})
        await f.wait(lambda: "tokensPerMinute is 0: it may send nothing" in caplog.text, "what is wrong")
        assert (await complete(f, A)).status == 200
        write(tmp_path / "keys", a={"tokensPerMinute": 60}, b={})
        await f.wait(lambda: len(f.context.quotas) == 2, "the change")
        assert (await complete(f, B)).status == 200
        assert (await complete(f, A)).headers["x-ratelimit-limit-tokens"] == "60"
        write(tmp_path / "keys", b={})
        await f.wait(lambda: len(f.context.quotas) == 1, "the change")
        assert (await complete(f, A)).status == 401


async def test_a_heavier_tenant_waits_for_less(tmp_path: Path) -> None:
    """Requests of both wait: those of the one with weight 3 are over while half of the other's wait."""
    async with serving(tmp_path, prefills=0, settings={"max_per_instance": 1}, a={"weight": 3}, b={}, c={}) as f:
        go = asyncio.Event()
        f.d[0].default = Play(hold=go)
        tasks = [asyncio.create_task(complete(f, C))]
        await f.wait(lambda: len(f.d[0].seen) == 1, "the first")
        for number in range(8):
            for headers in (A, B):
                tasks.append(asyncio.create_task(complete(f, headers, prompt=f"x{number}", max_tokens=300,
                                                          user="a" if headers is A else "b")))
                await f.wait(lambda: len(f.context.line) == len(tasks) - 1, "a place")
        go.set()
        assert {(await task).status for task in tasks} == {200}
        order = "".join(seen.body.get("user", "") for seen in f.d[0].seen)
        assert (len(order), order[-4:]) == (16, "bbbb"), order


async def test_routers_tell_what_their_tenants_want_and_share_by_it(tmp_path: Path) -> None:
    async with serving(tmp_path, a={"tokensPerMinute": 6000, "tokensPerDay": 10**6}) as f:
        assert (await complete(f, A)).status == 200
        await f.wait_quiet()
        f.context.sweep()
        agent = Beater(f.router.members_port, KEY)
        try:
            said = (await agent.say(beat("d0"))).demand
            assert said is not None
            assert (said.router, [each.tenant for each in said.tenants]) == ("r0", ["a"])
            assert said.tenants[0].wanted > 0
            assert said.tenants[0].today == account(f, "a").today > 0
            theirs = RouterDemand("r1", 1, (TenantDemand("a", 10**7, 999_999),))
            await agent.say(beat("d0", seq=2, demands=(said, theirs)))
        finally:
            agent.close()
        f.context.sweep()
        assert account(f, "a").share < 0.01
        refused = await complete(f, A)
        assert (refused.status, refused.json["error"]["message"]) == (429, "tenant 'a' has its 1000000 tokens a day")
    async with fleet(1, 1) as f:
        agent = Beater(f.router.members_port, KEY)
        try:
            assert (await agent.say(beat("d0"))).demand is None
            assert not (await agent.say(beat("d0", seq=2, demands=(theirs,)))).refused
        finally:
            agent.close()


async def test_keys_in_the_clear_are_nowhere(tmp_path: Path) -> None:
    """A key of the client's own stands there under the service's pepper, and works."""
    file = tmp_path / "keys"
    file.write_text(json.dumps({"tenants": [{"name": "a", "digests": [tenants.digest_of("letmein", KEY)]}]}))
    async with fleet(1, 1, api_key_file=str(file)) as f:
        assert (await complete(f, {"Authorization": "Bearer letmein"})).status == 200
        assert (await complete(f, {"Authorization": "Bearer letmeout"})).status == 401
    assert "letmein" not in file.read_text()
