"""Links within one host: the way is agreed, bytes come as over TCP, and the death of either side leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import signal
import threading
import time
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kv_ranks
import pytest
from kv_ranks import REGIONS, TIMEOUT_S, DecodeRank, PrefillRank, content, key, push, until
from link_peers import DecodeProcess, PrefillProcess

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.session import decode_handshake, link_choice, prefill_link_choice
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport import gates, moves, moves_plain
from xpyd_sidecar.transport.link import Blocks, Session
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.shm import arena, process_vm
from xpyd_sidecar.transport.shm.arena import ArenaLink, ArenaReader
from xpyd_sidecar.transport.shm.process_vm import ProcessLink, ProcessReader
from xpyd_sidecar.transport.tcp import connection, placement
from xpyd_sidecar.transport.tcp.link import TcpLink
from xpyd_sidecar.transport.tcp.placement import PayloadPlace, packed

LINKS = ["tcp", "process_vm", "mapped", "arena"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=LINKS)
def ways(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LinkOptions:
    if request.param == "arena":
        forbid_process_vm(monkeypatch)
    if request.param == "mapped":
        monkeypatch.setattr(kv_ranks, "memory", kv_ranks.mapped_memory)
    return LinkOptions("tcp" if request.param == "tcp" else "shm", folder)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The links without what is compiled."""
    for module in (gates, process_vm, placement):
        monkeypatch.setattr(module, "Scatter", moves_plain.Scatter)
    for name, value in {"send": moves_plain.send, "sums": moves_plain.sums, "COMPILED": False}.items():
        monkeypatch.setattr(moves, name, value)


def forbid_process_vm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessReader, "probe", lambda _: "process_vm_readv: Operation not permitted")


def whole(d: DecodeRank, count: int = 4) -> bool:
    return d.cache == {(region, 100 + n): content(region, n, d.block) for region in range(REGIONS) for n in range(count)}


def sockets_and_arenas() -> set[str]:
    """Those that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # what has listed them
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {one for one in found if one.startswith("socket:") or arena.PREFIX in one}


def name_of(ways: LinkOptions, request: Any) -> str:
    return str(request.node.callspec.params["ways"])


@pytest.mark.unsanitized
@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("direct", [True, False], ids=["in place", "staged"])
def test_links_work_without_what_is_compiled(ways: LinkOptions, direct: bool) -> None:
    with (PrefillRank(ways=ways, block=100_000, keep_bytes=8 << 20) as p,
          DecodeRank(ways=ways, direct=direct, block=100_000) as d):
        push(p, count=12)
        d.load("r", key(), p, first=0, count=12)
        assert d.wait_outcomes() == [Outcome.OK]
        assert whole(d, 12)


@pytest.mark.parametrize("direct", [True, False], ids=["in place", "staged"])
@pytest.mark.parametrize("cover", [True, False], ids=["covered", "bare"])
def test_bytes_come_over_every_link(ways: LinkOptions, direct: bool, cover: bool, request: pytest.FixtureRequest) -> None:
    with PrefillRank(ways=ways, cover=cover) as p, DecodeRank(ways=ways, direct=direct, cover=cover) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        assert whole(d)
        assert d.moved == {name_of(ways, request): REGIONS * 4 * 1000}
        assert p.wait_reports()[0].size == REGIONS * 4 * 1000
        assert p.sender.store.used == 0


@pytest.mark.parametrize("direct", [True, False], ids=["in place", "staged"])
def test_large_loads_with_little_room(ways: LinkOptions, direct: bool) -> None:
    """Two chunks of staging, an arena of 16 slots, and far more bytes than both."""
    size = 1 << 20
    with (PrefillRank(keep_bytes=128 << 20, block=size, ways=ways) as p,
          DecodeRank(chunks=2, block=size, ways=ways, direct=direct) as d):
        blocks = [bytes([n + 1]) * size for n in range(20)]
        for region in range(REGIONS):
            p.copy(key(), region, 0, blocks)
        d.load("r", key(), p, first=0, count=20)
        assert d.wait_outcomes() == [Outcome.OK]
        assert d.cache == {(region, 100 + n): blocks[n] for region in range(REGIONS) for n in range(20)}


def test_what_was_ruined_on_its_way_is_noticed(ways: LinkOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's own checksum of one payload is wrong."""
    real = PayloadPlace.total
    wrong = iter([True])
    monkeypatch.setattr(PayloadPlace, "total", lambda self: real(self) ^ int(next(wrong, False)))
    with PrefillRank(ways=ways) as p, DecodeRank(ways=ways, direct=True) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.CHECKSUM]
        push(p, "b")
        d.load("s", key("b"), p, first=0, count=4)
        assert d.wait_outcomes(2)[1] is Outcome.OK


