"""The link over NIXL itself between two processes, over what UCX has on any host: TCP, shared memory, kernel reads."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifest_ranks import HEADS, LAYERS, DecodeRank, RankPlace, key, wait_until
from nixl_peers import Peer, PrefillPeer, driver
from nixl_ranks import LIMITS, PATIENT, NixlProcess

from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.reads import METADATA_MAX, ReadLimits
from xpyd_sidecar.kv.receiving import Cancel, Confirm
from xpyd_sidecar.transport.nixl.reading import Reading, ReadOrder

STOPPED_S = 20.0
HEAD_BYTES = 25_003
BLOCKS = 200


@dataclass
class Stage:
    """Ranks of one test; ended after it."""

    site: str
    stack: ExitStack
    processes: list[NixlProcess] = field(default_factory=list)

    def prefill(self, *, head_bytes: int = HEAD_BYTES, tls: str = "tcp", **more: Any) -> PrefillPeer:
        return self.stack.enter_context(PrefillPeer(head_bytes=head_bytes, tls=tls, site=self.site, **more))

    def decode(self, *, head_bytes: int = HEAD_BYTES, limits: ReadLimits = PATIENT, **more: Any) -> DecodeRank:
        self.processes.append(NixlProcess(driver(), limits=limits))
        self.stack.callback(self.processes[-1].stop)
        made = self.processes[-1].decode(**{"head_bytes": head_bytes, "blocks": BLOCKS, "timeout_s": 15.0} | more)
        self.stack.callback(made.stop)
        return made


@pytest.fixture
def stage(site: str) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(site, stack)


def over(d: DecodeRank, number: int, count: int) -> bool:
    """Whether a load has ended, well or not."""
    return d.has(key(number), 0, count) or any(one.key == key(number) for one in d.broken)


def load(p: PrefillPeer, d: DecodeRank, number: int, count: int) -> Outcome:
    """A transfer from start to end."""
    p.tell(push=number, count=count)
    return loaded(p, d, number, count)


def loaded(p: RankPlace, d: DecodeRank, number: int, count: int) -> Outcome:
    ids = tuple(range(count))
    want = d.want(key(number), p, ids)
    wait_until(lambda: over(d, number, count), 60)
    broken = [one.outcome for one in d.broken if one.key == key(number)]
    if broken:
        d.receiver.close(want.request)
        return broken[0]
    assert d.right(key(number), 0, ids), "other bytes than prefill's"
    d.receiver.carry_out(Confirm(key(number), 0, LAYERS * count * HEADS * d.head_bytes))
    return Outcome.OK


def end_sessions(d: DecodeRank) -> None:
    for session in list(d.receiver._numbers.values()):
        session.idle = True  # as when nobody needs it
        session.link.post(partial(session.link.close, PeerGone(session.link.peer, "it ends")))
    wait_until(lambda: not d.receiver._numbers)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("head_bytes", "decode"), [
    (250, {}), (16384, {}), (512 << 10, {}), (16384, {"ring": 64 << 20}), (16384, {"head": 1, "heads": 2})],
    ids=["small blocks", "blocks", "large blocks", "a ring", "heads"])
def test_blocks_come_whole_over_whatever_ucx_takes(
        stage: Stage, tls: str, head_bytes: int, decode: dict[str, Any]) -> None:
    count = min(60, (24 << 20) // (HEADS * head_bytes))
    p = stage.prefill(head_bytes=head_bytes, tls=tls)
    d = stage.decode(head_bytes=head_bytes, blocks=count, piece=2 << 20, **decode)
    for number in range(3):
        assert load(p, d, number, count) is Outcome.OK
    assert d.links == {"nixl"}
    wait_until(lambda: p.tell(used=0) == 0)


def test_a_session_reads_from_more_peers_than_there_were_agents_for(stage: Stage, tcp: str) -> None:
    p, d = stage.prefill(head_bytes=250, tls=tcp, ranks=36, timeout_s=60.0), stage.decode(head_bytes=250, timeout_s=60.0)
    p.tell(push=1, count=2)
    for number, rank in enumerate(p.ranks):
        assert loaded(rank, d, 1, 2) is Outcome.OK, number
        d.arrived.clear()
    assert len(stage.processes[0].hub._reading.agent.known) == 36
    assert d.links == {"nixl"}


def test_bytes_that_are_not_what_was_told_end_the_load(stage: Stage, tcp: str) -> None:
    p, d = stage.prefill(tls=tcp), stage.decode()
    assert load(p, d, 1, 4) is Outcome.OK
    memory = p.tell(memory=0)
    wait_until(lambda: p.tell(used=0) == 0)
    with Path(f"/proc/{p.process.pid}/mem").open("r+b", buffering=0) as its:
        p.tell(push=2, count=4)
        p.tell(summed=0)
        its.seek(memory["base"])
        copies = its.read(4 << 20)
        its.seek(memory["base"])
        its.write(bytes(one ^ 1 for one in copies))
        assert loaded(p, d, 2, 4) is Outcome.CHECKSUM
    assert not d.has(key(2), 0, 1)


def test_a_prefill_that_is_killed_in_the_middle_ends_its_loads_and_no_others(
        stage: Stage, tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = stage.prefill(tls=tls, timeout_s=30.0), stage.prefill(tls=tls)
    d = stage.decode()
    assert load(q, d, 1, 20) is Outcome.OK
    files = descriptors()
    assert load(p, d, 2, 1) is Outcome.OK
    p.tell(push=3, count=BLOCKS)
    agent = p.tell(memory=0)["agent"]
    kill_at(monkeypatch, stage.processes[0].hub._reading, agent, 3, partial(p.process.kill))
    began = time.monotonic()
    assert loaded(p, d, 3, BLOCKS) is Outcome.PEER_LOST
    assert time.monotonic() - began < 2 * PATIENT.silence_s
    assert load(q, d, 4, 20) is Outcome.OK
    wait_until(lambda: descriptors() <= files)
    assert load(stage.prefill(tls=tls), d, 5, 20) is Outcome.OK


def kill_at(monkeypatch: pytest.MonkeyPatch, reading: Reading, agent: str, orders: int, call: Any) -> None:
    """Have a call made when so many orders of a peer were told, before the last of them is begun."""
    true, seen = Reading.order, [0]

    def order(self: Reading, session: int, one: ReadOrder) -> None:
        if self is reading and self._peers[session].memory.agent == agent:
            seen[0] += 1
            if seen[0] == orders:
                call()
        true(self, session, one)

    monkeypatch.setattr(Reading, "order", order)


@pytest.mark.parametrize("lingers", [True, False])
def test_a_prefill_that_is_stopped_costs_nobody_else_anything(
        stage: Stage, tcp: str, monkeypatch: pytest.MonkeyPatch, *, lingers: bool) -> None:
    """For 20 s, with reads under way. Its own load ends by silence; what it sends when it wakes up goes nowhere.

    Where the agent ends before it wakes (``fence_s``), UCX often ends the process that was stopped (ucp_request.inl:
    unexpected error: Endpoint timeout), so nothing is asked of it then (docs/decisions/0038).
    """
    limits = PATIENT._replace(fence_s=60.0 if lingers else 2.0)
    p, q, d = stage.prefill(tls=tcp, timeout_s=60.0), stage.prefill(tls=tcp), stage.decode(limits=limits)
    assert load(p, d, 1, 20) is Outcome.OK
    assert load(q, d, 2, 20) is Outcome.OK
    agent, reading = p.tell(memory=0)["agent"], stage.processes[0].hub._reading
    p.tell(push=3, count=BLOCKS)
    stopped: list[float] = []

    def stop() -> None:
        os.kill(p.process.pid, signal.SIGSTOP)
        stopped.append(time.monotonic())

    kill_at(monkeypatch, reading, agent, 1, stop)
    first = reading.agent.reader
    try:
        want = d.want(key(3), p, tuple(range(BLOCKS)))
        meanwhile = 4
        while not d.broken:
            assert load(q, d, meanwhile, 20) is Outcome.OK
            meanwhile += 1
        assert meanwhile > 7, "others wait for the one that is stopped"
        d.receiver.close(want.request)
        d.receiver.carry_out(Cancel(key(3), 0, Outcome.ABORTED, "over"))
        if not lingers:
            wait_until(lambda: not reading._machine.stuck_reads)
            assert reading.agent.reader is not first
        while time.monotonic() < stopped[0] + STOPPED_S:
            assert load(q, d, meanwhile, 20) is Outcome.OK
            meanwhile += 1
        left = slots_of(reading)
    finally:
        os.kill(p.process.pid, signal.SIGCONT)
    if lingers:
        assert reading.agent.reader is first
        wait_until(lambda: not reading._machine.stuck_reads)
        assert load(p, d, 901, 20) is Outcome.OK
        assert p.process.poll() is None
    else:
        time.sleep(1.0)
        assert (slots_of(reading) == left).all(), "what it had in flight was written after the end of the agent"
    assert [one.outcome for one in d.broken if one.key == key(3)] == [Outcome.PEER_LOST]
    assert load(q, d, 902, 20) is Outcome.OK
    assert load(stage.prefill(tls=tcp), d, 903, 20) is Outcome.OK


def slots_of(reading: Reading) -> np.ndarray:
    """What lies in the slots."""
    return np.frombuffer(reading.agent.memory._view, np.uint8).copy()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decode_that_ends_or_stops_in_the_middle_gives_prefill_its_copies_back(
        stage: Stage, tcp: str, how: signal.Signals) -> None:
    p, d = stage.prefill(tls=tcp), stage.decode()
    p.tell(push=1, count=BLOCKS)
    with Peer("decode", str(HEAD_BYTES), str(BLOCKS), *p.place, tls=tcp, site=stage.site) as other:
        assert other.hear() == "reads"
        other.process.send_signal(how)
        wait_until(lambda: p.tell(used=0) == 0, 60)
        assert load(p, d, 2, 20) is Outcome.OK


def test_what_a_former_life_has_shown_is_never_read_as_valid(stage: Stage, tcp: str) -> None:
    first, d = stage.prefill(tls=tcp), stage.decode()
    assert load(first, d, 1, 4) is Outcome.OK
    former = first.tell(memory=0)
    first.process.kill()
    first.process.wait()
    second = stage.prefill(tls=tcp)
    for number, shown, why in ((2, former, "nixl"), (3, {"ticket": former["ticket"]}, "other memory is where its ticket"),
                               (4, {"agent": former["agent"]}, "nixl")):
        second.tell(shown=shown)
        assert load(second, d, number, 4) is Outcome.INCOMPATIBLE
        assert why in d.broken[-1].reason
    second.tell(shown={})
    assert load(second, d, 5, 4) is Outcome.OK


def test_a_description_that_is_garbage_or_huge_is_refused_and_hurts_nobody(stage: Stage, tcp: str) -> None:
    p, d = stage.prefill(tls=tcp), stage.decode(limits=PATIENT._replace(open_s=LIMITS.open_s))
    assert load(p, d, 1, 4) is Outcome.OK
    true = bytes.fromhex(p.tell(memory=0)["metadata"])
    draw = random.Random("garbage")
    wrong = [b"x", draw.randbytes(300), bytes(METADATA_MAX), draw.randbytes(METADATA_MAX + 1), true[:-1], true[:40],
             true * 3]
    for _ in range(20):
        one = bytearray(true)
        one[draw.randrange(len(one))] ^= 1 << draw.randrange(8)
        wrong.append(bytes(one))
    again = stage.prefill(tls=tcp)
    for turn, metadata in enumerate(wrong):
        again.tell(shown={"metadata": metadata.hex()})
        assert load(again, d, 10 + turn, 4) in {Outcome.INCOMPATIBLE, Outcome.PEER_LOST}
    assert again.process.poll() is None
    assert load(p, d, 2, 4) is Outcome.OK


def test_sessions_that_end_leave_no_descriptors_or_threads(stage: Stage, tcp: str) -> None:
    gc.collect()  # ranks of other tests have descriptors as long as they are there
    p, d = stage.prefill(tls=tcp), stage.decode()
    seen = []
    for turn in range(12):
        assert load(p, d, turn, 4) is Outcome.OK
        end_sessions(d)
        wait_until(lambda: not stage.processes[0].hub._reading._peers)
        seen.append((descriptors(), len(list(Path("/proc/self/task").iterdir()))))
    assert len(set(seen[3:])) == 1, seen
