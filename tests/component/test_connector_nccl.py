"""The link over NCCL between real threads and sockets, with a scripted NCCL and host memory for GPUs.

Streams are done at once, or only when they have been asked a few times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from copies import after_looks, at_once
from manifest_ranks import HEAD, HEADS, LAYERS, DecodeRank, PrefillRank, key, wait_until
from nccl_fake import FakeNccl, HostDevice, OneRing, World

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.worker import nccl_setup
from xpyd_sidecar.engine.worker.nccl_setup import PIECE_BYTES, NcclLinks, most_bytes, nccl_links
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.groups import group_bytes
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.receiving import Cancel, Confirm
from xpyd_sidecar.kv.session_bodies import Gpu
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.transport.nccl import fetch as nccl_fetch
from xpyd_sidecar.transport.nccl.driver import Driver, fixed_bytes, load
from xpyd_sidecar.transport.nccl.thread import FLIGHT, NcclLimits, NcclThread, NcclUsage

PIECE = 4096
RING = 64 << 10
"""Of which a session has two fetches in flight."""
PATIENCE_S = 20.0
LIMITS = NcclLimits(groups=4, open_s=PATIENCE_S, move_s=PATIENCE_S, idle_s=60)
COUNT = 20
"""Blocks of a prompt."""
SIZE = LAYERS * COUNT * HEADS * HEAD


@dataclass
class Process:
    """What one engine process has: a GPU, a communicator thread."""

    world: World
    name: str
    limits: NcclLimits = LIMITS
    marks: Callable[[], CopyMark] = at_once
    nccl: str = "2.29.7"
    piece: int = PIECE
    one_gpu: bool = False
    links: NcclLinks = field(init=False)

    def __post_init__(self) -> None:
        driver = Driver(FakeNccl(self.world), HostDevice(self.name, self.marks), ctas=4, piece=self.piece,
                        groups=self.limits.groups, flight=FLIGHT)
        self.links = NcclLinks(NcclThread(driver, self.limits), Gpu(self.name, self.nccl, self.piece), self.one_gpu)

    @property
    def hub(self) -> NcclThread:
        return self.links.hub


@dataclass
class Stage:
    """Processes of one test; ended after its ranks."""

    world: World
    stack: ExitStack
    marks: Callable[[], CopyMark] = at_once
    processes: list[Process] = field(default_factory=list)

    def process(self, name: str, limits: NcclLimits = LIMITS, **more: Any) -> Process:
        self.processes.append(Process(self.world, name, limits, **{"marks": self.marks, **more}))
        return self.processes[-1]

    def prefill(self, process: Process | None = None, **more: Any) -> PrefillRank:
        links = (process or self.process("p")).links
        rank = PrefillRank(**{"transport": "nccl", "servers": lambda own: {"nccl": links.server(lambda: own.publisher.tcp)},
                              **more})
        self.stack.callback(rank.stop)
        return rank

    def decode(self, process: Process | None = None, **more: Any) -> DecodeRank:
        links = (process or self.process("d")).links
        rank = DecodeRank(**{"transport": "nccl", "blocks": 512, "ring": RING, "piece": PIECE, "gpu": links.gpu, **more,
                             "others": more.get("others", lambda own: {
                                 "nccl": links.fetching(OneRing(own), own.receiver.over_tcp)})})
        self.stack.callback(rank.stop)
        return rank


@pytest.fixture(params=[at_once, after_looks], ids=["at once", "late"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with ExitStack() as stack:
        one = Stage(World(), stack, request.param)
        yield one
        one.world.never_abort = False
    for process in one.processes:
        process.hub.stop()
    assert one.world.misuse == []
    wait_until(lambda: one.world.alive() == 0)  # every communicator was aborted, by threads of their own
    assert one.world.threads <= {"xpyd-nccl"}


def ids(number: int) -> tuple[int, ...]:
    """Where the blocks of a prompt belong."""
    return tuple(range(number * COUNT, number * COUNT + COUNT))


def begin(p: PrefillRank, d: DecodeRank, number: int = 1) -> None:
    """A prompt is asked for, and computed."""
    d.want(key(number), p, ids(number))
    p.compute(key(number), 0, COUNT)


def whole(d: DecodeRank, number: int = 1) -> bool:
    """Whether all of a prompt is in its blocks, once it has come."""
    wait_until(lambda: d.has(key(number), 0, COUNT))
    d.receiver.carry_out(Confirm(key(number), 0, SIZE))
    return d.right(key(number), 0, ids(number))


def patient(stage: Stage) -> None:
    """From now on no deadline is the point of the test."""
    for one in stage.processes:
        one.hub._machine._open_s, one.hub._machine._move_s = LIMITS.open_s, LIMITS.move_s


@pytest.mark.parametrize("cover", [True, False], ids=["covered", "bare"])
@pytest.mark.parametrize("heads", [(0, HEADS), (1, 2)], ids=["all heads", "some heads"])
def test_blocks_come_in_a_group_that_is_made_once(stage: Stage, heads: tuple[int, int], cover: bool) -> None:
    p, d = stage.prefill(cover=cover), stage.decode(head=heads[0], heads=heads[1], cover=cover)
    for number in (1, 2, 3):
        begin(p, d, number)
        assert whole(d, number)
    assert d.links == {"nccl"}
    assert stage.world.carried == 3 * SIZE * heads[1] // HEADS
    assert stage.world.minted == 1
    wait_until(lambda: len(p.publisher.take_reports()) or p.machine.open == 0)
    wait_until(lambda: p.store.used_bytes == 0)
    assert d.machine.ring.used_bytes == 0
    assert stage.processes[0].hub.usage.groups == 1


class Overlapped:
    """Marks of a GPU that has not done the second message when it gets the third one."""

    def __init__(self) -> None:
        self.made: list[Overlapped.Mark] = []

    class Mark:
        def __init__(self, made: list[Overlapped.Mark]) -> None:
            self.made = made
            made.append(self)

        def done(self) -> bool:
            return self is not next(iter(self.made[1:]), None) or len(self.made) > 2

    def __call__(self) -> CopyMark:
        return self.Mark(self.made)  # type: ignore[return-value]


@pytest.mark.parametrize("overlapped", [False, True], ids=["one after the other", "overlapped"])
@pytest.mark.parametrize("stage", [at_once], indirect=True)
def test_the_memory_of_groups_is_nccls_own_count_and_none_without_one(stage: Stage, overlapped: bool) -> None:
    p = stage.prefill(stage.process("p", **({"marks": Overlapped()} if overlapped else {})))
    d = stage.decode()
    for process in stage.processes:
        assert process.hub.usage == NcclUsage(0, 0), "slots are no group"
    begin(p, d)
    assert whole(d)
    wait_until(lambda: stage.processes[0].hub.usage == NcclUsage(1, 1_000_000))
    assert most_bytes(KvOptions(nccl_groups=1), PIECE) > fixed_bytes(PIECE, FLIGHT) + 1_000_000


def test_engines_that_open_to_each_other_at_once_both_go_on(stage: Stage) -> None:
    stage.world.open_after_s = 0.1
    a, b = stage.process("a"), stage.process("b")
    pa, da, pb, db = stage.prefill(a), stage.decode(a), stage.prefill(b), stage.decode(b)
    for p, d in ((pa, db), (pb, da)):
        begin(p, d)
    assert whole(da)
    assert whole(db)
    assert stage.world.minted == 2
    assert {*da.links, *db.links} == {"nccl"}


def test_a_group_that_is_never_made_costs_its_deadline_and_then_tcp(stage: Stage) -> None:
    stage.world.never_open = True
    p, d = stage.prefill(stage.process("p", LIMITS._replace(open_s=0.3))), stage.decode()
    for number in (1, 2):
        begin(p, d, number)
        assert whole(d, number)
    assert d.links == {"tcp"}
    assert stage.world.carried == 0
    assert stage.world.minted == 1, "the next group is tried after a while"
    assert d.outcomes() == []
    wait_until(lambda: stage.world.alive() == 0)


def test_a_new_group_is_tried_after_a_while(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_fetch, "RETRY_S", 0.0)
    stage.world.never_open = True
    p, d = stage.prefill(stage.process("p", LIMITS._replace(open_s=0.2))), stage.decode()
    begin(p, d)
    wait_until(lambda: stage.world.minted > 1)
    patient(stage)
    stage.world.never_open = False
    assert whole(d)
    begin(p, d, 2)
    assert whole(d, 2)
    assert "nccl" in d.links


@pytest.mark.parametrize("script", ["fails", "stuck"])
def test_what_is_lost_with_its_group_comes_by_another_session_and_nothing_else_is_lost(stage: Stage, script: str) -> None:
    limits = LIMITS._replace(move_s=2.0)
    p, d = stage.prefill(stage.process("p", limits)), stage.decode(stage.process("d", limits))
    setattr(stage.world, "fail_at" if script == "fails" else "stuck_at", 3)
    begin(p, d)
    assert whole(d)
    assert "tcp" in d.links, "no group is made at once"
    assert 0 < stage.world.carried < SIZE
    assert d.outcomes() == []
    assert stage.world.minted == 1
    stage.world.fail_at = stage.world.stuck_at = 0
    begin(p, d, 2)
    assert whole(d, 2)
    wait_until(lambda: p.store.used_bytes == 0 and d.machine.ring.used_bytes == 0)
    wait_until(lambda: all(one.hub.usage == NcclUsage(0, 0) for one in stage.processes))


def test_copies_and_ranges_are_kept_until_an_abort_is_complete(stage: Stage) -> None:
    limits = LIMITS._replace(move_s=0.3)
    p, d = stage.prefill(stage.process("p", limits)), stage.decode(stage.process("d", limits))
    stage.world.stuck_at, stage.world.never_abort = 1, True
    begin(p, d)
    assert whole(d), "over TCP"
    wait_until(lambda: p.machine.open == 0)
    time.sleep(0.2)
    assert p.store.used_bytes > 0, "the GPU may still read them"
    assert d.machine.ring.stuck_bytes > 0, "and write there"
    assert [one.hub.usage.groups for one in stage.processes] == [1, 1]
    stage.world.never_abort = False
    wait_until(lambda: p.store.used_bytes == 0)
    wait_until(lambda: d.machine.ring.used_bytes == 0)
    wait_until(lambda: all(one.hub.usage.groups == 0 for one in stage.processes))


def test_a_long_abort_holds_up_nobody_else(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_fetch, "RETRY_S", 0.0)
    stage.world.stuck_at, stage.world.never_abort = 1, True
    limits = LIMITS._replace(move_s=0.3)
    one, two = stage.process("p", limits), stage.process("d", limits)
    p, d = stage.prefill(one), stage.decode(two)
    begin(p, d)
    wait_until(lambda: d.machine.ring.stuck_bytes)
    stage.world.stuck_at = 0
    patient(stage)
    begin(p, d, 2)
    assert whole(d, 2)
    assert "nccl" in d.links
    assert stage.world.alive() > 2, "done while the first group was still being ended"
    stage.world.never_abort = False


def test_what_was_changed_on_its_way_is_noticed(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()
    stage.world.change = lambda message: message[7].bitwise_xor_(64)  # type: ignore[assignment,return-value]
    begin(p, d)
    wait_until(lambda: d.outcomes() == [Outcome.CHECKSUM])
    assert key() not in d.arrived
    stage.world.change = None
    begin(p, d, 2)
    assert whole(d, 2)


def test_groups_are_bounded_and_the_idle_one_makes_room(stage: Stage) -> None:
    d = stage.decode(stage.process("d", LIMITS._replace(groups=1)))
    ranks = [stage.prefill(stage.process(f"p{n}")) for n in range(3)]
    for number, p in enumerate(ranks):
        begin(p, d, number)
        assert whole(d, number)
    assert d.links == {"nccl"}
    assert d.outcomes() == []
    assert stage.world.minted == 3
    wait_until(lambda: stage.world.alive() == 2)


@pytest.mark.parametrize("full", ["prefill", "decode"])
def test_where_no_group_is_idle_blocks_take_tcp(stage: Stage, full: str) -> None:
    """The one that there may be is being made, for a peer that does not join."""
    few = LIMITS._replace(groups=1, open_s=60)
    limits = {"p0": few, "p1": few, "d0": few, "d1": few}
    if full == "prefill":
        prefills = [stage.prefill(stage.process("p0", limits["p0"]))] * 2
        decodes = [stage.decode(stage.process(f"d{n}", LIMITS._replace(open_s=60))) for n in range(2)]
    else:
        prefills = [stage.prefill(stage.process(f"p{n}", LIMITS._replace(open_s=60))) for n in range(2)]
        decodes = [stage.decode(stage.process("d0", limits["d0"]))] * 2
    stage.world.never_open = True
    begin(prefills[0], decodes[0], 1)
    wait_until(lambda: stage.world.alive() == 2)
    begin(prefills[1], decodes[1], 2)
    assert whole(decodes[1], 2)
    assert decodes[1].links == {"tcp"}
    assert not decodes[0].has(key(1), 0, 1)


def test_idle_groups_are_closed_by_decode_and_made_again(stage: Stage) -> None:
    limits = LIMITS._replace(idle_s=3.0)
    p, d = stage.prefill(stage.process("p", limits)), stage.decode(stage.process("d", limits))
    for number in (1, 2):
        begin(p, d, number)
        assert whole(d, number)
        wait_until(lambda: stage.world.alive() == 0)
    assert stage.world.minted == 2
    assert d.links == {"nccl"}
    assert d.outcomes() == []


def test_a_dead_prefill_leaves_no_group_behind(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()
    stage.world.stuck_at = 1
    begin(p, d)
    wait_until(lambda: any(one.call is not None for pair in stage.world.pairs.values() for one in pair.values()))
    p.stop()
    wait_until(lambda: d.outcomes() == [Outcome.PEER_LOST])
    wait_until(lambda: stage.processes[1].hub.usage.groups == 0)
    wait_until(lambda: d.machine.ring.used_bytes == 0)


def test_what_prefill_has_let_go_of_by_then_is_not_sent(stage: Stage) -> None:
    stage.world.never_open = True  # before decode has fetched anything
    p, d = stage.prefill(), stage.decode()
    begin(p, d)
    wait_until(lambda: stage.world.alive() == 2)
    seen: list[int] = []
    stage.world.change = lambda message: seen.append(int(message.count_nonzero()))
    d.receiver.carry_out(Cancel(key(), 0, Outcome.ABORTED, "its client has left"))
    wait_until(lambda: [one.outcome for one in p.publisher.take_reports()] == [Outcome.ABORTED])
    assert p.store.used_bytes == 0
    stage.world.never_open = False
    wait_until(lambda: d.machine.ring.used_bytes == 0)
    assert seen == [0, 0], "what it had begun to fetch is answered, with nothing"
    assert not d.caches[0].any()
    stage.world.change = None
    begin(p, d, 2)
    assert whole(d, 2)
    assert d.outcomes() == []
    assert stage.world.minted == 1


def test_a_try_that_prefill_ends_costs_no_other_one_its_session(stage: Stage) -> None:
    """Decode may have launched receives for it: they are answered."""
    stage.world.never_open = True
    p, d = stage.prefill(), stage.decode(ring=2 * RING)
    begin(p, d, 1)
    begin(p, d, 2)
    wait_until(lambda: stage.world.alive() == 2)
    p.publisher.release(key(1), Outcome.ABORTED, "its leg ended")
    wait_until(lambda: d.outcomes() == [Outcome.ABORTED])
    stage.world.never_open = False
    assert whole(d, 2)
    assert d.links == {"nccl"}
    assert d.outcomes() == [Outcome.ABORTED]


def test_what_is_fetched_before_there_are_blocks_comes_over_tcp_and_only_where_prefill_is_short(stage: Stage) -> None:
    p, d = stage.prefill(store_bytes=100 << 10), stage.decode(buffer=1 << 20)
    d.want(key(), p, None, whole=COUNT, ahead=True)
    p.compute(key(), 0, 10)
    time.sleep(0.2)
    assert d.machine.buffer.bytes_in_use == (0, 0), "it would come faster once there are blocks"
    p.compute(key(), 10, 10)
    wait_until(lambda: d.machine.buffer.bytes_in_use[0])
    assert stage.world.minted == 0
    d.want(key(), p, ids(1), whole=COUNT)
    assert whole(d)


def test_what_is_larger_than_a_slot_comes_over_tcp(stage: Stage) -> None:
    p, d = stage.prefill(stage.process("p", piece=2048)), stage.decode()
    begin(p, d)
    assert whole(d)
    assert d.links == {"tcp"}
    assert stage.world.minted == 0


@pytest.mark.parametrize(("ours", "theirs", "text"), [
    ("nccl", "tcp", "transport nccl: decode's transport is not nccl"),
    ("tcp", "nccl", "transport nccl: prefill has welcomed over tcp, which is not at decode"),
    ("nccl", "auto", "transport nccl: decode's transport is not nccl"),
    ("auto", "nccl", "prefill has welcomed over tcp, which is not at decode"),
])
def test_nccl_on_one_side_alone_is_refused(stage: Stage, ours: str, theirs: str, text: str) -> None:
    p = stage.prefill(**({"transport": ours, "servers": None} if ours != "nccl" else {}))
    d = stage.decode(**({"transport": theirs, "others": None, "gpu": None} if theirs != "nccl" else {}))
    begin(p, d)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert text in d.broken[0].reason
    assert d.broken[0].final


def test_two_ranks_on_one_gpu_are_refused(stage: Stage) -> None:
    p, d = stage.prefill(stage.process("p")), stage.decode(stage.process("p"))
    begin(p, d)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert "transport nccl: nccl: both on one GPU" in d.broken[0].reason
    assert stage.world.minted == 0


def test_two_ranks_on_one_gpu_are_taken_where_nccl_is_told_that_they_are_apart(stage: Stage) -> None:
    p, d = stage.prefill(stage.process("p", one_gpu=True)), stage.decode(stage.process("p"))
    begin(p, d)
    assert whole(d)


def test_two_versions_of_nccl_are_refused(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(stage.process("d", nccl="2.30.4"))
    begin(p, d)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert "transport nccl: nccl: version 2.29.7 at prefill, 2.30.4 at decode" in d.broken[0].reason


# --- what is set up ---


def test_without_a_gpu_there_is_no_driver() -> None:
    driver, version, reason = load(torch.device("cpu"), ctas=4, piece=PIECE, groups=1, flight=1)
    assert (driver, version) == (None, "")
    assert reason == "the KV cache is on cpu, not on a CUDA device"


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm", "rdma"])
def test_other_transports_load_no_nccl(
        monkeypatch: pytest.MonkeyPatch, transport: Literal["auto", "tcp", "shm", "rdma"]) -> None:
    """So that they take nothing of the GPU."""
    monkeypatch.setattr(nccl_setup, "load", None)
    assert nccl_links(KvOptions(transport=transport), torch.device("cuda"), []) is None


def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transport: nccl cannot be used: the KV cache is on cpu"):
        nccl_links(KvOptions(transport="nccl"), torch.device("cpu"), [])


@pytest.mark.parametrize(("arrays", "piece"), [
    ([], PIECE_BYTES), ([ArrayLayout(8, 16 << 10, 16)], PIECE_BYTES),
    ([ArrayLayout(1, 100, 1), ArrayLayout(128, 16_383, 16)], 128 * 16_384 * 16 - 128 * 16)])
def test_slots_have_room_for_a_run_of_blocks(monkeypatch: pytest.MonkeyPatch, arrays: list[ArrayLayout],
                                             piece: int) -> None:
    def scripted(device: torch.device, **sizes: int) -> tuple[Driver, str, str]:
        del device
        sizes["piece"], asked["piece"] = 4096, sizes["piece"]
        return Driver(FakeNccl(World()), HostDevice("gpu"), **sizes), "2.29.7", ""

    asked: dict[str, int] = {}
    monkeypatch.setattr(nccl_setup, "load", scripted)
    made = nccl_links(KvOptions(transport="nccl"), torch.device("cuda"), arrays)
    assert made is not None
    made.hub.stop()
    assert asked["piece"] == piece


def test_memory_of_the_link_is_known() -> None:
    assert most_bytes(KvOptions(nccl_groups=1)) == (32 << 20) + group_bytes(4)
