"""The link over NCCL between real threads and sockets, with a scripted NCCL and host memory for GPUs.

Copies and streams are done at once, or only when they have been asked a few times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from copies import after_looks, at_once
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_ranks import PATIENCE_S, REGIONS, DecodeRank, PrefillRank, content, key, until
from nccl_fake import FakeNccl, HostDevice, World

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import nccl_setup
from xpyd_sidecar.engine.nccl_setup import choose, most_bytes
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.bodies import Gpu
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.nccl import driver as nccl_driver
from xpyd_sidecar.transport.nccl import prefill as nccl_prefill
from xpyd_sidecar.transport.nccl.decode import NcclGrouping
from xpyd_sidecar.transport.nccl.driver import Driver, fixed_bytes, load, padded, weigh, weights
from xpyd_sidecar.transport.nccl.thread import DEPTH, FLIGHT, NcclLimits, NcclThread

PIECE = 4096
LIMITS = NcclLimits(groups=4, open_s=PATIENCE_S, move_s=PATIENCE_S, idle_s=60)


@dataclass
class Process:
    """What one engine process has: a GPU, a communicator thread."""

    world: World
    name: str
    limits: NcclLimits = LIMITS
    transport: str = "nccl"
    receives: int = 4
    marks: Callable[[], CopyMark] = at_once
    hub: NcclThread = field(init=False)
    grouping: NcclGrouping = field(init=False)

    def __post_init__(self) -> None:
        driver = Driver(FakeNccl(self.world), HostDevice(self.name, self.marks), ctas=4, piece=PIECE,
                        groups=self.limits.groups, flight=FLIGHT)
        self.hub = NcclThread(driver, self.limits)
        self.grouping = NcclGrouping(self.hub, self.receives)

    @property
    def ways(self) -> LinkOptions:
        return LinkOptions(self.transport, gpu=Gpu(self.name, "2.29.7", PIECE) if self.transport == "nccl" else None)


@dataclass
class Stage:
    """Processes of one test; ended after its ranks."""

    world: World
    stack: ExitStack
    marks: Callable[[], CopyMark] = at_once
    processes: list[Process] = field(default_factory=list)

    def process(self, name: str, limits: NcclLimits = LIMITS, **more: object) -> Process:
        self.processes.append(Process(self.world, name, limits, **{"marks": self.marks, **more}))  # type: ignore[arg-type]
        return self.processes[-1]

    def prefill(self, process: Process | None = None, **more: object) -> PrefillRank:
        process = process or self.process("p")
        return self.stack.enter_context(PrefillRank(ways=process.ways, grouping=process.grouping, marks=self.marks,
                                                    **more))  # type: ignore[arg-type]

    def decode(self, process: Process | None = None, **more: object) -> DecodeRank:
        process = process or self.process("d")
        return self.stack.enter_context(DecodeRank(ways=process.ways, grouping=process.grouping, **more))  # type: ignore[arg-type]


@pytest.fixture(params=[at_once, after_looks], ids=["at once", "late"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with ExitStack() as stack:
        one = Stage(World(), stack, request.param)
        yield one
        one.world.never_abort = False
    for process in one.processes:
        process.hub.stop()
    assert one.world.misuse == []
    until(lambda: one.world.alive() == 0)  # every communicator was aborted, by threads of their own
    assert one.world.threads <= {"xpyd-nccl"}


def push(p: PrefillRank, which: str = "a", count: int = 20) -> None:
    for region in range(REGIONS):
        p.copy(key(which), region, 0, [content(region, n, p.block) for n in range(count)])


def patient(stage: Stage) -> None:
    """From now on no deadline is the point of the test."""
    for one in stage.processes:
        one.hub._machine._open_s, one.hub._machine._move_s = LIMITS.open_s, LIMITS.move_s


def whole(d: DecodeRank, count: int = 20) -> bool:
    return d.cache == {(region, 100 + n): content(region, n, d.block) for region in range(REGIONS) for n in range(count)}


@pytest.mark.parametrize("cover", [True, False], ids=["covered", "bare"])
@pytest.mark.parametrize("block", [1000, 1003, 4096])
def test_blocks_come_in_a_group_that_is_made_once(stage: Stage, block: int, cover: bool) -> None:
    p, d = stage.prefill(block=block, cover=cover), stage.decode(block=block, cover=cover)
    for turn, which in enumerate("abc"):
        push(p, which)
        d.load(which, key(which), p, first=0, count=20)
        assert d.wait_outcomes(turn + 1) == [Outcome.OK] * (turn + 1)
        assert whole(d)
    assert d.moved == {"nccl": 3 * REGIONS * 20 * block}
    assert stage.world.minted == 1
    assert sum(one.size for one in p.wait_reports(3)) == 3 * REGIONS * 20 * block
    until(lambda: p.sender.store.used == 0)
    assert stage.processes[0].hub.usage.groups == 1


class Overlapped:
    """Marks of a GPU that has not done the second piece when it gets the third one."""

    def __init__(self) -> None:
        self.made: list[Overlapped.Mark] = []

    class Mark:
        def __init__(self, made: list[Overlapped.Mark]) -> None:
            self.made = made
            made.append(self)

        def done(self) -> bool:
            return self is not next(iter(self.made[1:]), None) or len(self.made) > 2

    def __call__(self) -> CopyMark:
        return self.Mark(self.made)


@pytest.mark.parametrize("overlapped", [
    False,
    True],
    ids=["one after the other", "overlapped"])
@pytest.mark.parametrize("stage", [at_once], indirect=True)
def test_the_memory_of_a_group_is_nccls_own_count(stage: Stage, overlapped: bool) -> None:
    p = stage.prefill(stage.process("p", **({"marks": Overlapped()} if overlapped else {})))
    d = stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.OK]
    usage = stage.processes[0].hub.usage
    assert usage.memory == fixed_bytes(PIECE, LIMITS.groups, FLIGHT) + 1_000_000
    assert most_bytes(KvOptions(nccl_groups=1), PIECE) > usage.memory


def test_engines_that_open_to_each_other_at_once_both_go_on(stage: Stage) -> None:
    stage.world.open_after_s = 0.1
    a, b = stage.process("a"), stage.process("b")
    pa, da, pb, db = stage.prefill(a), stage.decode(a), stage.prefill(b), stage.decode(b)
    for p, d in ((pa, db), (pb, da)):
        push(p)
        d.load("r", key(), p, first=0, count=20)
    assert [*da.wait_outcomes(), *db.wait_outcomes()] == [Outcome.OK] * 2
    assert whole(da)
    assert whole(db)
    assert stage.world.minted == 2
    assert {*da.moved, *db.moved} == {"nccl"}


def test_a_group_that_is_never_made_costs_its_deadline_and_then_tcp(stage: Stage) -> None:
    stage.world.never_open = True
    p, d = stage.prefill(stage.process("p", LIMITS._replace(open_s=0.3))), stage.decode()
    for turn, which in enumerate("ab"):
        push(p, which)
        d.load(which, key(which), p, first=0, count=20)
        assert d.wait_outcomes(turn + 1) == [Outcome.OK] * (turn + 1)
    assert whole(d)
    assert set(d.moved) == {"tcp"}
    assert stage.world.minted == 1, "the next group is tried after a while"
    until(lambda: stage.world.alive() == 0)


def test_a_new_group_is_tried_after_a_while(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_prefill, "RETRY_S", 0.0)
    stage.world.never_open = True
    p, d = stage.prefill(stage.process("p", LIMITS._replace(open_s=0.2))), stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=20)
    until(lambda: stage.world.minted > 1)
    patient(stage)
    stage.world.never_open = False
    assert d.wait_outcomes() == [Outcome.OK]
    assert set(d.moved) == {"nccl"}


@pytest.mark.parametrize("script", ["fails", "stuck"])
def test_pieces_that_are_lost_with_their_group_fail_the_load_and_nothing_else(stage: Stage, script: str) -> None:
    limits = LIMITS._replace(move_s=0.3)
    p, d = stage.prefill(stage.process("p", limits)), stage.decode(stage.process("d", limits), grace_s=0.0)
    setattr(stage.world, "fail_at" if script == "fails" else "stuck_at", 3)
    push(p)
    d.load("a", key(), p, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.PEER_LOST]
    reasons = (d.finished[0].reason, p.wait_reports()[0].reason)
    assert any("nccl" in reason for reason in reasons), "who sees it first says it"
    stage.world.fail_at = stage.world.stuck_at = 0
    patient(stage)
    push(p, "b")
    d.load("b", key("b"), p, first=0, count=20)
    assert d.wait_outcomes(2)[1] is Outcome.OK
    until(lambda: p.sender.store.used == 0)


def test_copies_are_kept_until_an_abort_is_complete(stage: Stage) -> None:
    limits = LIMITS._replace(move_s=0.3)
    p, d = stage.prefill(stage.process("p", limits)), stage.decode(stage.process("d", limits), grace_s=0.0)
    stage.world.stuck_at, stage.world.never_abort = 1, True
    push(p)
    d.load("a", key(), p, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.PEER_LOST]
    p.wait_reports()
    time.sleep(0.2)
    assert p.sender.store.used > 0, "the GPU may still read them"
    assert stage.processes[0].hub.usage.groups == 1
    stage.world.never_abort = False
    until(lambda: p.sender.store.used == 0)
    until(lambda: all(one.hub.usage.groups == 0 for one in stage.processes))


def test_a_long_abort_holds_up_nobody_else(stage: Stage) -> None:
    stage.world.stuck_at, stage.world.never_abort = 1, True
    limits = LIMITS._replace(move_s=0.3)
    one, two = stage.process("p", limits), stage.process("d", limits)
    p, d = stage.prefill(one), stage.decode(two, grace_s=0.0)
    push(p)
    d.load("a", key(), p, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.PEER_LOST]
    stage.world.stuck_at = 0
    patient(stage)
    push(p, "b")
    d.load("b", key("b"), p, first=0, count=20)
    assert d.wait_outcomes(2)[1] is Outcome.OK
    assert stage.world.alive() > 2, "done while the first group was still being ended"
    stage.world.never_abort = False


def test_what_was_changed_on_its_way_is_noticed(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()
    stage.world.change = lambda message: message[7].bitwise_xor_(64)  # type: ignore[assignment,return-value]
    push(p)
    d.load("a", key(), p, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.CHECKSUM]
    assert d.cache == {}
    stage.world.change = None
    push(p, "b")
    d.load("b", key("b"), p, first=0, count=20)
    assert d.wait_outcomes(2)[1] is Outcome.OK


def test_groups_are_bounded_and_the_idle_one_makes_room(stage: Stage) -> None:
    d = stage.decode(stage.process("d", LIMITS._replace(groups=1)))
    ranks = [stage.prefill(stage.process(f"p{n}")) for n in range(3)]
    for turn, p in enumerate(ranks):
        push(p, "abc"[turn])
        d.load("abc"[turn], key("abc"[turn]), p, first=0, count=20)
        assert d.wait_outcomes(turn + 1)[turn] is Outcome.OK
    assert set(d.moved) == {"nccl"}
    assert stage.world.minted == 3
    until(lambda: stage.world.alive() == 2)


def test_where_no_group_is_idle_blocks_take_tcp(stage: Stage) -> None:
    decode = stage.process("d", LIMITS._replace(groups=1, open_s=60))
    d = stage.decode(decode)
    busy, other = (stage.prefill(stage.process(f"p{n}", LIMITS._replace(open_s=60))) for n in range(2))
    stage.world.never_open = True
    push(busy, "a")
    d.load("a", key("a"), busy, first=0, count=20)
    until(lambda: decode.hub.usage.groups == 1)
    push(other, "b")
    d.load("b", key("b"), other, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.OK]
    assert d.finished[0].request == "b"
    assert set(d.moved) == {"tcp"}


def test_idle_groups_are_closed_and_made_again(stage: Stage) -> None:
    limits = LIMITS._replace(idle_s=1.0)
    p, d = stage.prefill(stage.process("p", limits)), stage.decode(stage.process("d", limits))
    for turn, which in enumerate("ab"):
        push(p, which)
        d.load(which, key(which), p, first=0, count=20)
        assert d.wait_outcomes(turn + 1)[turn] is Outcome.OK
        until(lambda: stage.world.alive() == 0)
    assert stage.world.minted == 2
    assert set(d.moved) == {"nccl"}


def test_a_dead_prefill_leaves_no_group_behind(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(grace_s=0.0)
    stage.world.stuck_at = 1
    push(p)
    d.load("a", key(), p, first=0, count=20)
    until(lambda: sum(len(pair) for pair in stage.world.pairs.values()) == 2)
    p.sender.stop()
    assert d.wait_outcomes() == [Outcome.PEER_LOST]
    until(lambda: stage.processes[1].hub.usage.groups == 0)


def test_what_nobody_wants_any_more_is_not_sent(stage: Stage) -> None:
    stage.world.never_open = True  # before prefill has heard of it
    p, d = stage.prefill(), stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=20)
    until(lambda: stage.world.minted == 1)
    d.abandon("a")
    assert p.wait_reports()[0].outcome is Outcome.ABORTED
    stage.world.never_open = False
    until(lambda: p.sender.store.used == 0)
    push(p, "b")
    d.load("b", key("b"), p, first=0, count=20)
    assert d.wait_outcomes(2)[1] is Outcome.OK
    assert whole(d)


def test_slots_bound_what_is_under_way(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(stage.process("d", receives=1))
    push(p)
    d.load("a", key(), p, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.OK]
    assert whole(d)
    assert DEPTH == 2


@pytest.mark.parametrize(("ours", "theirs", "text"), [
    ("nccl", "tcp", "transport nccl: decode's transport is not nccl"),
    ("tcp", "nccl", "transport nccl: decode's transport is nccl, prefill's is tcp"),
    ("nccl", "auto", "transport nccl: decode's transport is not nccl"),
    ("auto", "nccl", "transport nccl: decode's transport is nccl, prefill's is auto"),
])
def test_nccl_on_one_side_alone_is_refused(stage: Stage, ours: str, theirs: str, text: str) -> None:
    p, d = stage.prefill(stage.process("p", transport=ours)), stage.decode(stage.process("d", transport=theirs))
    push(p)
    d.load("a", key(), p, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.INCOMPATIBLE]
    assert text in d.finished[0].reason


def test_two_ranks_on_one_gpu_are_refused(stage: Stage) -> None:
    p, d = stage.prefill(stage.process("p")), stage.decode(stage.process("p"))
    push(p)
    d.load("a", key(), p, first=0, count=20)
    assert d.wait_outcomes() == [Outcome.INCOMPATIBLE]
    assert "transport nccl: nccl: both on one GPU" in d.finished[0].reason
    assert stage.world.minted == 0


# --- the sum ---


def scratch() -> torch.Tensor:
    return torch.empty(32, dtype=torch.int64)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=8, max_size=256), st.integers(0, 255), st.integers(1, 255))
def test_a_changed_byte_changes_the_sum(data: bytes, at: int, flip: int) -> None:
    factors = weights(32, lambda size: torch.empty(size, dtype=torch.uint8))
    words = torch.zeros(padded(len(data)), dtype=torch.uint8)
    words[:len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    before = int(weigh(words.view(torch.int64), factors, scratch()))
    words[at % len(data)] ^= flip
    assert int(weigh(words.view(torch.int64), factors, scratch())) != before


def test_the_sum_is_what_is_documented() -> None:
    factors = weights(4, lambda size: torch.empty(size, dtype=torch.uint8))
    words = [-3, 2**63 - 1, 5, -(2**63)]
    expected = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
    assert int(weigh(torch.tensor(words), factors, scratch())) % 2**64 == expected


def test_words_that_change_places_are_noticed() -> None:
    factors = weights(4, lambda size: torch.empty(size, dtype=torch.uint8))
    before, after = (int(weigh(torch.tensor(words), factors, scratch())) for words in ([1, 2, 3, 4], [1, 3, 2, 4]))
    assert before != after


def test_what_may_be_written_is_read_where_it_is_and_cuts_are_brought_to_pinned_memory() -> None:
    host, copy = torch.zeros(8, dtype=torch.uint8), bytearray(b"blocks")
    assert bytes(nccl_driver._pinned(memoryview(copy), host).numpy()) == b"blocks"
    assert not host.any()
    assert bytes(nccl_driver._pinned(memoryview(b"cut"), host).numpy()) == b"cut"
    assert bytes(host.numpy()[:4]) == b"cut\0"


def test_without_a_gpu_there_is_no_driver() -> None:
    driver, version, reason = load(torch.device("cpu"), ctas=4, piece=PIECE, groups=1, flight=1)
    assert (driver, version) == (None, "")
    assert reason == "the KV cache is on cpu, not on a CUDA device"


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm", "rdma"])
def test_other_transports_load_no_nccl(
        monkeypatch: pytest.MonkeyPatch, transport: Literal["auto", "tcp", "shm", "rdma"]) -> None:
    """So that they take nothing of the GPU."""
    monkeypatch.setattr(nccl_setup, "load", None)
    assert choose(KvOptions(transport=transport), torch.device("cuda"), PIECE) == (LinkOptions(transport), None)


def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transport: nccl cannot be used: the KV cache is on cpu"):
        choose(KvOptions(transport="nccl"), torch.device("cpu"), PIECE)