def test_after_an_abandoned_load_nothing_is_written(ways: LinkOptions) -> None:
    with PrefillRank(ways=ways) as p, DecodeRank(ways=ways, direct=True) as d:
        d.load("r", key(), p, first=0, count=4)
        time.sleep(0.2)
        d.abandon("r")
        assert d.receiver.settled("r")
        push(p)
        push(p, "b")
        d.load("s", key("b"), p, first=4, count=0)  # makes the link work on after the cancelled try
        time.sleep(0.2)
        d.poll()
        assert d.cache == {}
        assert all(not any(memory) for memory in d.memory)
        assert p.wait_reports()[0].outcome is Outcome.ABORTED


@pytest.mark.parametrize(("ours", "theirs", "reason"), [
    ("tcp", "auto", "prefill's transport is tcp"),
    ("auto", "tcp", "decode's transport is tcp"),
])
def test_one_side_that_wants_tcp_gets_it(ours: str, theirs: str, reason: str, folder: Path,
                                         caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with PrefillRank(ways=LinkOptions(ours, folder)) as p, DecodeRank(ways=LinkOptions(theirs, folder)) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        assert set(d.moved) == {"tcp"}
    assert f"over tcp ({reason})" in caplog.text


@pytest.mark.parametrize(("ours", "theirs"), [("shm", "tcp"), ("tcp", "shm")])
def test_shm_on_one_side_and_tcp_on_the_other_is_refused(ours: str, theirs: str) -> None:
    with PrefillRank(ways=LinkOptions(ours)) as p, DecodeRank(ways=LinkOptions(theirs)) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.INCOMPATIBLE]
        assert "transport shm: " in d.finished[0].reason
        assert "transport is tcp" in d.finished[0].reason


def test_another_host_gets_tcp_or_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["here", "there"] * 4)
    monkeypatch.setattr(link_choice, "host", lambda: next(hosts))
    for transport, expected in (("auto", Outcome.OK), ("shm", Outcome.INCOMPATIBLE)):
        with PrefillRank(ways=LinkOptions(transport)) as p, DecodeRank(ways=LinkOptions(transport)) as d:
            push(p)
            d.load("r", key(), p, first=0, count=4)
            assert d.wait_outcomes() == [expected]
            assert expected is Outcome.OK or "not on one host" in d.finished[0].reason


