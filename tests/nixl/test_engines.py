"""Real engines whose KV goes over NIXL (transport rdma, over UCX's TCP and shared memory, since UCX_TLS says so)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from engine_pair import OUTPUT, Pair, new, started, tokens
from engines import Engine
from processes import ProcessFailed

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.launch import KvOptions

pytestmark = pytest.mark.timeout(900)
PEER_TIMEOUT_S = 15.0
"""Half of it for decode to reach prefill's memory, which takes seconds of a full machine."""


def variables(site: str, tls: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), site)))
    return {"PYTHONPATH": path} | ({"UCX_TLS": tls} if tls else {})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, site: str) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    yield from started(Pair(folder, policy="recompute", transport="rdma", env=variables(site, "tcp,sysv,posix"),
                            peer_timeout_s=PEER_TIMEOUT_S, load_timeout_s=4 * PEER_TIMEOUT_S))


def moved(pair: Pair, link: str) -> float:
    return pair.d.metric(f"{metrics.LINK_BYTES}_total", link=link)


@pytest.mark.parametrize("length", [2, 129, 513, 1900])
def test_decode_answers_like_a_plain_engine_from_what_it_has_read(pair: Pair, length: int) -> None:
    prompt = tokens(length)
    before, computed = moved(pair, "nixl"), pair.computed()
    got = pair.both(prompt)
    pair.wait_empty()
    assert got == pair.plain(prompt)
    assert moved(pair, "nixl") > before
    assert moved(pair, "tcp") == 0
    assert pair.computed() - computed == OUTPUT + 1


def test_many_at_once(pair: Pair) -> None:
    prompts = [tokens(300, seed) for seed in range(8)]
    transfers = [new() for _ in prompts]
    decodes = [pair.d_leg(prompt, transfer) for prompt, transfer in zip(prompts, transfers, strict=True)]
    for prompt, transfer in zip(prompts, transfers, strict=True):
        pair.p_leg(prompt, transfer)
    answers = [one.result(pair.answer_s) for one in decodes]
    pair.wait_empty()
    assert answers == [pair.plain(prompt) for prompt in prompts]


def test_prefill_is_stopped_and_killed_and_decode_computes_the_prompt(pair: Pair) -> None:
    prompt = tokens(700, "stopped")
    plain = pair.plain(prompt)
    transfer = new()
    pair.wire.hold.set()  # the session: decode has blocks for the load, and waits
    leg = pair.d_leg(prompt, transfer)
    pair.p_leg(prompt, transfer)
    pair.wait_loading()
    for pid in pair.p.group.pids():
        os.kill(pid, signal.SIGSTOP)
    pair.wire.hold.clear()
    try:
        assert leg.result(pair.answer_s) == plain
        pair.wait_empty(pair.d)
    finally:
        pair.p.kill()
    assert pair.d.alive()


def test_an_engine_that_cannot_have_it_says_what_is_missing_and_ends(
        tmp_path_factory: pytest.TempPathFactory, site: str) -> None:
    folder = tmp_path_factory.mktemp("refused")
    with (Engine("r", folder, options=KvOptions(transport="rdma"), env=variables(site, "")) as engine,
          pytest.raises(ProcessFailed)):
        engine.wait_ready()
    said = engine.log.read_text()
    assert "rdma cannot be used: no RDMA device is here (no /dev/infiniband/uverbs*)" in said
    assert "resources: rdma/" in said
