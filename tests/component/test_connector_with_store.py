"""Two real engines whose connector is vLLM's MultiConnector, with ours and a store of host memory in it, on both roles.

Outputs are compared with what prefill computes alone (a ``cache_salt`` keeps caches and stores out of it). What the caches
of the engines have is forgotten between two rounds, so that the store is asked.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from itertools import count

import pytest
from engine_pair import OUTPUT, SOON_S, Pair, started, tokens
from engines import Engine

from xpyd_sidecar.contract import metrics

pytestmark = pytest.mark.engines
BLOCK = 128
LENGTHS = (1, 127, 128, 129, 256, 257, 400, 1025)
SALTS = count()
STORE = {"kv_connector": "HostStore", "kv_connector_module_path": "host_store", "kv_role": "kv_both"}


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "late"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    store = STORE | {"kv_connector_extra_config": {"late": request.param}}
    yield from started(Pair(tmp_path_factory.mktemp("stored"), policy="recompute", beside=(store,),
                            env={"VLLM_SERVER_DEV_MODE": "1"}, claim_s=SOON_S))


@pytest.fixture
def pair(stored: Pair) -> Iterator[Pair]:
    yield stored
    stored.wait_empty()


def alone(pair: Pair, prompt: list[int]) -> list[int]:
    """What one engine answers that computes all of it."""
    found: list[int] = pair.p.complete(prompt, OUTPUT, cache_salt=f"alone-{next(SALTS)}")["token_ids"]
    return found


def forget(*engines: Engine) -> None:
    """Empty the caches of prefixes; stores keep what they have."""
    for engine in engines:
        with urllib.request.urlopen(urllib.request.Request(f"{engine.url}/reset_prefix_cache", method="POST"), timeout=30):
            pass


def whole(length: int) -> int:
    """Tokens of the blocks that a store can serve: the last token is always computed."""
    return (length - 1) // BLOCK * BLOCK


def test_prefill_takes_prefixes_from_the_store_and_decode_gets_all_of_them(pair: Pair) -> None:
    prompts = [tokens(length) for length in LENGTHS]
    expected = [alone(pair, prompt) for prompt in prompts]
    assert [pair.both(prompt) for prompt in prompts] == expected
    pair.wait_empty()
    forget(pair.p, pair.d)
    hits, computed = pair.p.metric("vllm:external_prefix_cache_hits_total"), pair.computed()
    pushed = pair.p.metric(metrics.PUSHED_TOKENS + "_total")
    assert [pair.both(prompt) for prompt in prompts] == expected
    pair.wait_empty()
    assert pair.p.metric("vllm:external_prefix_cache_hits_total") - hits == sum(map(whole, LENGTHS))
    assert pair.p.metric(metrics.PUSHED_TOKENS + "_total") - pushed == sum(LENGTHS) - len(LENGTHS), \
        "of each prompt all but the last token is handed over"
    assert pair.computed() - computed == (OUTPUT + 1) * len(LENGTHS), "decode computes the last token of each prompt alone"
    sent = 2 * sum(length > 1 for length in LENGTHS)
    assert pair.outcomes(pair.p, "send", "ok") == pair.outcomes(pair.d, "receive", "ok") == sent


def test_eight_at_once_in_both_orders_of_the_legs(pair: Pair) -> None:
    shared = tokens(300)
    prompts = [shared + tokens(length) for length in (1, 60, 84, 85, 200, 211, 212, 300)]
    expected = [alone(pair, prompt) for prompt in prompts]
    for _ in range(2):
        assert list(pair.pool.map(pair.both, prompts)) == expected
        pair.wait_empty()
        forget(pair.p)  # decode keeps its own, and takes what is missing


def test_decode_alone_takes_from_its_own_store(pair: Pair) -> None:
    prompt = tokens(500)
    first = pair.both(prompt)
    pair.wait_empty()
    forget(pair.d)
    hits = pair.d.metric("vllm:external_prefix_cache_hits_total")
    assert pair.d.complete(prompt, OUTPUT)["token_ids"] == first
    assert pair.d.metric("vllm:external_prefix_cache_hits_total") - hits == whole(500)
