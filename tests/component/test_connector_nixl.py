"""The link over NIXL between real threads and sockets, with a driver that copies within this process, as it is told to.

With NIXL itself: ``tests/nixl``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from kv_ranks import BLOCK, REGIONS, DecodeRank, PrefillRank, content, key, push, until
from nixl_fake import Driver, Reader, World
from nixl_ranks import LIMITS, PATIENT, NixlProcess
from running_threads import until_none_runs

from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.bodies import NixlMemory, Offer
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport import offers
from xpyd_sidecar.transport.nixl import decode as nixl_decode
from xpyd_sidecar.transport.nixl import thread as nixl_thread
from xpyd_sidecar.transport.nixl.prefill import NixlLink

PIECE = 4096


@dataclass
class Stage:
    """Processes of one test; ended after its ranks."""

    world: World
    stack: ExitStack
    processes: list[NixlProcess] = field(default_factory=list)

    def process(self, **more: object) -> NixlProcess:
        self.processes.append(NixlProcess(self.world.driver(), **{"piece": PIECE, **more}))  # type: ignore[arg-type]
        return self.processes[-1]

    def prefill(self, process: NixlProcess | None = None, **more: object) -> PrefillRank:
        return self.stack.enter_context((process or self.process()).prefill(**more))

    def decode(self, process: NixlProcess | None = None, **more: object) -> DecodeRank:
        return self.stack.enter_context((process or self.process()).decode(**more))


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        one = Stage(World(), stack)
        yield one
        one.world.held = one.world.held_pieces = one.world.never_ends = False
    for process in one.processes:
        process.stop()
    until_none_runs("xpyd-nixl")
    assert one.world.misuse == []
    assert one.world.alive == 0


def under_way(stage: Stage, p: PrefillRank, d: DecodeRank) -> None:
    """One load has gone well, and the reads of a second one are held."""
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    until(lambda: not p.store.used and not stage.processes[0].hub._offers)
    stage.world.held = True
    push(p, "b")
    d.load("b", key("b"), p, first=0, count=4)
    d.wait(lambda: stage.processes[0].hub._offers)


def whole(d: DecodeRank, count: int = 4) -> bool:
    return d.cache == {(region, 100 + n): content(region, n, d.block) for region in range(REGIONS) for n in range(count)}


@pytest.mark.parametrize("cover", [True, False], ids=["covered", "bare"])
def test_a_piece_that_staging_memory_has_no_room_for_is_never_taken_in_part(stage: Stage, cover: bool) -> None:
    """A mistake of ours, which must not become wrong bytes; ``engine.worker_side`` makes chunks large enough."""
    block, piece = 64 << 10, 2 << 20  # of DecodeRank a chunk has 1 MiB
    p, d = (stage.prefill(stage.process(piece=piece), cover=cover, block=block),
            stage.decode(stage.process(piece=piece), cover=cover, block=block))
    push(p, count=24)
    d.load("r", key(), p, first=0, count=24)
    assert d.wait_outcomes() == [Outcome.PEER_LOST]
    assert d.cache == {}


@pytest.mark.parametrize("direct", [True, False], ids=["to their places", "staged"])
@pytest.mark.parametrize("cover", [True, False], ids=["covered", "bare"])
def test_blocks_are_read_in_pieces_of_one_session(stage: Stage, cover: bool, direct: bool) -> None:
    p, d = stage.prefill(cover=cover), stage.decode(cover=cover, direct=direct, chunks=2)
    for turn, which in enumerate("abc"):
        push(p, which, count=90)
        d.load(which, key(which), p, first=0, count=90)
        assert d.wait_outcomes(turn + 1) == [Outcome.OK] * (turn + 1)
        assert whole(d, 90)
    assert d.moved == {"nixl": 3 * REGIONS * 90 * BLOCK}
    assert max(size for _, size in stage.world.read) <= PIECE
    assert stage.world.alive == 1, "one agent for all of them"
    until(lambda: p.store.used == 0)
    assert [one.outcome for one in p.wait_reports(3)] == [Outcome.OK] * 3


def test_what_lies_outside_of_the_pool_goes_over_tcp(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    p, d = stage.prefill(store=None, sharing=None), stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    assert whole(d)
    assert set(d.moved) == {"tcp"}
    assert "over tcp: they do not lie in the memory that nixl reaches" in caplog.text


def test_prefills_agent_is_asked_for_news_only_while_somebody_reads(stage: Stage) -> None:
    p, d = stage.prefill(stage.process(limits=LIMITS)), stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    until(lambda: not p.store.used)
    assert stage.world.polls > 0

    def rests() -> bool:
        before = stage.world.polls
        time.sleep(0.3)
        return stage.world.polls == before

    until(rests)


def test_what_nixl_says_while_it_serves_ends_nobody_and_is_said_once_in_a_while(
        stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    p, d = stage.prefill(), stage.decode()
    stage.world.broken = "poll"
    began = time.monotonic()
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    time.sleep(0.3)
    until(lambda: 0 < caplog.text.count("cannot serve those who read from here") == stage.world.polls)
    assert stage.world.polls <= 2 + (time.monotonic() - began) / nixl_thread.PAUSE_S
    assert stage.processes[0].hub.thread.words == ""


def test_who_insists_reads_from_who_does_not_on_one_host(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    p, d = stage.prefill(stage.process(transport="auto")), stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    assert set(d.moved) == {"nixl"}
    assert "over nixl\n" in caplog.text


def test_bytes_that_prefill_has_given_to_something_else_are_never_taken(stage: Stage) -> None:
    """Checksums are off: only the ticket tells. Prefill gives the session up and changes its memory before it is read."""
    p, d = stage.prefill(cover=False), stage.decode(cover=False)
    push(p)
    stage.world.held = False
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    process = stage.processes[0]
    until(lambda: not p.store.used and not process.hub._offers)
    stage.world.held = True
    push(p, "b")
    d.load("b", key("b"), p, first=0, count=4)
    d.wait(lambda: process.hub._offers)
    for peer in list(p.sender._peers.values()):
        peer.way.close()  # the ticket is wiped, and the copies are free
    process.memory[:] = b"x" * len(process.memory)
    stage.world.held = False
    assert d.wait_outcomes(2)[1] is Outcome.PEER_LOST
    assert d.moved == {"nixl": REGIONS * 4 * BLOCK}
    until(lambda: stage.world.alive == 0)


def test_bytes_that_changed_on_their_way_end_the_session(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(direct=True)
    memory = stage.processes[0].memory

    def spoil(address: int, size: int) -> None:
        if size > 32:
            memory[7] ^= 1
            stage.world.before = None

    push(p)
    stage.world.before = spoil
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.CHECKSUM]
    assert d.cache == {}
    until(lambda: stage.world.alive == 0)


def test_a_load_that_is_given_up_frees_its_slot_when_the_read_has_ended_and_no_sooner(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(direct=True)
    under_way(stage, p, d)
    before = bytes(d.memory[0])
    d.abandon("b")
    time.sleep(0.2)
    assert p.store.used > 0, "prefill keeps what may still be read"
    stage.world.held = False
    until(lambda: not p.store.used)
    assert bytes(d.memory[0]) == before
    push(p, "c")
    d.load("c", key("c"), p, first=0, count=4)
    assert d.wait_outcomes(3)[2] is Outcome.OK


def test_reads_that_never_end_cost_their_session_and_no_other(stage: Stage) -> None:
    """The peer's memory is silent though its session lives; another pair goes on meanwhile."""
    stuck = World()
    p, d = stage.prefill(), stage.decode()
    far = NixlProcess(stuck.driver(), piece=PIECE, limits=PATIENT._replace(silence_s=LIMITS.silence_s))
    q, e = stage.stack.enter_context(far.prefill()), stage.stack.enter_context(far.decode())
    try:
        push(q)
        e.load("a", key(), q, first=0, count=4)
        assert e.wait_outcomes() == [Outcome.OK]
        stuck.held = True
        push(q, "b")
        began = time.monotonic()
        e.load("b", key("b"), q, first=0, count=4)
        for turn, which in enumerate("abcd"):
            push(p, which)
            d.load(which, key(which), p, first=0, count=4)
            assert d.wait_outcomes(turn + 1) == [Outcome.OK] * (turn + 1)
        assert e.wait_outcomes(2)[1] is Outcome.PEER_LOST
        assert time.monotonic() - began > LIMITS.silence_s
        until(lambda: stuck.alive == 0 and not q.store.used)
    finally:
        q.sender.stop()
        e.receiver.stop()
        far.stop()


