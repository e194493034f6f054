"""What users of other routers have reported, each by its symptom: none of it happens here.

Discovery's own symptoms are in the tests of membership; those of the KV transfer in the tests of ``kv``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from beats import Beater, beat
from router_fleet import KEY, RouterFleet, fleet, request_bytes
from scripted_engine import Play, ScriptedEngine, Seen, wait_for_kv

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.membership import Load

LOOPS = ("uvloop",)
FULL = "t0 t1 t2 "
AT_ONCE_S = 20.0
"""What follows from a failure must follow within this time, however busy the machine is."""


def transfers(engine: ScriptedEngine) -> list[str]:
    return [seen.body["kv_transfer_params"]["transfer"] for seen in engine.seen]


async def within(seconds: float, answer: Any) -> Any:
    async with asyncio.timeout(seconds):
        return await answer


async def abort_once(f: RouterFleet, condition: Any, what: str, **fields: Any) -> float:
    """Send a completion, close the connection as soon as ``condition`` holds; when that was."""
    _, writer = await f.connect()
    writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 8, **fields}))
    await f.wait(condition, what)
    writer.transport.abort()
    return asyncio.get_running_loop().time()


# ---- the demo proxy


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engines_error_is_not_an_empty_200(status: int, stream: bool) -> None:
    async with fleet() as f:
        for engine in (*f.p, *f.d):
            engine.default = Play(status=status)
        answer = await f.complete(stream=stream)
        assert answer.status == status
        assert answer.json["error"]["message"].endswith(f"says {status}")
        await f.wait_quiet()


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded"])
async def test_two_by_two_does_not_use_two_of_its_four_pairs_only(policy: str) -> None:
    async with fleet(2, 2, policy=policy) as f:
        for _ in range(64):
            assert (await f.complete()).status == 200
        await f.wait_quiet()
        pairs = Counter((engine.name, seen.body["kv_transfer_params"]["peer"]["instance"])
                        for engine in f.p for seen in engine.seen)
        assert len(pairs) == 4
        assert min(pairs.values()) >= (16 if policy == "round_robin" else 4)


async def test_no_instance_alive_is_no_division_by_zero() -> None:
    async with fleet(0, 0) as f:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": []})):
            answer = await within(AT_ONCE_S, f.post(path, body))
            assert (answer.status, answer.json["error"]["message"]) == (503, "no decode instance is known")
            assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_tokens": 1}, {"max_completion_tokens": 5},
                                    {"max_completion_tokens": None}])
async def test_a_request_without_max_tokens_does_not_fail(fields: dict[str, Any]) -> None:
    async with fleet() as f:
        answer = await f.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields})
        assert answer.status == 200
        await f.wait_quiet()
        prefill, decode = f.p[0].seen[0].body, f.d[0].seen[0].body
        assert prefill["max_tokens"] == 1
        assert prefill.get("max_completion_tokens", 1) == 1
        assert {name: decode[name] for name in fields} == fields
        assert ("max_tokens" in decode) == ("max_tokens" in fields)


# ---- one leg fails, the other waits


@pytest.mark.parametrize("play", [Play(status=500), Play(die_at="request"), Play(garbage=b"?\r\n\r\n"),
                                  Play(abort_after=0)])
@pytest.mark.parametrize("stream", [True, False])
async def test_prefill_fails_and_decode_is_not_pinned(play: Play, stream: bool) -> None:
    async with fleet(1, 1) as f:
        f.p[0].default = replace(play, hold=wait_for_kv(f.d[0]))
        answer = await within(AT_ONCE_S, f.complete(stream=stream))
        assert answer.status == 200
        assert (answer.text if stream else answer.json["choices"][0]["text"]) == FULL
        await f.wait_quiet()
        assert f.d[0].aborts == 1, "the waiting leg is let go"
        assert "kv_transfer_params" not in f.d[0].seen[1].body


async def test_prefill_that_never_answers_does_not_hold_decode_longer_than_the_two_bounds() -> None:
    async with fleet(1, 1, pair_timeout_s=1.0, load_limit_s=0.5) as f:  # time enough for both legs to arrive
        f.p[0].default = Play(hold=asyncio.Event())
        f.d[0].plays.append(Play(hold=asyncio.Event()))
        answer = await within(AT_ONCE_S, f.complete(stream=True))
        assert answer.text == FULL
        await f.wait_quiet()
        assert (f.p[0].aborts, f.d[0].aborts) == (1, 1)


@pytest.mark.parametrize("how", ["refused", "broken", "400"])
async def test_decode_cannot_be_reached_and_prefill_does_not_hang(how: str) -> None:
    async with fleet(1, 1) as f:
        f.p[0].default = Play(hold=asyncio.Event())
        if how == "refused":
            await f.d[0].stop()
        else:
            f.d[0].default = Play(die_at="request") if how == "broken" else Play(status=400)
        answer = await within(AT_ONCE_S, f.complete(stream=True))
        assert answer.status == {"refused": 503, "broken": 502, "400": 400}[how]
        await f.wait_quiet()
        assert all(seen.aborted for seen in f.p[0].seen)
        assert len(f.p[0].seen) <= 1, "its leg may be taken back before it arrives"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_between_prefills_end_and_decodes_start_strands_nothing(stream: bool) -> None:
    async with fleet() as f:
        f.d[0].default = Play(hold=asyncio.Event())
        left = await abort_once(f, lambda: any(seen.finished for seen in f.p[0].seen) and bool(f.d[0].seen),
                                "prefill's end", stream=stream)
        await f.wait_quiet()
        [seen] = f.d[0].seen
        assert seen.aborted
        assert seen.gone_at - left < AT_ONCE_S


# ---- KV of another request


async def test_the_same_request_id_twice_never_shares_a_transfer() -> None:
    async with fleet() as f:
        for i in range(8):
            answer = await f.post("/v1/completions", {"prompt": f"prompt {i}"}, headers={"X-Request-Id": "same"})
            assert answer.status == 200
            await f.wait_quiet()
        asked = transfers(f.d[0])
        assert len(set(asked)) == 8
        assert transfers(f.p[0]) == asked
        assert [seen.body["prompt"] for seen in f.p[0].seen] == [seen.body["prompt"] for seen in f.d[0].seen]


async def test_a_leg_that_is_sent_later_says_less_time_and_a_higher_attempt_so_stale_kv_is_known() -> None:
    async with fleet(2, 1, pair_timeout_s=300.0) as f:
        for engine in f.p:
            engine.plays.append(Play(before=0.3, status=500))
        f.d[0].plays.append(Play(hold=asyncio.Event()))
        assert (await f.complete(stream=True)).text == FULL
        legs = [seen.body["kv_transfer_params"]
                for seen in sorted((s for e in f.p for s in e.seen), key=_at)]
        assert [leg["attempt"] for leg in legs] == [1, 2]
        assert legs[0]["remaining_s"] == 300.0
        assert 200.0 < legs[1]["remaining_s"] <= 299.75


def _at(seen: Seen) -> float:
    return seen.at


async def test_prompts_of_a_list_do_not_share_what_prefill_computed() -> None:
    async with fleet() as f:
        for prompt in (["one", "two"], [[5, 6], [7]]):
            assert (await f.complete(prompt=prompt)).status == 200
        assert not f.p[0].seen
        assert all("kv_transfer_params" not in seen.body for seen in f.d[0].seen)


# ---- time


async def test_the_handover_adds_no_wait_both_legs_are_sent_at_once() -> None:
    async with fleet() as f:
        held = asyncio.Event()
        f.p[0].default = f.d[0].default = Play(hold=held)
        task = asyncio.create_task(f.complete(stream=True))
        await f.wait(lambda: bool(f.p[0].seen and f.d[0].seen), "both legs")
        [serving] = f.context.servings
        one, other = (leg.opened for leg in serving.record.legs)
        assert abs(one - other) < AT_ONCE_S
        held.set()
        assert (await task).text == FULL


async def test_the_first_token_does_not_wait_for_the_end_of_prefills_answer() -> None:
    async with fleet() as f:
        held = asyncio.Event()
        f.p[0].default = Play(hold=held)  # decode has its KV long before prefill's HTTP answer
        answer = await within(AT_ONCE_S, f.complete(stream=True))
        assert answer.text == FULL
        held.set()
        await f.wait_quiet()


async def test_instances_that_were_discovered_stream_event_by_event() -> None:
    engines = [await ScriptedEngine(name).start() for name in ("p0", "d0")]
    async with fleet(0, 0) as f:
        agent = Beater(f.router.members_port, KEY)
        try:
            for engine, role in zip(engines, (Role.PREFILL, Role.DECODE), strict=True):
                await agent.say(beat(engine.name, role, engine.address))
            held = asyncio.Event()
            engines[1].default = Play(hold_after=(1, held))
            reader, writer = await f.connect()
            writer.write(request_bytes("/v1/completions", {"prompt": "x", "stream": True}))
            first = await within(AT_ONCE_S, reader.readuntil(b"\n\n"))
            assert b'"text":"t0 "' in first
            assert not held.is_set()
            held.set()
            rest = await within(AT_ONCE_S, reader.readuntil(b"[DONE]\n\n"))
            assert b'"text":"t1 "' in rest
            writer.transport.abort()
        finally:
            agent.close()
            for engine in engines:
                await engine.stop()


# ---- load


async def test_stale_load_makes_no_herd() -> None:
    async with fleet(1, 4, policy="least_loaded") as f:
        for i, engine in enumerate(f.d):  # the last beats say that d0 is idle; the next ones are a minute away
            f.beat(engine, load=Load(running=6 if i else 0), interval_s=60.0)
        held = asyncio.Event()
        for engine in f.d:
            engine.default = Play(hold=held)
        tasks = [asyncio.create_task(f.complete()) for _ in range(40)]
        await f.wait(lambda: sum(len(engine.seen) for engine in f.d) == 40, "all requests", 30.0)
        counts = [len(engine.seen) for engine in f.d]
        assert max(counts) <= 20, counts
        assert min(counts) >= 4, counts
        held.set()
        assert {(await task).status for task in tasks} == {200}


async def test_health_checks_and_beats_do_not_zero_the_load_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(1, 1) as f:
        held = asyncio.Event()
        f.d[0].default = Play(hold=held)
        tasks = [asyncio.create_task(f.complete(stream=True)) for _ in range(5)]
        await f.wait(lambda: len(f.d[0].seen) == 5, "all requests", 30.0)
        [member] = [m for m in f.context.roster.members() if m.name == "d0"]
        for _ in range(3):
            f.beat(f.d[0], load=Load(), interval_s=60.0)
        monkeypatch.setattr("xpyd_sidecar.router.serving.waiting.STALL_S", 0.0)
        await f.wait(lambda: member.probe_at > 0 and not member.probing, "a health check")
        assert member.in_flight == 5
        held.set()
        assert [(await task).text for task in tasks] == [FULL] * 5
        await f.wait_quiet()
        assert member.in_flight == 0


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_prefills_that_say_no_under_load_are_not_all_shut_out(status: int) -> None:
    async with fleet(3, 1) as f:
        for engine in f.p:
            engine.plays.extend(Play(status=status) for _ in range(20))
        answers = await asyncio.gather(*(f.complete(stream=True) for _ in range(20)))
        assert [answer.text for answer in answers] == [FULL] * 20
        await f.wait_quiet()
        for engine in f.p:
            engine.plays.clear()
            engine.seen.clear()
        for _ in range(6):
            assert (await f.complete()).status == 200
        await f.wait_quiet()
        assert [len(engine.seen) for engine in f.p] == [2, 2, 2], "the load is over: all take work again, at once"