@pytest.mark.parametrize(("transport", "one_address", "hosts", "expected"), [
    ("tcp", True, "one", True),  # processes of a host, whatever they say
    ("auto", False, "one", True),  # pods of a node: each has an address of its own
    ("auto", False, "two", False),
    ("tcp", False, "one", False),  # nobody says where it runs
])
def test_both_ends_know_whether_they_run_on_one_host(transport: str, one_address: bool, hosts: str, expected: bool,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    if not one_address:
        monkeypatch.setattr(connection, "_beside", lambda _: False)
    numbers = itertools.count()
    monkeypatch.setattr(link_choice, "host", lambda: "here" if hosts == "one" else f"host {next(numbers)}")
    with PrefillRank(ways=LinkOptions(transport)) as p, DecodeRank(ways=LinkOptions(transport), direct=True) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        ends = [one.link for one in (*p.sender._peers.values(), *d.receiver._sources.values())]
        assert [end.beside for end in ends] == [expected] * 2


@pytest.mark.parametrize("transport", ["auto", "shm"])
@pytest.mark.parametrize("why", ["no folder", "two folders", "no room", "too many"])
def test_where_neither_way_works(transport: str, why: str, folder: Path, tmp_path_factory: pytest.TempPathFactory,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_process_vm(monkeypatch)
    expected = Outcome.OK if transport == "auto" else Outcome.INCOMPATIBLE
    ours = theirs = LinkOptions(transport, folder)
    text = "no folder to share"
    if why == "no folder":
        ours = LinkOptions(transport)
    elif why == "two folders":
        theirs, text = LinkOptions(transport, tmp_path_factory.mktemp("other")), "No such file"
    elif why == "no room":
        text = "No space left"
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    else:
        text = "0 arenas are open"
        monkeypatch.setattr(prefill_link_choice, "ARENAS_MAX", 0)
    with PrefillRank(ways=ours) as p, DecodeRank(ways=theirs) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [expected]
        if expected is Outcome.OK:
            assert set(d.moved) == {"tcp"}
        else:
            assert text in d.finished[0].reason
            assert "process_vm_readv: Operation not permitted" in d.finished[0].reason


def test_memory_that_cannot_be_read_after_all_goes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As page-locked memory of a device's driver may be: the ticket can be read, the blocks cannot."""
    monkeypatch.setattr(process_vm, "address_of", lambda view: 4096)
    with PrefillRank(ways=LinkOptions("auto")) as p, DecodeRank(ways=LinkOptions("auto"), direct=True) as d:
        for name in "ab":
            push(p, name)
            d.load(name, key(name), p, first=0, count=4)
            d.wait_outcomes("ab".index(name) + 1)
        assert [one.outcome for one in d.finished] == [Outcome.OK] * 2
        assert set(d.moved) == {"tcp"}
        p.wait_reports(2)
        assert p.sender.store.used == 0


def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pinned memory of a device's driver may be: the ticket can be read, the copies cannot."""
    monkeypatch.setattr(process_vm, "address_of", lambda view: 4096)


def test_memory_that_cannot_be_read_after_all_never_goes_over_tcp_where_shm_was_asked_for(
        monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    unreadable(monkeypatch)
    with PrefillRank(ways=LinkOptions("shm", folder)) as p, DecodeRank(ways=LinkOptions("shm", folder), direct=True) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        d.wait_outcomes()
        assert "tcp" not in d.moved


@pytest.mark.parametrize("direct", [True, False], ids=["in place", "staged"])
@pytest.mark.parametrize(("ours", "theirs"), [("shm", "shm"), ("auto", "auto"), ("shm", "auto"), ("auto", "shm")])
def test_what_cannot_be_read_after_all_comes_through_an_arena_and_so_does_all_that_follows(
        monkeypatch: pytest.MonkeyPatch, folder: Path, ours: str, theirs: str, direct: bool) -> None:
    unreadable(monkeypatch)
    size, blocks = 200_000, [bytes([n + 1]) * 200_000 for n in range(20)]  # more pieces than are offered at once
    with (PrefillRank(ways=LinkOptions(ours, folder), block=size, keep_bytes=32 << 20) as p,
          DecodeRank(ways=LinkOptions(theirs, folder), block=size, direct=direct) as d):
        for turn, name in enumerate("abc"):
            for region in range(REGIONS):
                p.copy(key(name), region, 0, blocks)
            d.load(name, key(name), p, first=0, count=20)
            assert d.wait_outcomes(turn + 1) == [Outcome.OK] * (turn + 1)
            assert d.cache == {(region, 100 + n): blocks[n] for region in range(REGIONS) for n in range(20)}
            d.cache.clear()
        assert set(d.moved) == {"arena"}
        assert sum(one.size for one in p.wait_reports(3)) == 3 * REGIONS * 20 * size
        assert p.sender.store.used == 0
        assert len(p.sender._peers) == 1, "in one session"
        assert p.sender.arenas.open == 1


@pytest.mark.parametrize("transports", ["shm shm", "shm auto", "auto shm"])
@pytest.mark.parametrize("why", ["no folder", "not at prefill", "not at decode", "two folders", "too many"])
def test_where_no_arena_works_either_the_load_fails_and_says_what_to_do(
        monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path_factory: pytest.TempPathFactory, transports: str,
        why: str) -> None:
    unreadable(monkeypatch)
    ours, theirs = transports.split()
    p_folder: Path | None = folder
    d_folder: Path | None = folder
    if why in {"no folder", "not at prefill"}:
        p_folder = None
    if why in {"no folder", "not at decode"}:
        d_folder = None
    if why == "two folders":
        d_folder = tmp_path_factory.mktemp("other")
    if why == "too many":
        monkeypatch.setattr(prefill_link_choice, "ARENAS_MAX", 0)
    with (PrefillRank(ways=LinkOptions(ours, p_folder)) as p,
          DecodeRank(ways=LinkOptions(theirs, d_folder), direct=True) as d):
        for turn, name in enumerate("ab"):
            push(p, name)
            d.load(name, key(name), p, first=0, count=4)
            assert d.wait_outcomes(turn + 1)[turn] is Outcome.INCOMPATIBLE
            reason = d.finished[turn].reason
            assert "transport shm: " in reason
            assert "process_vm_readv: Bad address" in reason
            assert "set kv.sharedMemory, so that both have a folder to share, or kv.transport: auto" in reason
        assert d.moved == {}
        assert d.cache == {}
        d.wait(lambda: p.sender.store.used == 0 and p.sender.arenas.open == 0)


def test_auto_goes_over_tcp_where_neither_works_and_says_why(monkeypatch: pytest.MonkeyPatch, folder: Path,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    unreadable(monkeypatch)
    monkeypatch.setattr(prefill_link_choice, "ARENAS_MAX", 0)
    with PrefillRank(ways=LinkOptions("auto", folder)) as p, DecodeRank(ways=LinkOptions("auto", folder), direct=True) as d:
        caplog.set_level("INFO")
        for turn, name in enumerate("ab"):
            push(p, name, count=20)
            d.load(name, key(name), p, first=0, count=20)
            assert d.wait_outcomes(turn + 1) == [Outcome.OK] * (turn + 1)
            assert whole(d, 20)
        assert set(d.moved) == {"tcp"}
    assert "over tcp (process_vm_readv: Bad address; arena: 0 arenas are open)" in caplog.text


def before(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """A side as it was before arenas were tried late."""
    if side == "decode":
        monkeypatch.setattr(decode_handshake.DecodeHandshake, "_cannot_read", lambda self, why: bodies.Taken(read=False))
        return

    def taken(self: prefill_link_choice.PrefillLinkChoice, taken: bodies.Taken) -> None:
        process = self._process
        assert process is not None
        process.taken(read=taken.read)
        if not taken.read:
            self.link = TcpLink(self._session)
        process.leave(self.link) if self.link is not process else None

    monkeypatch.setattr(prefill_link_choice.PrefillLinkChoice, "taken", taken)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_peer_of_before_gets_tcp_or_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path, transport: str,
                                                 side: str) -> None:
    unreadable(monkeypatch)
    before(monkeypatch, side)
    ways = LinkOptions(transport, folder)
    with PrefillRank(ways=ways) as p, DecodeRank(ways=ways, direct=True) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        if transport == "auto":
            assert d.wait_outcomes() == [Outcome.OK]
            assert set(d.moved) == {"tcp"}
        else:
            assert d.wait_outcomes() == [Outcome.INCOMPATIBLE]
            assert d.moved == {}
            assert "kv.transport: auto" in d.finished[0].reason


class Said(Session):
    """A session that keeps what is said."""

    number = 1
    peer = "d"

    def __init__(self) -> None:
        self.offers: list[bodies.Offer] = []
        self.kinds: list[FrameKind] = []

    def queue(self, header: bytes, payload: memoryview | bytes, sent: Any = None) -> None:
        found = frames.decode(header)
        self.kinds.append(found.kind)
        if found.kind is FrameKind.OFFER:
            self.offers.append(bodies.read_body(payload, bodies.Offer))


def reading(link: ProcessLink) -> ProcessReader:
    return ProcessReader("p", link.near())


def test_a_reader_that_is_late_takes_nothing_for_what_was_freed() -> None:
    """A decode that was stopped while its peer gave the session up: the memory is another's, the ticket says so."""
    session, data, freed = Said(), bytearray(b"x" * 5000), []
    link = ProcessLink(session)
    link.put(key(), Blocks(0, 0, 5, memoryview(data), cover=False), lambda: freed.append(1))
    reader, into = reading(link), bytearray(5000)
    (offer,) = session.offers
    assert reader.read(offer, packed(memoryview(into), 5, cover=False))
    assert into == data
    assert link.busy
    assert freed == []
    link.close()
    assert freed == [1]
    data[:] = b"y" * 5000
    with pytest.raises(PeerGone, match="given this session up"):
        reader.read(offer, packed(memoryview(into), 5, cover=False))


def test_scattered_pieces_beyond_what_one_call_takes() -> None:
    session, data = Said(), os.urandom(3000)
    link = ProcessLink(session)
    link.put(key(), Blocks(0, 0, 3000, memoryview(data), cover=False), lambda: None)
    into = bytearray(6000)
    places = Scatter(into, 1, 3000, array("q", range(3000)), 2, 0, False)
    assert reading(link).read(session.offers[0], places)
    assert into[::2] == data
    assert not any(into[1::2])


def test_a_process_with_the_same_number_is_not_the_peer() -> None:
    stranger = ctypes.create_string_buffer(32)
    assert "another process has its number" in ProcessReader("p", bodies.Near(
        os.getpid(), ctypes.addressof(stranger), bytes(range(32)))).probe()
    assert "No such process" in ProcessReader("p", bodies.Near(2 ** 22 + 1, 4096, bytes(32))).probe()
    assert "Bad address" in ProcessReader("p", bodies.Near(os.getpid(), 4096, bytes(32))).probe()
    assert "names no memory" in ProcessReader("p", bodies.Near(0, 4096, bytes(32))).probe()


@pytest.mark.parametrize("link", ["process_vm", "arena"])
def test_taking_what_was_not_on_offer_is_refused(link: str, folder: Path) -> None:
    one = ProcessLink(Said()) if link == "process_vm" else ArenaLink(Said(), folder, 1000)
    with pytest.raises(ProtocolError, match="not on offer"):
        one.taken(read=True)
    one.close()


def test_a_full_arena_makes_puts_wait_and_frees_each_copy_once(folder: Path) -> None:
    session, freed = Said(), []
    link = ArenaLink(session, folder, 1 << 20)
    for n in range(20):
        data = memoryview(bytes([n]) * (1 << 20))
        link.put(key(), Blocks(0, n, 1, data, cover=True), partial(freed.append, n))
    assert len(session.offers) == 16
    assert freed == list(range(16))
    reader = ArenaReader("p", folder, link.shown())
    link.unname()
    assert list(folder.iterdir()) == []
    into = bytearray(1 << 20)
    for n in range(20):
        offer = session.offers[n]
        place = PayloadPlace(packed(memoryview(into), 1, cover=True))
        assert place.scatter is not None
        assert reader.read(offer, place.scatter)
        assert into == bytes([n]) * (1 << 20)
        assert place.total() == offer.checksum
        link.taken(read=True)
    assert not link.busy
    with pytest.raises(ProtocolError, match="of an arena of"):
        reader.read(bodies.Offer(link.size - 10, 11, None), packed(memoryview(bytearray(11)), 1, cover=False))
    link.put(key(), Blocks(0, 0, 40, memoryview(bytes(40 << 20)), cover=False), lambda: freed.append(20))
    link.close()
    assert freed == list(range(21))
    reader.close()


def test_names_without_an_owner_are_swept_and_others_are_not(folder: Path) -> None:
    dead, alien = folder / f"{arena.PREFIX}1-dead", folder / "something-else"
    dead.write_bytes(b"x")
    alien.write_bytes(b"x")
    os.utime(dead, (0, time.time() - 2 * arena.YOUNG_S))
    living = ArenaLink(Said(), folder, 1000)
    with (folder / living.shown().name).open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    arena.sweep(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([alien.name, living.shown().name])
    living.close()
    alien.unlink()


def test_an_arena_that_is_being_made_is_not_swept_before_it_is_locked(folder: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of a host make arenas in one folder."""
    swept = []

    class Late:
        LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

        @staticmethod
        def flock(fd: int, how: int) -> None:
            monkeypatch.undo()
            arena.sweep(folder)
            swept.append(fd)
            fcntl.flock(fd, how)

    monkeypatch.setattr(arena, "fcntl", Late)
    link = ArenaLink(Said(), folder, 1000)
    assert swept
    assert [path.name for path in folder.iterdir()] == [link.shown().name]
    link.close()


@pytest.mark.parametrize(("change", "text"), [
    ({"name": "../etc/passwd"}, "not an arena"), ({"size": 5000}, "not 5000"), ({"ticket": bytes(32)}, "another file"),
    ({"name": "xpyd-kv-none"}, "No such file")])
def test_an_arena_that_is_not_the_one_meant_is_not_mapped(change: dict[str, Any], text: str, folder: Path) -> None:
    link = ArenaLink(Said(), folder, 1000)
    shown = bodies.Arena(**({"name": link.shown().name, "size": link.size, "ticket": link.ticket} | change))
    reader, reason = link_choice.try_arena("p", folder, shown)
    assert reader is None
    assert text in reason
    link.close()


@pytest.mark.parametrize("link", LINKS[1:])
def test_prefill_killed_in_the_middle_is_noticed_and_leaves_nothing(link: str, folder: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    if link == "arena":
        forbid_process_vm(monkeypatch)
    size = 1 << 20
    ways = LinkOptions("shm", folder)
    transport = "mapped" if link == "mapped" else "shm"
    with PrefillProcess(transport, folder, block=size, count=40) as p, DecodeRank(block=size, chunks=2, ways=ways) as d:
        d.load("r", key(), p.address, first=0, count=40)
        end = time.monotonic() + 20
        while not d.receiver.inbox and time.monotonic() < end:
            time.sleep(0.01)
        assert d.receiver.inbox[0].way == link  # some has come, and two chunks hold the rest up
        p.process.send_signal(signal.SIGKILL)
        p.process.wait()
        d.wait(lambda: d.finished, 20)
        assert d.finished[0].outcome is Outcome.PEER_LOST


@pytest.mark.parametrize("link", LINKS)
def test_decode_killed_in_the_middle_leaves_no_memory_descriptor_or_file_at_prefill(
        link: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 20
    if link == "mapped":
        monkeypatch.setattr(kv_ranks, "memory", kv_ranks.mapped_memory)
    ways = LinkOptions("tcp" if link == "tcp" else "shm", folder)
    with PrefillRank(block=size, keep_bytes=128 << 20, keep_s=60, ways=ways, timeout_s=20) as p:
        before = sockets_and_arenas()
        for region in range(REGIONS):
            p.copy(key(), region, 0, [bytes([region]) * size] * 40)
        with DecodeProcess(link, folder, p.address, block=size, count=40) as d:
            assert p.sender.store.used == REGIONS * 40 * size
            assert sockets_and_arenas() - before
            d.process.send_signal(signal.SIGKILL)
            assert [one.outcome for one in p.wait_reports()] == [Outcome.PEER_LOST]
        assert p.sender.store.used == 0
        assert not p.sender._peers
        assert sockets_and_arenas() <= before
        assert arena.PREFIX not in Path("/proc/self/maps").read_text()


def test_prefill_killed_during_the_handshake_leaves_only_what_is_swept(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessReader, "probe", lambda _: "no")
    killed = threading.Event()
    with PrefillProcess("shm", tmp_path, block=1000, count=4) as p, DecodeRank(ways=LinkOptions("shm", tmp_path)) as d:
        def kill_first(peer: str, folder: Path, shown: bodies.Arena) -> tuple[None, str]:
            assert list(tmp_path.iterdir())
            p.process.send_signal(signal.SIGKILL)
            p.process.wait()
            killed.set()
            return None, "killed"

        monkeypatch.setattr(link_choice, "try_arena", kill_first)
        d.load("r", key(), p.address, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.PEER_LOST], "another try may follow"
        assert killed.is_set()
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, time.time() - 2 * arena.YOUNG_S))
    ArenaLink(Said(), tmp_path, 1000).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked_first", [False, True], ids=["computed first", "asked first"])
@pytest.mark.parametrize(("where", "name"), [(process_vm.mapped, "find"), (ProcessReader, "read")],
                         ids=["prefill", "decode"])
def test_a_mistake_of_ours_ends_the_connection_and_not_the_thread(
        where: object, name: str, asked_first: bool, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    """Left open, the transfer would wait for its deadline, and what it holds with it."""
    def mistaken(*_: object, **__: object) -> object:
        raise RuntimeError("never thought of")

    with PrefillRank(ways=LinkOptions("shm")) as p, DecodeRank(ways=LinkOptions("shm"), direct=True) as d:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, mistaken)
            if not asked_first:
                push(p)
            d.load("r", key(), p, first=0, count=4)
            if asked_first:
                d.wait(lambda: any(p.sender._machine.busy(number) for number in list(p.sender._peers)))
                push(p)
            assert d.wait_outcomes() == [Outcome.PEER_LOST]
            assert p.wait_reports()[0].outcome is Outcome.PEER_LOST
        until(lambda: p.sender.store.used == 0)  # it may have ended with its first copy, before the other one came
        push(p, "b")
        d.load("r2", key("b"), p, first=0, count=4)
        assert d.wait_outcomes(2)[-1] is Outcome.OK
    assert "RuntimeError: never thought of" in caplog.text


def test_decode_stopped_in_the_middle_is_given_up_and_prefill_gets_its_memory_back() -> None:
    """The peer's thread stands still in place of its process: nothing is taken, nothing is heard."""
    stand, inside = threading.Event(), threading.Event()

    def still() -> None:
        inside.set()
        stand.wait(30)

    with (PrefillRank(ways=LinkOptions("shm"), timeout_s=TIMEOUT_S) as p,
          DecodeRank(ways=LinkOptions("shm"), direct=True) as d):
        d.load("r", key(), p, first=0, count=4)
        d.wait(lambda: any(p.sender._machine.busy(number) for number in list(p.sender._peers)))
        d.receiver._loop.post(still)
        assert inside.wait(10)
        push(p)
        assert p.wait_reports(deadline_s=20)[0].outcome is Outcome.PEER_LOST
        assert p.sender.store.used == 0
        stand.set()
        assert d.wait_outcomes() == [Outcome.PEER_LOST]
        assert d.cache == {}
