"""Engines of two tensor-parallel ranks: one has its workers in processes of vLLM's own (mp), the other in actors of Ray.

Each is prefill for the other. Both legs of a request are sent straight to the engines, and answers compared with those of
the prefill engine without ``kv_transfer_params``.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engines import Engine, held
from parallel_engines import MARK, PATIENCE_S, ask, of_session, parallel_engine
from processes import shared_memory

from xpyd_operator.local import procs
from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId

pytestmark = pytest.mark.timeout(400)
OUTPUT = 12
BLOCK_BYTES = 4 * 2 * 128 * 2 * 32 * 4
"""Of both ranks together: layers, heads, tokens, K and V, head size, bytes."""


class Way(NamedTuple):
    """Which engine is prefill for which."""

    p: Engine
    d: Engine
    pool: ThreadPoolExecutor

    def both(self, prompt: list[int]) -> list[int]:
        transfer = TransferId(uuid.uuid4().hex)
        decode = self.pool.submit(ask, self.d, prompt, OUTPUT, legs.Leg(1, Role.DECODE, transfer, Attempt(1), PATIENCE_S))
        self.prefill(prompt, transfer)
        return decode.result(PATIENCE_S)

    def prefill(self, prompt: list[int], transfer: TransferId) -> None:
        known = self.d.record()
        assert known is not None
        peer = legs.Peer(InstanceName(self.d.name), known.incarnation, known.control)
        ask(self.p, prompt, 1, legs.Leg(1, Role.PREFILL, transfer, Attempt(1), PATIENCE_S, peer))

    def plain(self, prompt: list[int]) -> list[int]:
        return ask(self.p, prompt, OUTPUT)

    def computed(self) -> float:
        return self.d.metric("vllm:iteration_tokens_total_sum")

    def loaded(self) -> float:
        return self.d.metric(metrics.TRANSFERS + "_total", side="receive", outcome="ok")

    def wait_empty(self) -> None:
        wait_until(lambda: not held(self.p.url) and not held(self.d.url), PATIENCE_S, "empty")


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not {what} within {deadline_s} s"
        time.sleep(0.05)


def tokens(n: int) -> list[int]:
    source = random.Random(uuid.uuid4().hex)
    return [source.randrange(3, 500) for _ in range(n)]


def listening(pid: int) -> set[str]:
    """Addresses on which a process listens, as /proc/net writes them without the port."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(entry)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text("ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    scratch = Path(tempfile.mkdtemp(prefix="xpyd-", dir="/tmp"))  # Ray's sockets need a short path
    folder = tmp_path_factory.mktemp("parallel")
    both = {executor: parallel_engine(executor, folder, scratch) for executor in ("mp", "ray")}
    try:
        with both["mp"], both["ray"]:
            for one in both.values():
                one.wait_ready()
            for one in both.values():  # the first request compiles kernels, which takes long beside an engine that waits
                ask(one, tokens(300), 2)
            yield both
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(params=["mp to ray", "ray to mp"])
def way(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> Iterator[Way]:
    prefill, _, decode = request.param.partition(" to ")
    with ThreadPoolExecutor(16) as pool:
        way = Way(engines[prefill], engines[decode], pool)
        yield way
        way.wait_empty()


@pytest.mark.parametrize("length", [1, 129, 700])
def test_decode_answers_like_a_plain_engine_and_computes_the_last_token_alone(way: Way, length: int) -> None:
    prompt, before, sent = tokens(length), way.computed(), way.p.metric(metrics.PUSHED_BYTES + "_total")
    got = way.both(prompt)
    way.wait_empty()
    assert way.computed() - before == OUTPUT + 1
    assert way.p.metric(metrics.PUSHED_BYTES + "_total") - sent == -(-(length - 1) // 128) * BLOCK_BYTES
    assert got == way.plain(prompt)


def test_many_at_once(way: Way) -> None:
    prompts = [tokens(200 + 10 * n) for n in range(8)]
    before, loaded = way.computed(), way.loaded()
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(way.both, prompts))
    way.wait_empty()
    assert answers == [way.plain(prompt) for prompt in prompts]
    assert (way.computed() - before, way.loaded() - loaded) == (len(prompts) * (OUTPUT + 1), len(prompts))


def test_what_no_decode_leg_claims_is_let_go_by_every_rank(way: Way) -> None:
    prompt = tokens(700)
    way.prefill(prompt, TransferId(uuid.uuid4().hex))
    assert way.p.metric(metrics.SENDS_OPEN) == 1
    way.wait_empty()
    assert way.both(prompt) == way.plain(prompt)


def test_the_workers_are_where_the_executor_puts_them(engines: dict[str, Engine]) -> None:
    for executor, one in engines.items():
        processes = of_session(one.group.pid)
        names = list(processes.values())
        assert sum(name.startswith("ray::RayWorker") for name in names) == (2 if executor == "ray" else 0)
        assert names.count("raylet") == names.count("gcs_server") == (1 if executor == "ray" else 0)
        for pid in (pid for pid, name in processes.items() if name in {"raylet", "gcs_server"}):
            assert listening(pid) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, also seen as IPv6


def test_after_kill_9_the_local_backend_finds_what_lives_on(engines: dict[str, Engine]) -> None:
    one = engines["ray"]
    leader = procs.identify(one.group.pid)
    assert leader is not None
    memory = shared_memory(of_session(leader.pid))
    assert memory
    os.kill(leader.pid, signal.SIGKILL)
    living = set(of_session(leader.pid))
    found = {stat.pid for stat in procs.members(leader, MARK, one.log)}
    assert living
    assert living & set(of_session(leader.pid)) <= found
    one.kill()
    wait_until(lambda: not of_session(leader.pid), 15, "all gone")
    shm = Path("/dev/shm")
    assert not memory & {str(path) for path in shm.iterdir()}


def test_after_sigterm_nothing_is_left(engines: dict[str, Engine]) -> None:
    one = engines["mp"]
    leader = one.group.pid
    assert one.stop() == 0
    wait_until(lambda: not of_session(leader), 10, "all gone")
