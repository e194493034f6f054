"""The link over NIXL between real threads and sockets, with a driver that copies within this process, as it is told to.

With NIXL itself: ``tests/nixl``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
from manifest_ranks import HEAD, HEADS, LAYERS, DecodeRank, PrefillRank, key, wait_until
from nixl_fake import Driver, Reader, World
from nixl_ranks import LIMITS, PATIENT, NixlProcess
from running_threads import until_none_runs

from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.manifests import Manifest
from xpyd_sidecar.kv.reads import READ_BYTES, READS
from xpyd_sidecar.kv.receiving import Cancel, Confirm
from xpyd_sidecar.kv.session_bodies import NixlMemory
from xpyd_sidecar.session.stored_copy import StoredCopy
from xpyd_sidecar.transport.links import NoLink
from xpyd_sidecar.transport.nixl import reading as nixl_reading
from xpyd_sidecar.transport.nixl import thread as nixl_thread
from xpyd_sidecar.transport.nixl.fetch import NixlFetchLink
from xpyd_sidecar.transport.nixl.serve import NixlServer

IDS = (9, 3, 4, 5, 30, 31)


@dataclass
class Stage:
    """Processes and ranks of one test."""

    world: World
    stack: ExitStack
    processes: list[NixlProcess] = field(default_factory=list)

    def process(self, world: World | None = None, **more: Any) -> NixlProcess:
        self.processes.append(NixlProcess((world or self.world).driver(), **more))
        return self.processes[-1]

    def prefill(self, process: NixlProcess | None = None, **more: Any) -> PrefillRank:
        made = (process or self.process()).prefill(**more)
        self.stack.callback(made.stop)
        return made

    def decode(self, process: NixlProcess | None = None, **more: Any) -> DecodeRank:
        made = (process or self.process()).decode(**more)
        self.stack.callback(made.stop)
        return made


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        one = Stage(World(), stack)
        yield one
        one.world.held = one.world.held_pieces = one.world.never_ends = False
        one.world.stopped.clear()
    for process in one.processes:
        process.stop()
    until_none_runs("xpyd-nixl")
    assert one.world.misuse == []
    assert one.world.alive == 0


def load(p: PrefillRank, d: DecodeRank, number: int = 1, ids: tuple[int, ...] = IDS) -> None:
    """A transfer from start to end."""
    d.want(key(number), p, ids)
    p.compute(key(number), 0, len(ids))
    wait_until(lambda: d.has(key(number), 0, len(ids)) or any(one.key == key(number) for one in d.broken))
    assert not [one.reason for one in d.broken if one.key == key(number)]
    assert d.right(key(number), 0, ids)
    d.receiver.carry_out(Confirm(key(number), 0, LAYERS * len(ids) * HEADS * HEAD))
    wait_until(lambda: not p.store.used_bytes and not p.machine.open)


def under_way(stage: Stage, p: PrefillRank, d: DecodeRank, number: int = 2) -> None:
    """One load has gone well, and the reads of a second one are held."""
    load(p, d)
    stage.world.held = True
    d.want(key(number), p, IDS)
    p.compute(key(number), 0, len(IDS))
    wait_until(lambda: reading(d))


def reading(d: DecodeRank) -> bool:
    """Whether any bytes are being read for a rank."""
    return any(one.handles for link in links(d) for one in link._hub._reading._orders.values())


def links(d: DecodeRank) -> list[NixlFetchLink]:
    found = [one.fetches for one in d.receiver._numbers.values()]
    return [one for one in found if isinstance(one, NixlFetchLink)]


def end_sessions(d: DecodeRank, reason: str = "it ends") -> None:
    for session in list(d.receiver._numbers.values()):
        session.idle = True  # as when nobody needs it
        session.link.post(partial(session.link.close, PeerGone(session.link.peer, reason)))


# --- blocks ---


@pytest.mark.parametrize("decode", [{}, {"head": 1, "heads": 2}, {"ring": 1 << 20}, {"piece": 2048}, {"cover": False},
                                    {"ring": 16384, "piece": 1024, "head": 1, "heads": 2}])
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_blocks_are_read_to_their_places_by_one_agent(stage: Stage, decode: dict[str, Any], layers: int) -> None:
    p, d = stage.prefill(), stage.decode(**decode)
    for number in range(3):
        d.want(key(number), p, IDS)
        p.compute(key(number), 0, 4, layers=layers)
        p.compute(key(number), 4, 2, layers=layers)
        wait_until(lambda number=number: d.has(key(number), 0, 6))
        assert d.right(key(number), 0, IDS)
        wait_until(lambda: not p.store.used_bytes)
    assert d.links == {"nixl"}
    assert stage.world.made == 1
    assert d.machine.ring.used_bytes == 0


def test_what_is_fetched_ahead_is_read_into_the_buffer(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(buffer=1 << 20)
    d.want(key(), p, None, whole=6, ahead=True)
    p.compute(key(), 0, 6)
    wait_until(lambda: not p.store.used_bytes)
    assert d.machine.buffer.bytes_in_use[0]
    assert not d.caches[0].any()
    d.want(key(), p, IDS, whole=6)
    wait_until(lambda: d.has(key(), 0, 6))
    assert d.right(key(), 0, IDS)
    wait_until(lambda: d.machine.buffer.bytes_in_use == (0, 0))


def test_many_transfers_of_many_peers_go_through_few_slots(stage: Stage) -> None:
    """Forty ranks of prefill at one of decode, more than there were ever agents for."""
    d = stage.decode(stage.process(slots=4 * READ_BYTES), blocks=256)
    sources = [stage.prefill(store_bytes=64 << 10) for _ in range(40)]
    for number, p in enumerate(sources):
        d.want(key(number), p, tuple(range(number * 6, number * 6 + 6)))
        p.compute(key(number), 0, 6, layers=1)
    wait_until(lambda: all(d.has(key(number), 0, 6) for number in range(40)), 60)
    assert all(d.right(key(number), 0, tuple(range(number * 6, number * 6 + 6))) for number in range(40))
    assert stage.world.made == 1
    assert d.links == {"nixl"}


def test_an_order_of_many_reads_is_whole(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.transport.nixl.fetch.READ_BYTES", 1000)
    p, d = stage.prefill(), stage.decode()
    load(p, d)
    assert max(size for _, size in stage.world.read) <= 1000
    assert len(stage.world.read) > LAYERS * 6


# --- what may be believed ---


def test_bytes_that_prefill_has_given_to_something_else_are_never_taken(stage: Stage) -> None:
    """Sums are off: only the ticket tells. Prefill gives the session up and changes its memory before it is read."""
    p, d = stage.prefill(cover=False), stage.decode(cover=False)
    under_way(stage, p, d)
    before = [cache.copy() for cache in d.caches]
    p.publisher._me = p.me._replace(incarnation=Incarnation("9" * 32))  # there is no second session
    for session in list(p.publisher._sessions.values()):
        assert session.serves is not None
        session.serves.close()  # the ticket is wiped, as at the end of a session that decode has not heard of
    p.shared.copies[:] = b"x" * len(p.shared.copies)
    stage.world.held = False
    wait_until(lambda: d.outcomes() == [Outcome.INCARNATION])
    assert [size for _, size in stage.world.read[-2:]][1] == 32, "the ticket was looked at after the bytes"
    assert all((cache == old).all() for cache, old in zip(d.caches, before, strict=True))


def test_a_ticket_that_was_read_before_says_nothing(stage: Stage) -> None:
    p, d = stage.prefill(cover=False), stage.decode(cover=False)
    load(p, d)
    before = [cache.copy() for cache in d.caches]
    stage.world.hollow = True
    d.want(key(2), p, (40, 41))
    p.compute(key(2), 0, 2)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert "other memory is where its ticket was" in d.broken[0].reason
    assert all((cache == old).all() for cache, old in zip(d.caches, before, strict=True))


def test_bytes_that_changed_on_their_way_end_the_session_and_the_load(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()

    def spoil(address: int, size: int) -> None:
        if size > 32:
            p.shared.copies[p.store.round_up(7)] ^= 1
            stage.world.before = None

    stage.world.before = spoil
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.outcomes() == [Outcome.CHECKSUM])
    assert not d.has(key(), 0, 6)


@pytest.mark.parametrize("changed", [
    {"metadata": b"garbage"}, {"metadata": bytes(40 << 10)}, {"metadata": b""}, {"ticket": b"\2" * 32},
    {"agent": "another"}])
def test_a_peer_that_shows_what_is_not_so_is_refused(
        stage: Stage, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object]) -> None:
    p, d = stage.prefill(), stage.decode()
    shown = NixlServer.descriptor

    def wrong(server: NixlServer, cell: int) -> NixlMemory:
        true = shown(server, cell)
        return NixlMemory(**{name: getattr(true, name) for name in true.__struct_fields__} | changed)

    monkeypatch.setattr(NixlServer, "descriptor", wrong)
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert not any(cache.any() for cache in d.caches)


def test_a_peer_that_shows_another_description_of_an_agent_that_is_known_is_refused(
        stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q, d = stage.prefill(), stage.prefill(), stage.decode()
    load(p, d)
    (known,) = [peer.memory for peer in stage.processes[2].hub._reading._peers.values()]
    shown = NixlServer.descriptor
    monkeypatch.setattr(NixlServer, "descriptor", lambda server, cell: NixlMemory(
        **{name: getattr(shown(server, cell), name) for name in known.__struct_fields__} | {"agent": known.agent}))
    d.want(key(2), q, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert "not the one that this agent had before" in d.broken[0].reason
    load(p, d, 3)


def test_who_shows_the_description_of_another_that_is_known_harms_nobody(
        stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q, d = stage.prefill(), stage.prefill(), stage.decode()
    load(p, d)
    (known,) = [peer.memory for peer in stage.processes[2].hub._reading._peers.values()]
    shown, liar = NixlServer.descriptor, stage.processes[1].server
    monkeypatch.setattr(NixlServer, "descriptor", lambda server, cell: shown(server, cell) if server is not liar else
                        msgspec.structs.replace(known, agent="nobody's"))
    d.want(key(2), q, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert "is of another agent" in d.broken[0].reason
    load(p, d, 3)


@pytest.mark.parametrize("shift", [1 << 20, -(1 << 20), 1 << 50])
def test_a_manifest_outside_of_the_store_is_a_protocol_error(
        stage: Stage, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    true = StoredCopy.manifest

    def wrong(copy: StoredCopy, number: int) -> Manifest:
        told = true(copy, number)
        return msgspec.structs.replace(told, offset=told.offset + shift)

    monkeypatch.setattr(StoredCopy, "manifest", wrong)
    p, d = stage.prefill(cover=False), stage.decode(cover=False)
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.outcomes() == [Outcome.PROTOCOL])
    assert not [size for _, size in stage.world.read if size != 32]


# --- ends, and what cannot be stopped ---


def test_a_load_that_is_given_up_lets_its_reads_end_where_they_were_to(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()
    under_way(stage, p, d)
    before = [cache.copy() for cache in d.caches]
    want = d.want(key(2), p, IDS)
    d.receiver.close(want.request)
    d.receiver.carry_out(Cancel(key(2), 0, Outcome.ABORTED, "over"))
    wait_until(lambda: d.receiver.is_settled(want.request))
    assert stage.processes[1].hub._reading._machine._slots.used_bytes == READ_BYTES
    stage.world.held = False
    wait_until(lambda: not stage.processes[1].hub._reading._machine._slots.used_bytes)
    assert all((cache == old).all() for cache, old in zip(d.caches, before, strict=True))
    load(p, d, 3)


def test_reads_that_never_end_cost_their_session_and_no_other(stage: Stage) -> None:
    """The peer's memory is silent though its session lives; another pair goes on meanwhile."""
    one = stage.process(limits=PATIENT._replace(silence_s=4.0))
    p, q, d = stage.prefill(), stage.prefill(), stage.decode(one)
    load(p, d)
    load(q, d, 2)
    stage.world.stopped.add(stage.processes[1].server._agent)  # type: ignore[union-attr]
    began = time.monotonic()
    d.want(key(3), p, (40, 41))
    p.compute(key(3), 0, 2)
    number = 4
    while not d.broken:
        load(q, d, number)
        number += 1
    assert time.monotonic() - began > 4.0
    assert [one.key for one in d.broken] == [key(3)]
    assert d.outcomes() == [Outcome.PEER_LOST]
    assert number > 6, "others wait for the one that is stuck"
    assert stage.world.made == 1


