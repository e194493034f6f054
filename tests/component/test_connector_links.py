"""Engines of one host move KV through memory without being told to (transport auto); tcp is held by ``test_connector``."""

from __future__ import annotations

import random
import time

import pytest
from cluster import Cluster
from engines import complete, get
from prometheus_client.parser import text_string_to_metric_families

from xpyd_sidecar.contract import metrics

pytestmark = pytest.mark.engines
SIDES = {metrics.TRANSFERS, metrics.LINK_BYTES}
"""They have labels of their own, so an engine has them only on the side that it has been on."""


def lanes(prefill: str, decode: str) -> list[tuple[str, str]]:
    """What a whole trace has, by row and name."""
    return [(prefill, name) for name in ("ANNOUNCE", "ASK heard", "push", "prefill forward", "ended")] + [
        (decode, name) for name in ("ANNOUNCE heard", "ASK", "came", "committed", "first decode forward")] + [
        ("router", "decode's first event")]


@pytest.mark.parametrize("tokens", [130, 900])
def test_blocks_come_from_prefills_memory_and_the_answer_is_the_same(cluster: Cluster, tokens: int) -> None:
    [prefill], [decode] = cluster.prefill, cluster.decode

    def moved(link: str) -> float:
        return decode.engine.metric(f"{metrics.LINK_BYTES}_total", link=link)

    def loaded() -> float:
        return decode.engine.metric(f"{metrics.LOADED_BYTES}_total")

    prompt = [3 + (n * 7 + tokens) % 200 for n in range(tokens)]
    before, tcp, known = moved("shm"), moved("tcp"), loaded()
    answer = complete(cluster.url, prompt, 8)["token_ids"]
    assert answer == prefill.engine.complete(prompt, 8)["token_ids"]
    end = time.monotonic() + 60
    while moved("shm") == before or moved("shm") - before != loaded() - known:
        assert time.monotonic() < end, (moved("shm"), before, loaded(), known)
        time.sleep(0.1)
    assert moved("tcp") == tcp
    while prefill.engine.metric(f"{metrics.PUSH_SECONDS}_total") == 0:  # it counts once it has heard that all came
        assert time.monotonic() < end, "prefill has pushed nothing"
        time.sleep(0.1)
    for engine in (prefill.engine, decode.engine):
        known = {family.name for family in text_string_to_metric_families(get(f"{engine.url}/metrics"))}
        assert {name for name in vars(metrics).values() if str(name).startswith("xpyd_kv_")} - known <= SIDES
    assert decode.engine.metric(f"{metrics.TRANSFERS}_total", side="receive", outcome="ok") >= 1
    assert decode.engine.metric(f"{metrics.WAIT_SECONDS}_total") > 0


def test_a_transfer_is_traced_over_router_prefill_and_decode(cluster: Cluster) -> None:
    [prefill], [decode] = cluster.prefill, cluster.decode
    draw = random.Random("trace")
    prompt = [draw.randrange(5, 250) for _ in range(700)]  # two chunks, in nobody's cache
    before = decode.engine.metric(f"{metrics.LOADED_BYTES}_total")
    complete(cluster.url, prompt, 4)
    end = time.monotonic() + 60
    while True:
        # A request is told of when both legs are over; prefill's answer may come after decode's, which the client has.
        lines = [one for one in cluster.traces("last 1").found if one.prompt_tokens == len(prompt)]
        at = {name: [event for one in lines for event in one.events if (event.row, event.name) == (row, name)]
              for row, name in lanes(prefill.name, decode.name)}
        if all(at.values()):
            break
        assert time.monotonic() < end, [name for name, events in at.items() if not events]
        time.sleep(0.1)
    [line] = lines
    begun = {name: events[0].at for name, events in at.items()}
    assert begun["ANNOUNCE"] <= begun["ANNOUNCE heard"] <= begun["ASK"] <= begun["ASK heard"] <= begun["push"]
    assert begun["push"] <= begun["committed"] <= begun["first decode forward"] <= begun["decode's first event"]
    assert begun["decode's first event"] <= line.total_s
    assert sum(event.size for event in at["push"]) == sum(event.size for event in at["came"])
    came = sum(event.size for event in at["came"])
    while came != (known := decode.engine.metric(f"{metrics.LOADED_BYTES}_total") - before):
        assert time.monotonic() < end, (came, known)
        time.sleep(0.1)
    assert [event.size for event in at["prefill forward"]] == [512, 188]
    assert at["ended"][0].note == "ok"
    assert cluster.traces(f"id {line.transfer}").found[0].transfer == line.transfer
