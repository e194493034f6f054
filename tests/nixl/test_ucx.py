"""The link over NIXL itself between two processes, over what UCX has on any host: TCP, shared memory, kernel reads."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kv_ranks import REGIONS, DecodeRank, content, key, until
from nixl_peers import Peer, PrefillPeer, driver
from nixl_ranks import LIMITS, PATIENT, NixlProcess

from xpyd_sidecar.kv.bodies import Offer
from xpyd_sidecar.kv.frames import Header
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.reads import METADATA_MAX
from xpyd_sidecar.transport.nixl.decode import NixlTaker
from xpyd_sidecar.transport.nixl.session import ReadLimits

STOPPED_S = 20.0
BLOCK = 100_003


@dataclass
class Stage:
    """Ranks of one test; ended after it."""

    site: str
    stack: ExitStack
    processes: list[NixlProcess] = field(default_factory=list)

    def prefill(self, *, block: int = BLOCK, tls: str = "tcp", **more: Any) -> PrefillPeer:
        return self.stack.enter_context(PrefillPeer(block=block, tls=tls, site=self.site, **more))

    def decode(self, *, block: int = BLOCK, limits: ReadLimits = PATIENT, **more: Any) -> DecodeRank:
        self.processes.append(NixlProcess(driver(), piece=max(block, 1 << 20), limits=limits))
        self.stack.callback(self.processes[-1].stop)
        patient = {"timeout_s": limits.silence_s, "load_s": 60.0}
        return self.stack.enter_context(self.processes[-1].decode(block=block, **patient | more))


@pytest.fixture
def stage(site: str) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(site, stack)


def whole(d: DecodeRank, count: int) -> bool:
    return d.cache == {(region, 100 + n): content(region, n, d.block) for region in range(REGIONS) for n in range(count)}


def load(p: PrefillPeer, d: DecodeRank, which: str, count: int, attempt: int = 1) -> Outcome:
    """A transfer from start to end."""
    p.tell(push=which, count=count, attempt=attempt)
    name, before = f"{which}{attempt}", len(d.finished)
    d.load(name, key(which, attempt), p.address, first=0, count=count)
    d.wait(lambda: any(one.request == name for one in d.finished[before:]))
    return next(one.outcome for one in d.finished[before:] if one.request == name)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("direct", [True, False], ids=["to their places", "staged"])
@pytest.mark.parametrize("block", [1000, 65536, 2 << 20])
def test_blocks_come_whole_over_whatever_ucx_takes(stage: Stage, tls: str, block: int, direct: bool) -> None:
    count = min(60, (24 << 20) // block)
    p, d = stage.prefill(block=block, tls=tls), stage.decode(block=block, direct=direct)
    for which in "abc":
        assert load(p, d, which, count) is Outcome.OK
        assert whole(d, count)
    assert d.moved == {"nixl": 3 * REGIONS * count * block}
    until(lambda: p.tell(used=0) == 0)


def test_bytes_that_are_not_what_was_offered_end_the_load(stage: Stage, tcp: str) -> None:
    p, d = stage.prefill(tls=tcp), stage.decode()
    assert load(p, d, "a", 4) is Outcome.OK
    memory = p.tell(memory=0)
    p.tell(shown={"base": memory["base"]})
    before = dict(d.cache)
    with Path(f"/proc/{p.process.pid}/mem").open("r+b", buffering=0) as its:
        p.tell(push="b", count=4)
        p.tell(summed=0)
        its.seek(memory["base"])
        copies = its.read(4 << 20)
        its.seek(memory["base"])
        its.write(bytes(one ^ 1 for one in copies))
        d.load("b", key("b"), p.address, first=0, count=4)
        assert d.wait_outcomes(2)[1] is Outcome.CHECKSUM
    assert d.cache.items() >= before.items() or d.cache == before


def test_a_prefill_that_is_killed_in_the_middle_ends_its_loads_and_no_others(stage: Stage, tls: str) -> None:
    p, q = stage.prefill(tls=tls, timeout_s=30), stage.prefill(tls=tls)
    d, e = stage.decode(chunks=2), stage.decode()
    assert load(q, e, "a", 20) is Outcome.OK
    files = descriptors()
    p.tell(push="a", count=200)
    d.load("a", key(), p.address, first=0, count=200)
    until(lambda: len(d.receiver.inbox) >= 2)  # two chunks hold the rest up: pieces are on offer and in slots
    p.process.kill()
    began = time.monotonic()
    assert d.wait_outcomes() == [Outcome.PEER_LOST]
    assert time.monotonic() - began < 2 * PATIENT.silence_s
    assert load(q, e, "b", 20) is Outcome.OK
    until(lambda: descriptors() <= files)
    new = stage.prefill(tls=tls)
    assert load(new, d, "c", 20) is Outcome.OK


@pytest.mark.parametrize("lingers", [True, False])
def test_a_prefill_that_is_stopped_costs_nobody_else_anything(
        stage: Stage, tcp: str, monkeypatch: pytest.MonkeyPatch, *, lingers: bool) -> None:
    """For 20 s, with reads under way. Its own load ends by silence; what it sends when it wakes up goes nowhere.

    Where the agent of that session ends before it wakes (``linger_s``), UCX often ends the process that was stopped
    (ucp_request.inl: unexpected error: Endpoint timeout), so nothing is asked of it then (docs/decisions/0038).
    """
    limits = PATIENT._replace(linger_s=60.0 if lingers else 0.1)
    p, q, d = stage.prefill(tls=tcp, timeout_s=60), stage.prefill(tls=tcp), stage.decode(limits=limits)
    assert load(p, d, "a", 20) is Outcome.OK
    assert load(q, d, "b", 20) is Outcome.OK
    agent, hub, offered = p.tell(memory=0)["agent"], stage.processes[0].hub, NixlTaker.offered
    [stuck] = [one for one in hub._joined.values() if one.memory.agent == agent]
    p.tell(push="c", count=200)
    stopped: list[float] = []

    def stopping(taker: NixlTaker, header: Header, offer: Offer) -> None:
        if taker._memory.agent == agent and not stopped:
            os.kill(p.process.pid, signal.SIGSTOP)
            stopped.append(time.monotonic())
        offered(taker, header, offer)

    monkeypatch.setattr(NixlTaker, "offered", stopping)
    try:
        d.load("c", key("c"), p.address, first=0, count=200)
        d.wait(lambda: stopped and stuck.pieces)
        meanwhile = 0
        while not any(one.request == "c" for one in d.finished):
            assert load(q, d, "d", 20, meanwhile + 1) is Outcome.OK
            meanwhile += 1
        assert meanwhile > 3, "others wait for the one that is stopped"
        until(lambda: stuck.over and stuck in hub._lingering if lingers else stuck.reader is None)
        left = bytes(stuck.slots)
        time.sleep(max(0.0, stopped[0] + STOPPED_S - time.monotonic()))
    finally:
        os.kill(p.process.pid, signal.SIGCONT)
    if lingers:
        until(lambda: stuck.reader is None)
        assert load(p, d, "e", 20) is Outcome.OK
        assert p.process.poll() is None
    else:
        time.sleep(1.0)
        assert bytes(stuck.slots) == left, "what it had in flight was written after the end of the agent"
    assert [one.outcome for one in d.finished if one.request == "c"] == [Outcome.PEER_LOST]
    assert load(q, d, "f", 20) is Outcome.OK
    assert load(stage.prefill(tls=tcp), d, "f", 20, 2) is Outcome.OK


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decode_that_ends_or_stops_in_the_middle_gives_prefill_its_copies_back(
        stage: Stage, tcp: str, how: signal.Signals) -> None:
    p, d = stage.prefill(tls=tcp), stage.decode()
    p.tell(push="a", count=200)
    with Peer("decode", str(BLOCK), "200", p.address, tls=tcp, site=stage.site) as other:
        assert other.hear() == "reads"
        assert p.tell(used=0) > 0
        other.process.send_signal(how)
        until(lambda: p.tell(used=0) == 0)
        assert load(p, d, "b", 20) is Outcome.OK
        assert whole(d, 20)


def test_what_a_former_life_has_shown_is_never_read_as_valid(stage: Stage, tcp: str) -> None:
    first, d = stage.prefill(tls=tcp), stage.decode()
    assert load(first, d, "a", 4) is Outcome.OK
    former = first.tell(memory=0)
    first.process.kill()
    first.process.wait()
    second = stage.prefill(tls=tcp)
    second.tell(shown=former)
    assert load(second, d, "b", 4) is Outcome.INCOMPATIBLE
    assert "nixl" in d.finished[1].reason
    second.tell(shown={"ticket": former["ticket"]})
    assert load(second, d, "c", 4) is Outcome.INCOMPATIBLE
    assert "other memory is where its ticket was" in d.finished[2].reason
    second.tell(shown={"agent": former["agent"]})
    assert load(second, d, "d", 4) is Outcome.INCOMPATIBLE
    second.tell(shown={})
    assert load(second, d, "e", 4) is Outcome.OK
    assert whole(d, 4)


def test_a_description_that_is_garbage_or_huge_is_refused_and_hurts_nobody(stage: Stage, tcp: str) -> None:
    p, d = stage.prefill(tls=tcp), stage.decode()
    assert load(p, d, "a", 4) is Outcome.OK
    true = bytes.fromhex(p.tell(memory=0)["metadata"])
    draw = random.Random("garbage")
    wrong = [b"x", draw.randbytes(300), bytes(METADATA_MAX), draw.randbytes(METADATA_MAX + 1), true[:-1], true[:40],
             true * 3]
    for _ in range(20):
        one = bytearray(true)
        one[draw.randrange(len(one))] ^= 1 << draw.randrange(8)
        wrong.append(bytes(one))
    again = stage.prefill(tls=tcp)
    stage.processes[0].hub._limits = LIMITS  # what nobody answers is not waited for any longer
    for turn, metadata in enumerate(wrong):
        again.tell(shown={"metadata": metadata.hex()})
        assert load(again, d, "f", 4, turn + 1) in {Outcome.INCOMPATIBLE, Outcome.PEER_LOST}
    assert again.process.poll() is None
    assert load(p, d, "b", 4) is Outcome.OK


def test_sessions_that_end_leave_no_descriptors_or_threads(stage: Stage, tcp: str) -> None:
    gc.collect()  # ranks of other tests have descriptors as long as they are there
    p, d = stage.prefill(tls=tcp), stage.decode()
    seen = []
    for turn in range(12):
        assert load(p, d, "0123456789ab"[turn], 4) is Outcome.OK
        d.receiver._loop.post(lambda: [one.link.mistaken(ValueError()) for one in list(d.receiver._sources.values())])
        until(lambda: not d.receiver._sources and not stage.processes[0].hub._joined)
        ended = threading.Event()
        stage.processes[0].hub.tell(ended.set)  # after the call that ends the agent
        assert ended.wait(60)
        seen.append((descriptors(), len(list(Path("/proc/self/task").iterdir()))))
    assert len(set(seen[3:])) == 1, seen