def test_reads_of_a_session_that_has_ended_are_waited_for_and_a_later_one_needs_no_room(stage: Stage) -> None:
    """Until they are over, or for ``linger_s``; and of eight sessions at most."""
    one = stage.process(limits=PATIENT._replace(sessions=1, linger_s=60))
    p, d = stage.prefill(), stage.decode(one)
    stage.world.held_pieces = True
    for turn in range(10):
        for region in range(REGIONS):
            p.copy(key("a", turn + 1), region, 0, [content(region, n) for n in range(4)])
        d.load(f"{turn}", key("a", turn + 1), p, first=0, count=4)
        d.wait(lambda: any(session.pieces for session in one.hub._joined.values()))
        d.receiver._loop.post(lambda: [source.link.mistaken(ValueError()) for source in list(d.receiver._sources.values())])
        assert d.wait_outcomes(turn + 1)[turn] is Outcome.PEER_LOST
    until(lambda: stage.world.alive == 8)
    assert len(one.hub._lingering) == 8
    stage.world.held_pieces = False
    until(lambda: stage.world.alive == 0 and not one.hub._lingering)


def test_memory_of_a_session_whose_agent_cannot_be_ended_is_never_given_back(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    stage.world.never_ends = True
    hub = stage.processes[1].hub
    for source in list(d.receiver._sources.values()):
        d.receiver._loop.post(lambda source=source: source.link.mistaken(ValueError()))
    until(lambda: hub._unfenced)
    assert len(hub._unfenced[0].slots) == 8 * PIECE + 32
    hub._unfenced[0].reader.end = lambda: None  # type: ignore[union-attr,method-assign]
    stage.world.alive = 0


@pytest.mark.parametrize(("broken", "why"), [
    ("reach", "no backend reaches it"), ("done", "nixlRemoteDisconnectError"), ("read", "nixlRemoteDisconnectError")])
def test_who_insists_refuses_what_cannot_be_reached_with_the_reason(stage: Stage, broken: str, why: str) -> None:
    p, d = stage.prefill(), stage.decode()
    stage.world.broken = broken
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.INCOMPATIBLE]
    assert f"transport rdma: nixl: FakeError: {why}" in d.finished[0].reason


