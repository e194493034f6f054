"""What clients of several kinds meet: where their key is, names nobody has told yet, errors of theirs within streams,
what the router cannot keep for them, and a request that comes back.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from beats import beat, bye
from router_fleet import fleet
from scripted_engine import Play

from xpyd_sidecar.contract.ids import Role, State

MESSAGE: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/completions"])
async def test_a_key_may_come_as_anthropics_clients_send_it(tmp_path: Path, path: str) -> None:
    (tmp_path / "keys").write_text("key-of-a-client\nanother\n")
    async with fleet(api_key_file=str(tmp_path / "keys")) as f:
        body = MESSAGE if path.startswith("/v1/messages") else {"prompt": "x"}
        assert (await f.post(path, body, headers={"x-api-key": "key-of-a-client"})).status == 200
        seen = [one.headers for engine in (*f.p, *f.d) for one in engine.seen]
        assert seen
        assert not any("x-api-key" in headers or "authorization" in headers for headers in seen), "keys stay here"
        assert (await f.post(path, body, headers={"x-api-key": "wrong"})).status == 401
        assert (await f.post(path, body, headers={"x-api-key": ""})).status == 401
        both = {"x-api-key": "key-of-a-client", "Authorization": "Bearer wrong"}
        assert (await f.post(path, body, headers=both)).status == 401, "Authorization is what counts where it is there"
        assert (await f.get("/v1/models", headers={"x-api-key": "another"})).status == 200
        assert (await f.get("/metrics", headers={"x-api-key": "wrong"})).status == 401


async def test_shares_of_keys_count_whichever_header_has_them(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb\n")
    async with fleet(0, 1, api_key_file=str(tmp_path / "keys"), max_per_instance=1, queue_size=6) as f:
        f.d[0].default = Play(hold=(held := asyncio.Event()))
        one, other = {"x-api-key": "a"}, {"Authorization": "Bearer a"}
        tasks = [asyncio.create_task(f.post("/v1/completions", {"prompt": "x"}, headers={"x-api-key": "b"}))]
        await f.wait(lambda: len(f.context.servings) == 1, "the first")
        for number in range(3):
            headers = one if number % 2 else other
            tasks.append(asyncio.create_task(f.post("/v1/completions", {"prompt": "x"}, headers=headers)))
            await f.wait(lambda wanted=number + 1: len(f.context.line) == wanted, "it to wait")
        answer = await f.post("/v1/completions", {"prompt": "x"}, headers=one)
        assert answer.status == 429, "it is one key, and has its share"
        held.set()
        assert [(await task).status for task in tasks] == [200] * 4


async def test_names_of_adapters_are_unknown_only_once_instances_have_told_theirs() -> None:
    async with fleet(0, 0) as f:
        async def ask(model: str) -> tuple[int, bool]:
            answer = await f.complete(model=model)
            return answer.status, "retry-after" in answer.headers

        assert [await ask("tiny"), await ask("sql")] == [(503, True)] * 2, "nobody is there"
        assert (await f.get("/v1/models/sql")).status == 503
        said = {"interval_s": 60.0, "model": "tiny"}
        f.context.watch.on_message(beat("d0", Role.DECODE, "127.0.0.1:9", state=State.STARTING, **said))
        assert [await ask("tiny"), await ask("sql")] == [(503, True)] * 2, "who starts has not told its adapters"
        f.context.watch.on_message(beat("d0", Role.DECODE, "127.0.0.1:9", seq=2, also=("sql",), **said))
        assert await ask("other") == (404, False)
        assert (await f.get("/v1/models/other")).status == 404
        assert (await f.get("/v1/models/sql")).status == 200
        f.context.watch.on_message(bye("d0"))
        assert [await ask("tiny"), await ask("sql"), await ask("other")] == [(503, True)] * 3, "all are gone"


@pytest.mark.parametrize(("code", "outcome"), [(400, "client_error"), (404, "client_error"), (500, "broken")])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_error_event_of_the_clients_making_counts_as_the_clients(path: str, code: int, outcome: str) -> None:
    async with fleet(0, 1, failover="error") as f:
        records = f.records()
        f.d[0].plays.append(Play(error_after=1, error_code=code))
        body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        answer = await f.post(path, {"model": "tiny", "stream": True, **body})
        await f.wait_quiet()
        assert answer.status == 200
        assert b'"error"' in answer.body
        assert [record.outcome for record in records] == [outcome]


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
async def test_what_one_engine_would_have_to_keep_is_refused_by_name(field: str) -> None:
    async with fleet() as f:
        body = {"model": "tiny", "input": "x"}
        answer = await f.post("/v1/responses", body | {field: "conv_1"})
        assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (400, field, "refused_field")
        assert answer.json["error"]["message"].endswith("send the whole conversation")
        assert (await f.post("/v1/responses", body | {field: None})).status == 200


async def test_a_request_that_comes_back_to_its_router_ends_there() -> None:
    async with fleet(0, 0) as f:
        f.context.watch.on_message(beat("loop", Role.DECODE, f"127.0.0.1:{f.router.port}", interval_s=60.0))
        records = f.records()
        answer = await f.complete()
        assert (answer.status, answer.json["error"]["code"]) == (508, "loop_detected")
        await f.wait_quiet()
        assert len(records) == 1, "it went round once"


async def test_a_request_that_comes_back_by_another_router_ends_too() -> None:
    async with fleet(0, 0) as here, fleet(0, 0) as there:
        for one, other in ((here, there), (there, here)):
            one.context.watch.on_message(beat("loop", Role.DECODE, f"127.0.0.1:{other.router.port}", interval_s=60.0))
        answer = await here.complete()
        assert answer.status == 508


async def test_engines_hear_by_whom_a_request_came() -> None:
    async with fleet(0, 1) as f:
        await f.complete()
        await f.post("/v1/completions", {"prompt": "x"}, headers={"Via": "1.1 gateway"})
        mine = f.context.via.decode()
        assert [seen.headers["via"] for seen in f.d[0].seen] == [mine, f"1.1 gateway, {mine}"]
