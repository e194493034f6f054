"""A router without instances, over real sockets: who is held starts some, the operator's poll hears of it, and the truth is
said where none comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from beats import bye
from router_fleet import KEY, Answer, RouterFleet, fleet, read_answer, request_bytes

from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.ids import Incarnation, State
from xpyd_sidecar.contract.signing import SignedCall
from xpyd_sidecar.router.endpoints import waking
from xpyd_sidecar.router.fleet import expected, standby

SECRET = keys.derive(KEY, "admin call")
CHAT = {"messages": [{"role": "user", "content": "x"}]}


@contextlib.asynccontextmanager
async def asleep(**settings: Any) -> AsyncIterator[RouterFleet]:
    """A router whose service has no instances, and has had none for long; one decode engine could be started."""
    async with fleet(0, 1, **({"hold_s": 120.0, "wakes": True, "model": "tiny"} | settings)) as f:
        f.context.watch.on_message(bye("d0"))
        await f.wait(lambda: f.context.roster.has_waited_for_agents(f.context.loop.time()),
                     "the time of agents that knew this router")
        f.context.hold._expected._went = dict.fromkeys(f.context.hold._expected._went, -1e9)
        yield f


def signed(body: bytes, *, instance: str = "r0", path: str = "/wake") -> dict[str, str]:
    return {signing.HEADER: signing.sign(SECRET, SignedCall("POST", path, instance, body))}


async def poll(f: RouterFleet, wanted: int = 0, headers: dict[str, str] | None = None, **more: Any) -> Answer:
    body = json.dumps({"wanted": wanted, **more}).encode()
    return await f.ask("/wake", method="POST", body=body, headers=signed(body) if headers is None else headers)


async def opened(f: RouterFleet, wanted: int = 0, **more: Any) -> asyncio.Task[Answer]:
    """A poll that is kept open."""
    before = len(f.router.wakes)
    task = asyncio.create_task(poll(f, wanted, **more))
    await f.wait(lambda: len(f.router.wakes) == before + 1, "the poll to be open")
    return task


async def held(f: RouterFleet, path: str = "/v1/completions", body: Any = None) -> asyncio.Task[Answer]:
    before = len(f.context.hold)
    task = asyncio.create_task(f.post(path, {"model": "tiny", "prompt": "x"} if body is None else body))
    await f.wait(lambda: len(f.context.hold) == before + 1 or task.done(), "it to be held")
    assert not task.done(), task.result()
    return task


async def test_a_held_request_answers_the_open_poll_at_once_and_is_served_by_who_is_started() -> None:
    async with asleep() as f:
        waits = await opened(f)
        began = f.context.loop.time()
        task = await held(f)
        answer = await waits
        assert f.context.loop.time() - began < waking.POLL_S / 2
        assert (answer.status, answer.json) == (200, {"router": "r0", "held": 1})
        parked = await opened(f, wanted=1)
        f.beat(f.d[0], interval_s=60.0)
        assert (await task).status == 200
        parked.cancel()
        await f.wait(lambda: not len(f.router.wakes), "a caller that goes to be forgotten")
        assert not f.context.hold.wakers


async def test_a_poll_that_comes_late_hears_of_who_waits_already() -> None:
    async with asleep() as f:
        tasks = [await held(f), await held(f, "/v1/chat/completions", CHAT)]
        assert (await poll(f)).json["held"] == 2
        assert (await poll(f)).json["held"] == 2, "a level, so that a lost answer loses nothing"
        for task in tasks:
            task.cancel()
        await f.wait(lambda: not f.context.hold.wakers, "them to leave")
        again = await opened(f)
        assert not again.done()
        again.cancel()


async def test_the_answer_is_signed_for_its_call() -> None:
    async with asleep() as f:
        task = await held(f)
        body = b'{"wanted": 0}'
        headers = signed(body)
        answer = await poll(f, headers=headers)
        said = answer.headers[signing.HEADER.lower()]
        assert signing.answers(SECRET, headers[signing.HEADER], said, answer.body)
        assert not signing.answers(SECRET, signed(body)[signing.HEADER], said, answer.body)
        task.cancel()


async def test_nobody_but_the_operator_may_ask_and_nothing_that_was_signed_for_another() -> None:
    async with asleep() as f:
        body = b'{"wanted": 0}'
        token = {"Authorization": f"Bearer {keys.admin_token(KEY)}"}
        for headers in ({}, token, signed(b'{"wanted": 1}'), signed(body, instance="r1"), signed(body, path="/fleet")):
            answer = await poll(f, headers=headers)
            assert answer.status == 401, headers
        once = signed(b"{}")
        bad = await f.ask("/wake", method="POST", body=b"{}", headers=once)
        assert (bad.status, bad.json["error"]["code"]) == (400, "bad_wake")
        assert (await f.ask("/wake", method="POST", body=b"{}", headers=once)).status == 401, "a call is good once"
        assert (await f.ask("/wake")).status == 405
        huge = b'{"wanted": 0, "waits": "' + b"x" * 5000 + b'"}'
        assert (await f.ask("/wake", method="POST", body=huge, headers=signed(huge))).status == 413
        assert not len(f.router.wakes)


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/embeddings", {"model": "tiny", "input": "x"}),
    ("/tokenize", {"model": "tiny", "prompt": "x"}),
    ("/v1/completions", {"model": "an-adapter", "prompt": "x"}),
    ("/v1/chat/completions", {"model": "tiny"}),
])
async def test_what_generates_nothing_here_starts_nothing_and_hears_why(path: str, body: dict[str, Any]) -> None:
    async with asleep() as f:
        waits = await opened(f)
        answer = await f.post(path, body)
        assert answer.status == 503
        assert answer.json["error"]["message"].startswith("no instance runs, and this request starts none")
        assert not waits.done()
        task = await held(f)
        also = await held(f, path, body)  # somebody comes now, so it waits as all do
        assert (await waits).json["held"] == 1
        task.cancel()
        also.cancel()


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/v1/completions", b"{", 400),
    ("/v1/chat/completions", {"model": "tiny", "messages": [], "kv_transfer_params": {"a": 1}}, 400),
    ("/load", {}, 404),
])
async def test_a_request_that_is_wrong_starts_nothing(path: str, body: Any, status: int) -> None:
    async with asleep() as f:
        idle = f.context.idle_s()
        answer = await f.post(path, body)
        assert answer.status == status
        assert not f.context.hold.wakers
        assert f.context.idle_s() > idle


async def test_without_its_key_nobody_starts_anything(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("right\n")
    async with asleep(api_key_file=str(file)) as f:
        body = {"model": "tiny", "prompt": "x"}
        assert (await f.post("/v1/completions", body)).status == 401
        assert (await f.post("/v1/completions", body, headers={"Authorization": "Bearer wrong"})).status == 401
        assert not f.context.hold.wakers
        task = asyncio.create_task(f.post("/v1/completions", body, headers={"Authorization": "Bearer right"}))
        await f.wait(lambda: f.context.hold.wakers == 1, "it to be held")
        task.cancel()


async def test_a_refusal_ends_the_hold_with_the_reason_and_is_over_when_it_is() -> None:
    async with asleep() as f:
        task = await held(f)
        told = asyncio.create_task(poll(f, 1, refused="exceeded quota: gpus, used 8, limited 8"))
        answer = await asyncio.wait_for(task, 30.0)
        assert answer.status == 503
        assert answer.json["error"]["message"] == "no instance can be started: exceeded quota: gpus, used 8, limited 8"
        assert int(answer.headers["retry-after"]) >= 1
        at_once = await asyncio.wait_for(f.complete(), 30.0)
        assert at_once.json["error"]["message"] == answer.json["error"]["message"]
        assert (await f.get("/ready")).status == 200, "somebody must say so"
        told.cancel()
        await f.wait(lambda: not len(f.router.wakes), "its caller to be gone")
        waits = await opened(f)
        task = await held(f)
        assert (await waits).json["held"] == 1
        task.cancel()


async def test_a_refusal_that_nobody_repeats_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asleep() as f:
        told = await opened(f, 1, refused="no")
        assert (await f.complete()).status == 503
        monkeypatch.setattr(standby, "FRESH_S", 0.3)
        await asyncio.sleep(0.35)
        task = await held(f)
        task.cancel()
        told.cancel()


async def test_who_waited_in_vain_hears_what_was_waited_for() -> None:
    async with asleep(hold_s=0.4) as f:
        assert (await f.complete()).json["error"]["message"] == (
            "no instance was ready within 0.4 s: no instance runs, and no operator asks this router whether one is needed")
        told = await opened(f, 1, waits="qwen-e0 waits for a node")
        answer = await f.complete()
        assert answer.json["error"]["message"] == (
            "no instance was ready within 0.4 s: the instance that was started waits: qwen-e0 waits for a node")
        assert int(answer.headers["retry-after"]) == expected.UNSEEN_S
        told.cancel()


async def test_a_router_without_instances_is_ready_and_tells_for_how_long_it_is_idle() -> None:
    async with asleep() as f:
        token = {"Authorization": f"Bearer {keys.admin_token(KEY)}"}

        async def idle() -> float:
            return float((await f.ask("/fleet", headers=token)).json["idle_s"])

        assert (await f.get("/ready")).status == 200
        await asyncio.sleep(0.2)
        assert await idle() >= 0.2
        task = await held(f)
        assert await idle() == 0.0
        used = f.context.loop.time()
        f.beat(f.d[0], interval_s=60.0)
        assert (await task).status == 200
        await f.wait_quiet()
        await asyncio.sleep(0.2)
        before = await idle()
        assert 0.2 <= before <= f.context.loop.time() - used
        await f.get("/version")
        assert await idle() > before, "who only looks keeps nothing"
        assert f.context.generating == 0


async def test_a_poll_ends_in_time_and_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "POLLS_MAX", 2)
    async with asleep() as f:
        f.router.wakes._poll_s = 0.5
        assert (await poll(f)).json["held"] == 0
        f.router.wakes._poll_s = 60.0
        polls = [await opened(f), await opened(f)]
        third = asyncio.create_task(poll(f))
        assert (await asyncio.wait_for(polls[0], 30.0)).json["held"] == 0
        assert not polls[1].done()
        assert len(f.router.wakes) == 2
        f.router.wakes.close()
        assert [(await task).status for task in (polls[1], third)] == [200, 200]


@pytest.mark.parametrize(("path", "body"), [
    ("/invocations", {}),
    ("/v1/responses", {"model": "tiny"}),
    ("/v1/messages", {"model": "tiny", "system": "x", "messages": []}),
    ("/v1/chat/completions", {"model": "tiny", "messages": 5}),
    ("/v1/completions", {"model": "tiny", "prompt": ""}),
])
async def test_a_request_that_asks_nothing_starts_nothing(path: str, body: dict[str, Any]) -> None:
    async with asleep() as f:
        answer = await f.post(path, body)
        assert (answer.status, answer.json["error"]["message"][:20]) == (503, "no instance runs, an")
        assert not f.context.hold.wakers


async def test_when_those_who_would_start_somebody_have_left_nobody_else_waits_for_it() -> None:
    async with asleep() as f:
        task = await held(f)
        other = await held(f, "/v1/embeddings", {"model": "tiny", "input": "x"})
        task.cancel()
        answer = await asyncio.wait_for(other, 60.0)
        assert answer.status == 503
        assert answer.json["error"]["message"].startswith("no instance runs, and this request starts none")


async def test_one_who_waited_in_vain_was_there_until_it_left() -> None:
    async with asleep(hold_s=2.0) as f:
        task, last = await held(f), f.context.loop.time()
        while f.context.hold.wakers:
            last = f.context.loop.time()
            await asyncio.sleep(0.005)
        assert (await task).status == 503
        assert f.context.idle_s() <= f.context.loop.time() - last


async def test_a_router_that_may_not_be_empty_holds_nobody_for_who_is_not_there() -> None:
    async with asleep(wakes=False) as f:
        answer = await asyncio.wait_for(f.complete(), 60.0)
        assert (answer.status, answer.json["error"]["message"]) == (503, "no decode instance is known")
        assert (await f.get("/ready")).status == 503


async def test_a_thousand_requests_in_a_second_are_one_wake_and_all_are_answered() -> None:
    async with asleep() as f:
        wakes, wanted = 0, 0

        async def operator() -> None:
            nonlocal wakes, wanted
            while True:
                answer = await poll(f, wanted)
                if answer.json["held"] and not wanted:
                    wakes, wanted = wakes + 1, 1

        async def one() -> int:
            reader, writer = await f.connect()
            writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1}))
            answer = await read_answer(reader, 100.0)
            writer.transport.abort()
            return answer.status

        asks = asyncio.create_task(operator())
        tasks = [asyncio.create_task(one()) for _ in range(1000)]
        await f.wait(lambda: len(f.context.hold) == 1000, "all of them to be held", 100.0)
        await f.wait(lambda: wanted == 1, "the wake")
        f.beat(f.d[0], interval_s=60.0)
        assert [await task for task in tasks] == [200] * 1000
        assert wakes == 1
        assert not f.context.hold.bytes
        asks.cancel()
        await asyncio.gather(asks, return_exceptions=True)


async def test_rounds_from_zero_and_back_leave_nothing_and_lose_nobody() -> None:
    async with asleep() as f:
        for number in range(200):
            task = await held(f)
            life = Incarnation(f"life-{number}")
            f.beat(f.d[0], interval_s=60.0, incarnation=life)
            assert (await task).status == 200
            f.beat(f.d[0], interval_s=60.0, incarnation=life, state=State.DRAINING, seq=2)
            last = await held(f)  # it came as the last instance went
            f.context.watch.on_message(bye("d0", incarnation=life))
            again = Incarnation(f"again-{number}")
            f.beat(f.d[0], interval_s=60.0, incarnation=again)
            assert (await last).status == 200
            await f.wait(lambda: not f.context.servings, "the end of what is served")
            f.context.watch.on_message(bye("d0", incarnation=again))
        hold = f.context.hold
        assert (len(hold), hold.bytes, hold.wakers, f.context.generating, len(f.router.wakes)) == (0, 0, 0, 0, 0)
        assert not f.context.roster.members()
