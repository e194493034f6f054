"""Agents beside real engines: drains that lose nothing; killed routers, agents and engines."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from cluster import DRAIN_S, HEARTBEAT_S, Cluster, Instance
from corpus import mixed
from engines import HttpError, complete
from traffic import Steady, plain_answers

from xpyd_sidecar.agent.ask import ask
from xpyd_sidecar.contract.ids import State

pytestmark = pytest.mark.engines
PROMPT = random.Random("agent").choices(range(3, 500), k=300)
LONG = 1600
"""Tokens that take decode some seconds."""


def drain(pool: ThreadPoolExecutor, instance: Instance) -> Future[tuple[int, dict[str, Any]]]:
    return pool.submit(ask, instance.engine.run_dir, "POST", "/drain?wait=1", 2 * DRAIN_S)


def status(instance: Instance) -> dict[str, Any]:
    return ask(instance.engine.run_dir, "GET", "/status")[1]


def wait_state(cluster: Cluster, instance: Instance, state: State, deadline_s: float = 60.0) -> None:
    cluster.wait_fleet(lambda fleet: {one.instance: one.state for one in fleet.instances}.get(instance.name) is state,
                       deadline_s, f"seeing {instance.name} {state}")


def asked_until_refused(url: str) -> list[tuple[float, list[int]]]:
    """One long request after the other, until one is refused: when each ended, and its tokens."""
    found: list[tuple[float, list[int]]] = []
    while True:
        try:
            answer = complete(url, PROMPT, LONG)
        except HttpError as refused:
            if refused.status != 503:
                raise
            return found
        found.append((time.monotonic(), answer["token_ids"]))


@pytest.mark.smoke
def test_a_drain_of_decode_waits_for_what_runs_and_refuses_what_is_new(cluster: Cluster) -> None:
    [decode] = cluster.decode
    plain = complete(cluster.plain_url, PROMPT, LONG)["token_ids"]
    ended: dict[str, float] = {}
    with ThreadPoolExecutor(2) as pool:
        answers = pool.submit(asked_until_refused, cluster.url)
        cluster.wait_fleet(lambda fleet: any(one.in_flight for one in fleet.instances if one.instance == decode.name), 60,
                           "serving")
        began = time.monotonic()
        drained = drain(pool, decode)
        drained.add_done_callback(lambda _: ended.setdefault("drain", time.monotonic()))
        wait_state(cluster, decode, State.DRAINING)
        with pytest.raises(HttpError) as refused:
            complete(cluster.url, PROMPT, 2)
        assert refused.value.status == 503
        assert drained.result(240) == (200, {"drained": True, "reason": "nothing runs, waits or moves"})
        decode.engine.group.signal_all(signal.SIGSTOP)
        try:
            found = answers.result(60)  # nothing of it is still to be computed
        finally:
            decode.engine.group.signal_all(signal.SIGCONT)
    assert [tokens for _, tokens in found] == [plain] * len(found)
    last, _ = found[-1]
    assert began < last
    assert ended["drain"] < last + 0.8 * DRAIN_S, "and not when it may take no longer"
    cluster.wait_fleet(lambda fleet: all(one.drained for one in fleet.instances if one.instance == decode.name), 60, "told")
    assert decode.undrain()
    wait_state(cluster, decode, State.READY)
    assert complete(cluster.url, PROMPT, 8)["token_ids"] == plain[:8]


def test_without_prefill_decode_does_it_all_and_equals_the_plain_answer(cluster: Cluster) -> None:
    [prefill], [decode] = cluster.prefill, cluster.decode
    prompt = PROMPT[::-1]
    with ThreadPoolExecutor(1) as pool:
        assert drain(pool, prefill).result(240)[1]["drained"]

    def computed() -> float:
        return decode.engine.metric("vllm:iteration_tokens_total_sum")

    before = computed()
    answer = complete(cluster.url, prompt, 8)["token_ids"]
    assert answer == complete(cluster.plain_url, prompt, 8)["token_ids"]
    decode.engine.group.wait_until(lambda: computed() - before >= len(prompt) + 8, 60.0, "through with its last step")
    assert computed() - before == len(prompt) + 8


def test_a_killed_router_comes_back_and_knows_everybody(cluster: Cluster) -> None:
    plain = complete(cluster.plain_url, PROMPT, 8)["token_ids"]
    assert cluster.router is not None
    cluster.router.kill()
    gone = time.monotonic()
    cluster.start_router()
    cluster.wait_ready()
    assert complete(cluster.url, PROMPT, 8)["token_ids"] == plain

    def answered() -> bool:
        [known] = [one for one in status(cluster.decode[0])["routers"] if one["address"] == cluster.members_address]
        return bool(known["ack_age_s"] < time.monotonic() - gone)

    assert cluster.decode[0].agent is not None
    cluster.decode[0].agent.wait_until(answered, 60.0, "answered by the new router")


def test_a_killed_agent_takes_no_engine_out_of_service(cluster: Cluster) -> None:
    plain = complete(cluster.plain_url, PROMPT, 8)["token_ids"]
    [decode] = cluster.decode
    assert decode.agent is not None
    decode.agent.kill()
    end = time.monotonic() + 6 * HEARTBEAT_S
    while time.monotonic() < end:
        assert complete(cluster.url, PROMPT, 8)["token_ids"] == plain
    decode.start_agent()
    wait_state(cluster, decode, State.READY)
    assert complete(cluster.url, PROMPT, 8)["token_ids"] == plain


def test_an_agent_that_is_stopped_says_goodbye(cluster: Cluster) -> None:
    [prefill] = cluster.prefill
    assert prefill.agent is not None
    assert prefill.agent.stop(120.0) == 0
    names = [cluster.decode[0].name]
    cluster.wait_fleet(lambda fleet: [one.instance for one in fleet.instances] == names, 60.0, "told of the goodbye")


@pytest.mark.smoke
async def test_a_drained_engine_is_killed_under_load_and_nobody_notices(cluster: Cluster) -> None:
    """Drain, kill -9, start again: no request fails, and the new incarnation is used."""
    [prefill] = cluster.prefill
    cases = mixed(24)
    references = await plain_answers(cluster.plain_url, cases)
    before = status(prefill)["incarnation"]
    with ThreadPoolExecutor(1) as pool:
        async with Steady(cluster.url, cases, references) as steady:
            await steady.wait_total(1)
            assert (await asyncio.wrap_future(drain(pool, prefill)))[1]["drained"]
            prefill.engine.kill()
            await asyncio.sleep(2)
            assert prefill.undrain()
            await asyncio.to_thread(wait_state, cluster, prefill, State.STARTING)
            await asyncio.sleep(2)
            await steady.wait_total(5)
        prefill.engine.start()
        await asyncio.to_thread(cluster.wait_ready)
        assert status(prefill)["incarnation"] != before
        pushed = prefill.engine.metric("xpyd_kv_pushed_tokens_total")
        async with Steady(cluster.url, cases, references) as again:
            await again.wait_total(5)
    for report in (steady.report, again.report):
        assert report.total > 4
        report.check()
    # Decode has answered before prefill has heard that what it pushed came, and counts it.
    prefill.engine.group.wait_until(lambda: prefill.engine.metric("xpyd_kv_pushed_tokens_total") > pushed, 120.0, "pushing")
