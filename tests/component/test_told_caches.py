"""Caches of real engines, told to routers: what these predict is what engines then find, after evictions, too, and at a
router that begins later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import HEARTBEAT_S, Cluster, Instance
from engines import MODEL_NAME, HttpError, get, post, samples
from local_service import wait

from xpyd_sidecar.contract import held_prefixes
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.router.endpoints.probes import RENDERED_S

pytestmark = pytest.mark.engines
ARGS = ("--block-size", "32", "--num-gpu-blocks-override", "192", "--max-model-len", "2048")
"""Room for two or three of the prompts."""
PREDICTED, ACTUAL = (f"xpyd_router_prefix_{which}_tokens_total" for which in ("predicted", "actual"))


def conversation(seed: int, turns: int) -> list[dict[str, str]]:
    """Messages of some 150 tokens each, the last one a user's; the same at each turn."""
    draw = random.Random(seed)
    return [{"role": "assistant" if at % 2 else "user", "content": " ".join(str(draw.randrange(10**4)) for _ in range(40))}
            for at in range(2 * turns - 1)]


def ask(url: str, messages: list[dict[str, str]]) -> None:
    post(f"{url}/v1/chat/completions", {"model": MODEL_NAME, "messages": messages, "max_tokens": 4, "temperature": 0})


def ready(url: str) -> bool:
    try:
        return bool(get(f"{url}/ready", 5))
    except (OSError, HttpError):
        return False


def told(instance: Instance) -> HeldPrefixes:
    found = held_prefixes.read(instance.engine.run_dir, 0)
    return HeldPrefixes() if found is None else found[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("told"), router={"policy": "cost"}, engine_args=ARGS) as made:
        made.wait_ready()
        yield made


def prefix_tokens(url: str) -> list[float]:
    """Tokens that the router has taken to be cached, and that were, by a page that is rendered anew."""
    time.sleep(RENDERED_S + 0.05)
    page = get(f"{url}/metrics")
    return [sum(samples(page, name, {})) for name in (PREDICTED, ACTUAL)]


@contextmanager
def counted(url: str) -> Iterator[list[float]]:
    """Tokens that the router took to be cached meanwhile, and that were."""
    before = prefix_tokens(url)
    found: list[float] = []
    yield found
    found += [now - was for now, was in zip(prefix_tokens(url), before, strict=True)]


def test_what_engines_hold_and_evict_is_told_for_both_roles(cluster: Cluster) -> None:
    ask(cluster.url, conversation(1, 3))
    sides = cluster.prefill[0], cluster.decode[0]
    wait(lambda: all(told(side).held for side in sides))
    first = [told(side).held for side in sides]
    assert first[0] & first[1], "both were asked for the same prefixes"
    for seed in range(2, 12):
        ask(cluster.url, conversation(seed, 3))
    wait(lambda: all(before <= told(side).absent for before, side in zip(first, sides, strict=True)))
    assert all(told(side).held for side in sides), "the last ones are there"


def test_predictions_are_right_though_much_is_evicted(cluster: Cluster) -> None:
    """Turns of conversations that come back after one, two or many others, at once or after a beat."""
    draw, turn = random.Random(5), dict.fromkeys(range(20, 32), 0)
    with counted(cluster.url) as found:
        for _ in range(60):
            seed = draw.choice([*turn][:3] if draw.random() < 0.6 else [*turn])
            turn[seed] = turn[seed] % 4 + 1
            ask(cluster.url, conversation(seed, turn[seed]))
            if draw.random() < 0.5:
                wait_beats(1)
    predicted, actual = found
    assert actual > 4000, "too little comes again to judge by"
    assert 0.95 < predicted / actual < 1.05, found


def test_a_router_that_begins_later_knows_what_is_held(cluster: Cluster) -> None:
    messages = conversation(50, 4)
    ask(cluster.url, messages[:5])
    with cluster.other_router(policy="cost") as (_, port):
        url = f"http://127.0.0.1:{port}"
        wait(lambda: ready(url))
        wait_beats(15)  # how much it has heard is told nowhere
        with counted(url) as found:
            ask(url, messages)
    predicted, actual = found
    assert actual > 400
    assert 0.95 < predicted / actual < 1.05, found


def wait_beats(count: int) -> None:
    """So many beats pass, and the second in which engines look at their caches."""
    time.sleep(count * HEARTBEAT_S + 1.0)