def test_what_is_stuck_keeps_its_slot_until_the_agent_ends_and_others_lose_nothing(stage: Stage) -> None:
    one = stage.process(limits=PATIENT._replace(silence_s=2.0, fence_s=4.0))
    p, q, d = stage.prefill(), stage.prefill(), stage.decode(one)
    load(p, d)
    load(q, d, 2)
    stuck = stage.processes[1].server._agent  # type: ignore[union-attr]
    stage.world.stopped.add(stuck)
    d.want(key(3), p, (40, 41))
    p.compute(key(3), 0, 2)
    machine = one.hub._reading._machine
    wait_until(lambda: machine.stuck_reads)
    assert machine._slots.used_bytes
    number = 4
    while stage.world.made == 1:
        load(q, d, number)
        number += 1
    assert stage.world.alive == 1
    wait_until(lambda: not machine.stuck_reads)
    assert {broken.key for broken in d.broken} == {key(3)}
    stage.world.stopped.clear()
    load(q, d, number)


def test_the_agent_ends_when_a_quarter_of_the_slots_is_stuck_and_reads_of_others_are_made_again(stage: Stage) -> None:
    """Three peers are stuck with eight reads each, beside one whose reads are held up, but not stuck."""
    one = stage.process()
    sources = [stage.prefill(store_bytes=4 << 20) for _ in range(4)]
    d = stage.decode(one, piece=1024, blocks=128)
    for number, p in enumerate(sources):
        load(p, d, number)
    stage.world.held_pieces = True
    for number, p in enumerate(sources):
        d.want(key(number + 10), p, tuple(range(number * 10, number * 10 + 10)))
        p.compute(key(number + 10), 0, 10)
    reading_now = one.hub._reading
    wait_until(lambda: sum(bool(order.handles) for order in reading_now._orders.values()) == 4 * 8)
    good = sources[3].publisher.address
    for session in list(d.receiver._numbers.values()):
        if session.place[0] != good:
            session.link.post(partial(session.link.close, PeerGone(session.link.peer, "it ends")))
    wait_until(lambda: stage.world.made == 2)
    assert READS // 4 <= 3 * 8
    stage.world.held_pieces = False
    wait_until(lambda: all(d.has(key(number + 10), 0, 10) for number in range(4)))
    assert all(d.right(key(number + 10), 0, tuple(range(number * 10, number * 10 + 10))) for number in range(4))
    assert d.broken == []