@pytest.mark.parametrize(("broken", "way", "why"), [
    ("", "nixl", "not on one host"),
    ("reach", "tcp", "not on one host; nixl: FakeError: no backend reaches it")])
def test_who_does_not_insist_takes_what_there_is_between_hosts_and_says_why(
        stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, broken: str, way: str, why: str
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(link_choice, "apart", lambda *_: "not on one host")
    p, d = stage.prefill(stage.process(transport="auto")), stage.decode(stage.process(transport="auto"))
    stage.world.broken = broken
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    assert set(d.moved) == {way}
    assert f"come over {way} ({why})" in caplog.text
    assert f"go over {way} ({why})" in caplog.text


def test_within_a_host_who_does_not_insist_takes_memory(stage: Stage) -> None:
    p, d = stage.prefill(stage.process(transport="auto")), stage.decode(stage.process(transport="auto"))
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    assert set(d.moved) == {"shm"}
    assert stage.world.alive == 0


def test_a_peer_that_does_not_answer_is_given_up_before_a_loads_own_deadline(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(stage.process(limits=LIMITS))
    stage.world.held = True
    push(p)
    began = time.monotonic()
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.PEER_LOST]
    assert time.monotonic() - began > LIMITS.open_s


def test_while_an_agent_is_made_here_no_peer_is_called_silent(
        skip: Callable[[float], None], stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one that it is made for nor another one; both answer a moment after it."""
    long = {"timeout_s": 600.0}
    p, q, d = stage.prefill(**long), stage.prefill(**long), stage.decode(**long)
    under_way(stage, p, d)
    d.wait(lambda: any(session.pieces for session in stage.processes[2].hub._joined.values()))

    def answered() -> None:
        stage.world.held = False

    def slowly(*given: object) -> Reader:
        skip(1.5 * PATIENT.open_s)  # so long this takes
        threading.Timer(0.1, answered).start()
        return Reader(stage.world, *given[1:])  # type: ignore[arg-type]

    monkeypatch.setattr(Driver, "reader", slowly)
    push(q, "c")
    d.load("c", key("c"), q, first=0, count=4)
    assert d.wait_outcomes(3) == [Outcome.OK] * 3


@pytest.mark.parametrize("changed", [
    {"metadata": b"garbage"}, {"metadata": bytes(40 << 10)}, {"metadata": b""}, {"ticket": b"\2" * 32},
    {"agent": "another"}])
def test_a_peer_that_shows_what_is_not_so_is_refused(
        stage: Stage, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object]) -> None:
    p, d = stage.prefill(), stage.decode()
    shown = NixlLink.shown

    def wrong(link: NixlLink) -> NixlMemory:
        true = shown(link)
        return NixlMemory(**{name: getattr(true, name) for name in true.__struct_fields__} | changed)

    monkeypatch.setattr(NixlLink, "shown", wrong)
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.INCOMPATIBLE]
    assert d.cache == {}
    until(lambda: stage.world.alive == 0)


def test_more_sessions_than_are_allowed_are_refused_by_name(stage: Stage) -> None:
    one = stage.process(limits=PATIENT._replace(sessions=1))
    p, q, d = stage.prefill(), stage.prefill(), stage.decode(one)
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.OK]
    push(q)
    d.load("b", key("b"), q, first=0, count=4)
    assert d.wait_outcomes(2)[1] is Outcome.INCOMPATIBLE
    assert "too many sessions" in d.finished[1].reason


def test_a_transfer_of_many_pieces_lets_other_connections_have_their_turn(
        stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    pump = nixl_decode.NixlTaker._pump

    def counted(taker: nixl_decode.NixlTaker) -> None:
        before = len(taker._offers)
        pump(taker)
        placed.append(before - len(taker._offers))

    monkeypatch.setattr(nixl_decode.NixlTaker, "_pump", counted)
    p, d = stage.prefill(), stage.decode(direct=True)
    push(p, count=90)
    d.load("a", key(), p, first=0, count=90)
    assert d.wait_outcomes() == [Outcome.OK]
    assert max(placed) <= nixl_decode.PLACED_AT_ONCE


@pytest.mark.parametrize(("shift", "size", "why"), [
    (16 << 20, 0, "outside of its memory"), (-(16 << 20), 0, "outside of its memory"),
    (0, PIECE, "bytes and 0 pieces before")])
def test_an_offer_outside_of_the_memory_or_too_large_is_a_protocol_error(
        stage: Stage, monkeypatch: pytest.MonkeyPatch, shift: int, size: int, why: str) -> None:
    def wrong(address: int, length: int, checksum: int | None, within: object = None) -> Offer:
        return Offer(address + shift, length + size, checksum)

    monkeypatch.setattr(offers, "bodies", SimpleNamespace(Offer=wrong, body=bodies.body))
    p, d = stage.prefill(), stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.PROTOCOL]
    assert why in d.finished[0].reason
    assert not [size for _, size in stage.world.read if size != 32]


def test_a_side_without_nixl_is_named(stage: Stage) -> None:
    without = LinkOptions("rdma", no_nixl="the package nixl cannot be loaded")
    p, d = stage.prefill(ways=without, reading=None), stage.decode()
    push(p)
    d.load("a", key(), p, first=0, count=4)
    assert d.wait_outcomes() == [Outcome.INCOMPATIBLE]
    assert "transport rdma: nixl: the package nixl cannot be loaded at prefill" in d.finished[0].reason
