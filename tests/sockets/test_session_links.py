"""Links within one host: the way is agreed, bytes come as over TCP, and the death of either side leaves nothing behind."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_ranks import BLOCK, P_LIFE, REGIONS, TIMEOUT_S, DecodeRank, PrefillRank, content, key, push, until
from link_peers import DecodeProcess, PrefillProcess

from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import ArrayKind, Cut, PlacedCut
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import From, Order
from xpyd_sidecar.session import decode_handshake, link_choice
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport import gates, moves, moves_plain, tickets
from xpyd_sidecar.transport.shm import decode, mailbox, prefill
from xpyd_sidecar.transport.shm.decode import ShmTaker
from xpyd_sidecar.transport.shm.mailbox import Mailbox, MailboxSender
from xpyd_sidecar.transport.shm.prefill import SharedMemoryLink
from xpyd_sidecar.transport.tcp import connection, placement
from xpyd_sidecar.transport.tcp.placement import PayloadPlace

LINKS = ["tcp", "shm"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=LINKS)
def ways(request: pytest.FixtureRequest, folder: Path) -> LinkOptions:
    return LinkOptions(request.param, folder)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The links without what is compiled."""
    for module in (gates, placement):
        monkeypatch.setattr(module, "Scatter", moves_plain.Scatter)
    for name, value in {"send": moves_plain.send, "sums": moves_plain.sums, "COMPILED": False}.items():
        monkeypatch.setattr(moves, name, value)


def open_files() -> set[str]:
    """Sockets and shared memory that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # what has listed them
            continue
    return {one for one in found if one.startswith(("socket:", "/memfd:"))}


def mappings() -> int:
    """Of copies, its own and of others, in this process."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{prefill.LABEL}")


def whole(d: DecodeRank, count: int = 4) -> bool:
    return d.cache == {(region, 100 + n): content(region, n, d.block) for region in range(REGIONS) for n in range(count)}


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
def test_bytes_come_over_every_link(ways: LinkOptions, direct: bool, cover: bool) -> None:
    with PrefillRank(ways=ways, cover=cover) as p, DecodeRank(ways=ways, direct=direct, cover=cover) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        assert whole(d)
        assert d.moved == {ways.transport: REGIONS * 4 * 1000}
        assert p.wait_reports()[0].size == REGIONS * 4 * 1000
        assert p.sender.store.used == 0


@pytest.mark.parametrize("direct", [True, False], ids=["in place", "staged"])
def test_large_loads_with_little_room(ways: LinkOptions, direct: bool) -> None:
    """Two chunks of staging, and far more bytes."""
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


def test_without_a_folder_processes_of_one_network_namespace_share_memory() -> None:
    ways = LinkOptions("shm")
    with PrefillRank(ways=ways) as p, DecodeRank(ways=ways, direct=True) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK]
        assert set(d.moved) == {"shm"}


@pytest.mark.parametrize("transports", ["auto auto", "shm shm", "auto shm", "shm auto"])
@pytest.mark.parametrize(("why", "text"), [
    ("no folder at prefill", "prefill has no folder to share"), ("two folders", "No such file"),
    ("no folder at decode", "decode's mailbox: Connection refused"), ("no mailbox", "decode names no mailbox"),
    ("no letter comes", "nothing of prefill's has come"), ("nothing comes", "has not come"),
    ("nobody is there any more", "decode's mailbox: refused"),
    ("another comes", "another memory"), ("no memory", "prefill has no memory to share"),
    ("too many", "too many sessions")])