def test_an_agent_that_cannot_be_ended_reads_no_more_and_gives_nothing_back(
        stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    one = stage.process(limits=PATIENT._replace(fence_s=0.3))
    p, q, d = stage.prefill(), stage.prefill(), stage.decode(one)
    load(p, d)
    stage.world.stopped.add(stage.processes[1].server._agent)  # type: ignore[union-attr]
    want = d.want(key(2), p, IDS)
    p.compute(key(2), 0, 6)
    wait_until(lambda: reading(d))
    stage.world.never_ends = True
    d.receiver.close(want.request)
    d.receiver.carry_out(Cancel(key(2), 0, Outcome.ABORTED, "over"))
    end_sessions(d)
    wait_until(lambda: "nothing is read over NIXL until it has" in caplog.text)
    assert one.hub._reading._machine._slots.used_bytes
    d.want(key(3), q, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert "the agent before lives on" in d.broken[0].reason
    assert stage.world.made == 1
    stage.world.never_ends = False
    wait_until(lambda: not one.hub._reading._machine._slots.used_bytes)
    load(q, d, 4)
    assert caplog.text.count("nothing is read over NIXL until it has") == 1
    assert stage.world.made == 2


def test_a_session_that_ends_while_it_is_reached_leaves_nothing(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()
    stage.world.held = True
    d.want(key(), p, IDS)
    wait_until(lambda: stage.processes[1].hub._reading._peers)
    end_sessions(d)
    wait_until(d.outcomes)
    stage.world.held = False
    wait_until(lambda: not stage.processes[1].hub._reading._peers)
    assert len(stage.processes[1].hub._reading._cells) == 4096


# --- the handshake ---


@pytest.mark.parametrize(("broken", "why"), [
    ("reach", "no backend reaches it"), ("done", "nixlRemoteDisconnectError"), ("prepare", "NIXL_ERR_NOT_FOUND"),
    ("begin", "nixlRemoteDisconnectError"), ("reader", "NIXL_ERR_BACKEND")])
def test_who_insists_refuses_what_cannot_be_reached_with_the_reason(stage: Stage, broken: str, why: str) -> None:
    p, d = stage.prefill(), stage.decode()
    stage.world.broken = broken
    d.want(key(), p, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert f"transport rdma: nixl: FakeError: {why}" in d.broken[0].reason


@pytest.mark.parametrize("broken", ["begin", "done"])
def test_reads_that_fail_end_the_session_and_are_made_again_over_the_next(stage: Stage, broken: str) -> None:
    p, d = stage.prefill(), stage.decode()
    load(p, d)
    session = next(iter(d.receiver._numbers))
    stage.world.broken = broken
    d.want(key(2), p, IDS)
    p.compute(key(2), 0, 6)
    wait_until(lambda: session not in d.receiver._numbers)
    stage.world.broken = ""
    wait_until(lambda: d.has(key(2), 0, 6) or d.outcomes())
    if d.outcomes():  # the next one began before it was mended
        assert "nixlRemoteDisconnectError" in d.broken[0].reason
        return
    assert d.right(key(2), 0, IDS)


def test_who_insists_reads_from_who_does_not_on_one_host(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    p, d = stage.prefill(transport="auto"), stage.decode()
    load(p, d)
    assert d.links == {"nixl"}


@pytest.mark.parametrize(("broken", "link", "why"), [
    ("", "nixl", "shm: not on one host"),
    ("reach", "tcp", "shm: not on one host; nixl: FakeError: no backend reaches it")])
def test_who_does_not_insist_takes_what_there_is_between_hosts_and_says_why(
        stage: Stage, caplog: pytest.LogCaptureFixture, *, broken: str, link: str, why: str) -> None:
    caplog.set_level("INFO")
    p, d = stage.prefill(transport="auto"), stage.decode(transport="auto", host="another")
    stage.world.broken = broken
    load(p, d)
    assert d.links == {link}
    assert f"come over {link} ({why})" in caplog.text
    assert f"fetches over {link} ({why})" in caplog.text


def test_within_a_host_who_does_not_insist_takes_memory(stage: Stage) -> None:
    p, d = stage.prefill(transport="auto"), stage.decode(transport="auto")
    load(p, d)
    assert d.links == {"shm"}
    assert stage.world.made == 0


def test_a_peer_that_does_not_answer_is_given_up_before_a_loads_own_deadline(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(stage.process(limits=LIMITS))
    stage.world.held = True
    began = time.monotonic()
    d.want(key(), p, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.PEER_LOST])
    assert time.monotonic() - began > LIMITS.open_s


def test_a_peer_that_does_not_answer_is_fetched_from_over_tcp_where_that_may_be(stage: Stage) -> None:
    p, d = stage.prefill(transport="auto"), stage.decode(stage.process(limits=LIMITS), transport="auto", host="another")
    stage.world.held = True
    load(p, d)
    assert d.links == {"tcp"}


def test_while_an_agent_is_made_here_no_peer_is_called_silent(
        skip: Callable[[float], None], stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Driver.reader

    def answer() -> None:
        stage.world.held = False

    def slowly(driver: Driver, regions: Any) -> Reader:
        skip(1.5 * PATIENT.open_s)  # so long this takes
        threading.Timer(0.1, answer).start()
        return made(driver, regions)

    monkeypatch.setattr(Driver, "reader", slowly)
    p, d = stage.prefill(timeout_s=600.0), stage.decode(timeout_s=600.0)
    stage.world.held = True
    d.want(key(), p, IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.has(key(), 0, 6) or d.broken, 600)
    assert d.right(key(), 0, IDS)


def test_a_side_without_nixl_is_named(stage: Stage) -> None:
    p = PrefillRank(transport="rdma", servers=lambda _: {"nixl": NoLink("nixl: no RDMA device is here at prefill")})
    stage.stack.callback(p.stop)
    d = stage.decode()
    d.want(key(), p, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert "transport rdma: nixl: no RDMA device is here at prefill" in d.broken[0].reason


def test_a_decode_without_nixl_is_named(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode(nixl="")
    d.want(key(), p, IDS)
    wait_until(lambda: d.outcomes() == [Outcome.INCOMPATIBLE])
    assert "nixl: decode has or wants none" in d.broken[0].reason


# --- who is read from ---


def test_prefills_agent_is_asked_for_news_only_while_somebody_reads(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_thread, "LINGER_POLL_S", 0.05)
    one = stage.process()
    p, d = stage.prefill(one), stage.decode()
    one.server.timeout_s = 0.3  # type: ignore[union-attr]
    load(p, d)
    assert stage.world.polls > 0

    def rests() -> bool:
        before = stage.world.polls
        time.sleep(0.3)
        return stage.world.polls == before

    wait_until(rests)
    load(p, d, 2)


def test_prefill_serves_from_when_decode_is_told_until_it_has_taken(
        stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RDMA, where reads wait for it; also where it was at rest, and as long as a read takes."""
    one = stage.process()
    reads = stage.process(limits=PATIENT._replace(silence_s=600.0))
    p, d = stage.prefill(one, timeout_s=600.0), stage.decode(reads, timeout_s=600.0)  # nobody says that he is alive
    stage.world.needs_target = True
    load(p, d)
    one.server.timeout_s = 0.0  # type: ignore[union-attr]
    one.hub._serve_until = one.hub._linger_until = 0.0
    monkeypatch.setattr(one.hub, "rest", partial(rests_long, one.hub))
    d.want(key(2), p, IDS)
    time.sleep(0.3)
    p.compute(key(2), 0, 6)
    wait_until(lambda: d.has(key(2), 0, 6))


def rests_long(hub: nixl_thread.NixlThread) -> float:
    return nixl_thread.POLL_S if hub._serving() else 1000.0


def test_what_nixl_says_while_it_serves_ends_nobody_and_is_said_once_in_a_while(
        stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    p, d = stage.prefill(), stage.decode()
    stage.world.broken = "poll"
    began = time.monotonic()
    load(p, d)
    time.sleep(0.3)
    wait_until(lambda: 0 < caplog.text.count("cannot serve those who read from here") == stage.world.polls)
    assert stage.world.polls <= 2 + (time.monotonic() - began) / nixl_thread.PAUSE_S
    assert stage.processes[0].hub.thread.words == ""


def test_sessions_that_end_give_their_tickets_back_and_leave_their_peers_known(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()
    server, reading_now = stage.processes[0].server, stage.processes[1].hub._reading
    assert server is not None
    for number in range(5):
        load(p, d, number)
        assert len(server.tickets._free) == 4095
        end_sessions(d)
        wait_until(lambda: not reading_now._peers)
        wait_until(lambda: len(server.tickets._free) == 4096)
    assert stage.world.reached == 1


def test_peers_that_are_not_read_any_more_end_the_agent_when_nothing_is_under_way(
        stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reading, "SPARE_PEERS", 3)
    d = stage.decode()
    sources = [stage.prefill() for _ in range(4)]
    for number, p in enumerate(sources[:3]):
        load(p, d, number)
    end_sessions(d)
    wait_until(lambda: not stage.world.alive)
    stage.world.held_pieces = True
    d.want(key(10), sources[3], (40, 41))
    sources[3].compute(key(10), 0, 2)
    for number, p in enumerate(sources[:3]):
        d.want(key(number + 20), p, None)
    wait_until(lambda: len(links(d)) == 4 and reading(d))
    for number in range(3):
        d.receiver.carry_out(Cancel(key(number + 20), 0, Outcome.ABORTED, "over"))
    wait_until(lambda: len(d.receiver._wants) == 1)
    for session in [one for one in d.receiver._numbers.values() if one.place != sources[3].place]:
        session.link.post(partial(session.link.close, PeerGone(session.link.peer, "it ends")))
    time.sleep(0.3)
    assert stage.world.made == 2, "something is under way"
    stage.world.held_pieces = False
    wait_until(lambda: d.has(key(10), 0, 2))
    stage.world.never_ends = True
    d.receiver.carry_out(Confirm(key(10), 0, LAYERS * 2 * HEADS * HEAD))
    wait_until(lambda: stage.processes[0].hub._reading.agent.unended)
    stage.world.never_ends = False
    wait_until(lambda: not stage.world.alive)
    load(sources[3], d, 11)


def test_a_peer_whose_reads_have_failed_is_made_known_again(stage: Stage) -> None:
    p, d = stage.prefill(), stage.decode()
    load(p, d)
    stage.world.broken = "done"
    d.want(key(2), p, IDS)
    p.compute(key(2), 0, 6)
    wait_until(d.outcomes)
    stage.world.broken = ""
    load(p, d, 3)
    assert stage.world.reached > 1
    assert stage.world.made == 1
