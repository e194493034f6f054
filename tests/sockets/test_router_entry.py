"""What a router reads of a request at the door: prompts that skip prefill, sessions, over real sockets."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from router_fleet import RouterFleet, fleet

KV = "kv_transfer_params"


def skipped(f: RouterFleet) -> list[bool]:
    """For each request that decode got, whether it prefills too."""
    return ["role" not in seen.body.get(KV, {}) for engine in f.d for seen in engine.seen]


@pytest.mark.parametrize(("prompt", "skips"), [
    ([1] * 49, True),
    ([1] * 50, False),
    ("x" * 190, True),
    ("x" * 210, False),
])
async def test_short_prompts_go_to_decode_alone(prompt: Any, skips: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xpyd_sidecar.access")
    async with fleet(1, 1, skip_prefill_below=50) as f:
        assert (await f.complete(prompt=prompt)).status == 200
        await f.wait_quiet()
        assert skipped(f) == [skips]
        assert len(f.p[0].seen) == (not skips)
    assert [record.__dict__["skips"] for record in caplog.records if record.name == "xpyd_sidecar.access"] == [
        "short" if skips else ""]


async def test_short_chats_too() -> None:
    async with fleet(1, 1, skip_prefill_below=50) as f:
        answer = await f.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert answer.status == 200
        assert skipped(f) == [True]


async def test_short_prompts_are_served_though_requests_without_prefill_are_rejected() -> None:
    async with fleet(0, 1, skip_prefill_below=50, on_no_prefill="reject") as f:
        assert (await f.complete(prompt="x")).status == 200
        assert (await f.complete(prompt="x" * 1000)).status == 503


async def test_what_decode_holds_goes_to_the_same_one_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xpyd_sidecar.access")
    async with fleet(1, 3, skip_prefill_rest=200) as f:
        text = "a prompt that is long enough to have keys " * 40
        for turn in ("", "more", "and more"):
            assert (await f.complete(prompt=text + turn)).status == 200
            await f.wait_quiet()
        assert sorted(len(engine.seen) for engine in f.d) == [0, 0, 3]
        assert skipped(f) == [False, True, True]
        members = f.context.roster.members()
        assert {(m.queued_tokens, m.uncached_tokens) for m in members} == {(0, 0)}, "what has ended waits no more"
        text = f.context.observer.metrics.text().decode()
        assert "xpyd_router_skipped_rest_tokens_count 2.0" in text
    lines = [record.__dict__ for record in caplog.records if record.name == "xpyd_sidecar.access"]
    assert [line["skips"] for line in lines] == ["", "cached", "cached"]


NAMES = ({"session_id": "NAME"}, {"prompt_cache_key": "NAME"}, {"metadata": {"user_id": "NAME"}}, {"user": "NAME"}, {})


@pytest.mark.parametrize("named", NAMES, ids=["session_id", "prompt_cache_key", "user_id", "user", "header"])
async def test_a_session_stays_with_its_instances(named: dict[str, Any]) -> None:
    async with fleet(3, 3, policy="cost") as f:
        homes = set()
        for number in range(12):
            before = [len(engine.seen) for engine in (*f.p, *f.d)]
            for turn in range(3):
                fields = json.loads(json.dumps(named).replace("NAME", f"s{number}"))
                headers = {} if named else {"X-Session-Id": f"s{number}"}
                answer = await f.post("/v1/completions", {"prompt": f"{number} {turn}", **fields}, headers=headers)
                assert answer.status == 200
                await f.wait_quiet()
            got = [len(engine.seen) - was for engine, was in zip((*f.p, *f.d), before, strict=True)]
            assert sorted(got) == [0, 0, 0, 0, 3, 3]
            homes.add(tuple(got))
        assert len(homes) > 3, "and sessions are spread"


async def test_what_prefill_says_that_it_had_stands_beside_what_was_believed() -> None:
    async with fleet(1, 1, policy="cost") as f:
        text = "a prompt of some length " * 200
        for cached in (None, 40, 1100):
            f.p[0].cached = cached
            assert (await f.complete(prompt=text)).status == 200
            await f.wait_quiet()
        metrics = f.context.observer.metrics.text().decode()
    assert "xpyd_router_prefix_actual_tokens_total 1140.0" in metrics
    predicted = re.search(r"xpyd_router_prefix_predicted_tokens_total ([0-9.]+)", metrics)
    assert predicted is not None
    assert float(predicted[1]) == 2, "nothing of the first one; of two others the token that the engine says that they have"
