"""Engines of one host move KV through memory without being told to (transport auto); tcp is held by ``test_connector``."""

from __future__ import annotations

import time

import pytest
from cluster import Cluster
from engines import complete

from xpyd_sidecar.contract import metrics


@pytest.mark.parametrize("tokens", [130, 900])
def test_blocks_come_from_prefills_memory_and_the_answer_is_the_same(cluster: Cluster, tokens: int) -> None:
    [prefill], [decode] = cluster.prefill, cluster.decode
    links = {"link": ("process_vm", "arena"), "tcp": ("tcp",)}

    def moved(which: str) -> float:
        return sum(decode.engine.metric(f"{metrics.LINK_BYTES}_total", link=name) for name in links[which])

    def loaded() -> float:
        return decode.engine.metric(f"{metrics.LOADED_BYTES}_total")

    prompt = [3 + (n * 7 + tokens) % 200 for n in range(tokens)]
    before, tcp, known = moved("link"), moved("tcp"), loaded()
    answer = complete(cluster.url, prompt, 8)["token_ids"]
    assert answer == prefill.engine.complete(prompt, 8)["token_ids"]
    end = time.monotonic() + 20
    while moved("link") == before or moved("link") - before != loaded() - known:
        assert time.monotonic() < end, (moved("link"), before, loaded(), known)
        time.sleep(0.1)
    assert moved("tcp") == tcp