def test_where_memory_cannot_be_shared(*, transports: str, why: str, text: str, folder: Path,
                                       tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
                                       caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ours, theirs = (LinkOptions(transport, folder) for transport in transports.split())
    if why == "no folder at prefill":
        ours = ours._replace(folder=None)
    elif why == "two folders":
        theirs = theirs._replace(folder=tmp_path_factory.mktemp("other"))
    elif why == "no folder at decode":  # it is in another network namespace: nobody has its name here
        theirs = theirs._replace(folder=None)
        bind = socket.socket.bind
        monkeypatch.setattr(socket.socket, "bind", lambda sock, at: sock.family == socket.AF_UNIX or bind(sock, at))
    elif why == "no mailbox":
        monkeypatch.setattr(mailbox, "sweep", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    elif why == "no letter comes":
        monkeypatch.setattr(socket.socket, "send", lambda *_: 0)
    elif why == "nothing comes":
        monkeypatch.setattr(MailboxSender, "send", lambda *_: None)
    elif why == "another comes":
        other = prefill.SharedCopies(1 << 20)
        real = MailboxSender.send
        monkeypatch.setattr(MailboxSender, "send", lambda box, name, _: real(box, name, other.shown_fd))
    elif why == "nobody is there any more":
        monkeypatch.setattr(MailboxSender, "send", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError(111, "refused")))
    with PrefillRank(ways=ours) as p, DecodeRank(ways=theirs) as d:
        if why == "no memory":
            p.sender.me = p.sender.me._replace(sharing=None)
        if why == "too many":
            assert p.sharing is not None
            while p.sharing.tickets.take() is not None:
                pass
        push(p)
        d.load("r", key(), p, first=0, count=4)
        assert d.wait_outcomes() == [Outcome.OK if transports == "auto auto" else Outcome.INCOMPATIBLE]
        if transports == "auto auto":
            assert set(d.moved) == {"tcp"}
            assert text in caplog.text
        else:
            reason = d.finished[0].reason
            assert "transport shm: " in reason
            assert text in reason
            assert "set kv.sharedMemory, so that both have a folder to share, or kv.transport: auto" in reason
            assert d.moved == {}


@pytest.mark.parametrize(("where", "name", "lack"), [
    (prefill, "MailboxSender", errno.EMFILE), (MailboxSender, "send", errno.EAGAIN),
    (decode_handshake, "Mailbox", errno.EMFILE), (decode, "_mapped", errno.ENOMEM)],
    ids=["prefill", "full", "decode", "mapping"])
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_lack_of_files_or_memory_or_a_full_mailbox_is_no_refusal(
        *, where: Any, name: str, lack: int, transport: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be over in a moment. With shm the transfer can be tried again, and is not said to be impossible."""
    lacks = iter([lack])
    real = getattr(where, name)

    def once(*args: object) -> object:
        if code := next(lacks, 0):
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(where, name, once)
    ways = LinkOptions(transport, folder)
    with PrefillRank(ways=ways) as p, DecodeRank(ways=ways) as d:
        push(p)
        d.load("r", key(), p, first=0, count=4)
        if transport == "auto":
            assert d.wait_outcomes() == [Outcome.OK]
            assert set(d.moved) == {"tcp"}
            return
        assert d.wait_outcomes() == [Outcome.PEER_LOST]
        push(p, "b")
        d.load("s", key("b"), p, first=0, count=4)
        assert d.wait_outcomes(2)[1] is Outcome.OK
        assert set(d.moved) == {"shm"}


@pytest.mark.parametrize("cover", [True, False], ids=["covered", "bare"])
@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_heads_that_are_cut_out_of_blocks_come_the_same_way_while_there_is_room_to_cut_them(
        room: bool, cover: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of each block decode wants the second of two heads: these lie in no copy one behind the other."""
    half = BLOCK // 2
    kinds = [ArrayKind("uint8", 2, (half,), half, 2)] * REGIONS
    blocks = 6
    size = REGIONS * blocks * BLOCK
    with (PrefillRank(ways=LinkOptions("shm"), kinds=kinds, cover=cover, keep_bytes=size + (size // 2 if room else 0)) as p,
          DecodeRank(ways=LinkOptions("shm"), direct=True, cover=cover, block=half) as d):
        push(p, count=blocks)
        ids = tuple(range(100, 100 + blocks))
        sources = (From(p.address, P_LIFE, (PlacedCut(Cut(0, REGIONS, 1, 1, half), 0, 0),)),)
        d.carry_out(d.machine.load(Order("r", key(), (TableSpan(0, ids),), sources, b""), time.monotonic()))
        assert d.wait_outcomes() == [Outcome.OK]
        assert d.cache == {(region, 100 + n): content(region, n)[half:] for region in range(REGIONS) for n in range(blocks)}
        assert d.moved == {"shm" if room else "tcp": size // 2}
        assert ("some blocks for d" in caplog.text) != room
        p.wait_reports()
        assert p.sender.store.used == 0


def test_prefill_killed_in_the_middle_is_noticed_and_leaves_nothing(folder: Path) -> None:
    size = 1 << 20
    ways = LinkOptions("shm", folder)
    with PrefillProcess("shm", folder, block=size, count=40) as p, DecodeRank(block=size, chunks=2, ways=ways) as d:
        d.load("r", key(), p.address, first=0, count=40)
        until(lambda: d.receiver.inbox, 20)
        assert d.receiver.inbox[0].way == "shm"  # some has come, and two chunks hold the rest up
        mapped = mappings()
        p.process.send_signal(signal.SIGKILL)
        p.process.wait()
        d.wait(lambda: d.finished, 20)
        assert d.finished[0].outcome is Outcome.PEER_LOST
        until(lambda: mappings() < mapped)


@pytest.mark.parametrize("link", LINKS)
def test_decode_killed_in_the_middle_leaves_no_memory_descriptor_or_file_at_prefill(link: str, folder: Path) -> None:
    size = 1 << 20
    with PrefillRank(block=size, keep_bytes=128 << 20, keep_s=60, ways=LinkOptions(link, folder), timeout_s=20) as p:
        before = open_files()
        for region in range(REGIONS):
            p.copy(key(), region, 0, [bytes([region]) * size] * 40)
        with DecodeProcess(link, folder, p.address, block=size, count=40) as d:
            assert p.sender.store.used == REGIONS * 40 * size
            assert open_files() - before
            d.process.send_signal(signal.SIGKILL)
            assert [one.outcome for one in p.wait_reports()] == [Outcome.PEER_LOST]
        assert p.sender.store.used == 0
        assert not p.sender._peers
        until(lambda: open_files() <= before)
        assert p.sharing is None or len(p.sharing.tickets._free) == tickets.SESSIONS


def test_decode_killed_during_the_handshake_leaves_only_a_name_that_is_swept(tmp_path: Path) -> None:
    Mailbox(tmp_path)._sock.close()  # as the kernel does for who is killed
    (left,) = tmp_path.iterdir()
    Mailbox(tmp_path).close()
    assert list(tmp_path.iterdir()) == [left], "it is young"
    os.utime(left, (0, time.time() - 2 * mailbox.YOUNG_S))
    Mailbox(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked_first", [False, True], ids=["computed first", "asked first"])
@pytest.mark.parametrize(("where", "name"), [(SharedMemoryLink, "_offer"), (ShmTaker, "_bring")], ids=["prefill", "decode"])
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
