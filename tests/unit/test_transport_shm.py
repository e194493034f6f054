"""Memory that decode maps: its descriptor comes to whom it is meant for, and only what is meant is mapped and believed."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import resource
import socket
import time
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kv_ranks import key, until

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.transport.link import Blocks, Session
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.shm import mailbox, prefill
from xpyd_sidecar.transport.shm.decode import OFFERS_MOST, Mapping, ShmTaker
from xpyd_sidecar.transport.shm.mailbox import Mailbox, MailboxSender
from xpyd_sidecar.transport.shm.prefill import HEAD_BYTES, TICKETS_AT, SharedCopies, SharedMemoryLink
from xpyd_sidecar.transport.tcp.placement import packed
from xpyd_sidecar.transport.tickets import SESSIONS

SIZE = 100_000
NAME = b"n" * 32


class Said(Session):
    """A session that keeps what is said."""

    peer = "p"

    def __init__(self) -> None:
        self.said: list[FrameKind] = []
        self.offers: list[tuple[Header, bodies.Offer]] = []
        self.spent = 0

    def queue(self, header: Any, payload: memoryview | bytes, sent: Any = None) -> None:
        found = frames.decode(header() if callable(header) else header)
        self.said.append(found.kind)
        if found.kind is FrameKind.OFFER:
            self.offers.append((found, bodies.read_body(payload, bodies.Offer)))
        if sent is not None:
            sent()

    def spend(self, size: int) -> None:
        self.spent += size


class Owner:
    """Whose pieces come: into ``memory``, as long as there is ``room``."""

    def __init__(self, size: int = SIZE) -> None:
        self.memory = bytearray(size)
        self.room = self.wanted = True

    def wants(self, header: Header, offer: bodies.Offer, most: int) -> bool:
        return self.wanted

    def place(self, header: Header, offer: bodies.Offer, bring: Any) -> bool:
        if self.room:
            assert bring(packed(memoryview(self.memory), 1, cover=False, size=offer.size)) == "shm"
        return self.room


@pytest.fixture
def shared() -> SharedCopies:
    made = SharedCopies(SIZE)
    made.copies[:] = bytes(n % 251 for n in range(SIZE))
    return made


@pytest.fixture(params=["folder", "namespace", "deep folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    if request.param == "namespace":
        yield None
        return
    found = tmp_path / ("x" * 120 if request.param == "deep folder" else "box")
    found.mkdir()
    yield found
    assert list(found.iterdir()) == []


def files() -> int:
    """That this process has open."""
    gc.collect()  # those of other tests
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def box_in(folder: Path | None) -> Iterator[Mailbox]:
    box = Mailbox(folder)
    try:
        yield box
    finally:
        box.close()


def secret_in(box: Mailbox, mark: bytes) -> bytes:
    letter = box.take(lambda letter: mailbox.mark(letter) == mark)
    assert letter is not None
    assert letter[1] is None
    return letter[0]


def descriptor_in(box: Mailbox, name: bytes) -> int | None:
    _, fd = box.take(lambda letter: letter == name) or (b"", None)
    return fd


def linked(shared: SharedCopies, session: Session) -> tuple[SharedMemoryLink, bodies.ShmMemory, Mapping]:
    with box_in(None) as box:
        link = shared.link(session, box.name, None)
        shown = link.shown()
        link.hand_over(secret_in(box, shown.mark))
        return link, shown, Mapping(descriptor_in(box, shown.name), shown)


def offered(shared: SharedCopies, session: Said, freed: list[int],
            count: int = 1) -> tuple[SharedMemoryLink, ShmTaker, Owner, Said]:
    """``count`` copies of the whole on offer, and decode's side of them."""
    link, shown, mapping = linked(shared, session)
    for n in range(count):
        link.put(key(), Blocks(0, n, 1, shared.copies, cover=False), partial(freed.append, n), most=SIZE)
    owner, heard = Owner(), Said()
    return link, ShmTaker(heard, owner, mapping, shown), owner, heard


# --- the mailbox ---

def test_a_descriptor_comes_to_its_mailbox(folder: Path | None, shared: SharedCopies) -> None:
    with box_in(folder) as box:
        sender = MailboxSender(box.name, folder)
        assert secret_in(box, mailbox.mark(sender.secret)) == sender.secret
        sender.send(shared.name, shared.shown_fd)
        fd = descriptor_in(box, shared.name)
        assert fd is not None
        assert os.fstat(fd).st_ino == os.fstat(shared.fd).st_ino
        assert not os.get_inheritable(fd)
        os.close(fd)
        assert descriptor_in(box, shared.name) is None
    with pytest.raises(ConnectionRefusedError):
        sender.send(shared.name, shared.shown_fd)
    sender.close()
    with pytest.raises(OSError, match=r"refused|No such file"):
        MailboxSender(box.name, folder)


@pytest.mark.parametrize("when", ["before the secret", "after it"])
def test_who_puts_a_socket_in_a_mailboxs_place_gets_no_descriptor(when: str, folder: Path | None,
                                                                  shared: SharedCopies) -> None:
    """A process that may write into the folder, or that is in the network namespace when decode has ended."""
    with box_in(folder) as box, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as thief:
        def steal() -> None:
            if folder is not None:
                (folder / box.name).unlink()
            else:
                box.close()
            with mailbox._address(box.name, folder) as at:
                thief.bind(at)

        if when == "before the secret":
            steal()
        link = shared.link(Said(), box.name, folder)
        shown = link.shown()
        if when == "before the secret":
            assert mailbox.mark(thief.recv(100)) == shown.mark
            if folder is not None:  # decode finds nothing, so it tells nothing
                assert box.take(lambda letter: mailbox.mark(letter) == shown.mark) is None
            link.close()
        else:
            secret = secret_in(box, shown.mark)
            steal()
            if folder is not None:
                link.hand_over(secret)
                fd = descriptor_in(box, shared.name)
                assert fd is not None, "it comes to whom the secret came to"
                os.close(fd)
            else:
                with pytest.raises(ConnectionRefusedError):
                    link.hand_over(secret)
        with pytest.raises(BlockingIOError):
            thief.recvmsg(100, socket.CMSG_SPACE(4))


def test_who_does_not_tell_the_secret_gets_no_descriptor(shared: SharedCopies) -> None:
    with box_in(None) as box:
        link = shared.link(Said(), box.name, None)
        for wrong in (b"", bytes(32), link.shown().mark):
            with pytest.raises(ProtocolError, match="does not know what was sent"):
                link.hand_over(wrong)
        secret = secret_in(box, link.shown().mark)
        assert descriptor_in(box, shared.name) is None
        link.hand_over(secret)
        with pytest.raises(OSError, match="Bad file"):
            link.hand_over(secret)  # once
        fd = descriptor_in(box, shared.name)
        assert fd is not None
        for change in (partial(os.pwrite, fd, b"x", HEAD_BYTES), partial(mmap.mmap, fd, shared.size)):
            with pytest.raises(OSError, match=r"Bad file|Permission denied"):
                change()
        os.close(fd)


def test_what_strangers_send_is_closed_and_does_not_stand_in_for_it(shared: SharedCopies) -> None:
    before = files()
    stranger = os.open("/dev/null", os.O_RDONLY)
    with box_in(None) as box, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        at = "\0" + box.name[1:]
        many = array("i", [stranger] * 3)
        sock.sendmsg([b"x" * 5000], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)], 0, at)
        sock.sendto(b"", at)
        sender = MailboxSender(box.name, None)
        assert secret_in(box, mailbox.mark(sender.secret)) == sender.secret
        sock.sendmsg([b"x" * 5000], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)], 0, at)
        sender.send(shared.name, shared.shown_fd)
        sender.send(shared.name, stranger)  # later than the right one
        sender.close()
        fd = descriptor_in(box, shared.name)
        assert fd is not None
        assert os.fstat(fd).st_ino == os.fstat(shared.fd).st_ino
        os.close(fd)
    os.close(stranger)
    until(lambda: files() <= before)  # threads of other tests may have some for a moment


def test_a_full_mailbox_is_told_at_once(shared: SharedCopies) -> None:
    with box_in(None) as box:
        def fill() -> None:
            for _ in range(10_000):
                MailboxSender(box.name, None).close()

        with pytest.raises(BlockingIOError):
            fill()
        assert box.take(lambda letter: letter == NAME) is None
        free = shared.tickets._free.copy()
        link = shared.link(Said(), box.name, None)
        link.close()
        assert sorted(shared.tickets._free) == sorted(free)


@pytest.mark.parametrize("name", ["", "@", "x", "@x", "/etc/passwd", f"{mailbox.PREFIX}../../etc",
                                  f"@{mailbox.PREFIX}\0", mailbox.PREFIX + "x" * 100, mailbox.PREFIX + "\u20ac" * 30])
def test_no_other_socket_is_sent_to(name: str, tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(ValueError, match="names no mailbox"):
            MailboxSender(name, folder)
    with pytest.raises(ValueError, match="no folder to share"):
        MailboxSender(mailbox.PREFIX + "1", None)


def test_names_without_an_owner_are_swept_and_others_are_not(tmp_path: Path) -> None:
    dead, file, young, alien = (tmp_path / name for name in (
        f"{mailbox.PREFIX}dead", f"{mailbox.PREFIX}file", f"{mailbox.PREFIX}young", "something-else"))
    for path in (dead, young):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, mailbox._address(path.name, tmp_path) as at:
            sock.bind(at)
    for path in (file, alien):
        path.write_bytes(b"x")
    living = Mailbox(tmp_path)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with mailbox._address(f"{mailbox.PREFIX}stream", tmp_path) as at:
        stream.bind(at)
    stream.listen()
    (tmp_path / f"{mailbox.PREFIX}loose").symlink_to(tmp_path / "nowhere")
    (tmp_path / f"{mailbox.PREFIX}folder").mkdir()
    for path in tmp_path.iterdir():
        if path != young:
            os.utime(path, (0, time.time() - 2 * mailbox.YOUNG_S), follow_symlinks=False)
    mailbox.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        young.name, alien.name, living.name, f"{mailbox.PREFIX}stream", f"{mailbox.PREFIX}loose",
        f"{mailbox.PREFIX}folder"}
    stream.close()
    living.close()


def test_a_folder_full_of_others_files_costs_a_bounded_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(20):
        (tmp_path / f"{mailbox.PREFIX}{n}").touch()
        os.utime(tmp_path / f"{mailbox.PREFIX}{n}", (0, time.time() - 2 * mailbox.YOUNG_S))
    monkeypatch.setattr(mailbox, "LOOKED_AT", 7)
    mailbox.sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 13


def test_a_mailbox_in_whose_place_is_something_else_is_closed_all_the_same(tmp_path: Path) -> None:
    before = files()
    box = Mailbox(tmp_path)
    (tmp_path / box.name).unlink()
    (tmp_path / box.name).mkdir()
    box.close()
    box.close()
    until(lambda: files() <= before)  # threads of other tests may have some for a moment


def test_a_mailbox_that_cannot_be_bound_leaves_no_file(tmp_path: Path) -> None:
    before = files()
    with pytest.raises(FileNotFoundError):
        Mailbox(tmp_path / "none")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Mailbox(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until(lambda: files() <= before)  # threads of other tests may have some for a moment


# --- the memory ---

def test_what_is_mapped_is_what_was_made_and_cannot_be_written_or_shrunk(shared: SharedCopies) -> None:
    _, shown, mapping = linked(shared, Said())
    at = shared.offset(address_of(shared.copies[5000:]), 10)
    assert at == HEAD_BYTES + 5000
    peer = mapping._memory
    assert shown.size == HEAD_BYTES + SIZE == len(peer)
    assert peer[HEAD_BYTES:] == shared.copies
    shared.copies[7] = 77
    assert peer[HEAD_BYTES + 7] == 77
    assert peer[shown.ticket_at:shown.ticket_at + 32] == shown.ticket != bytes(32)
    with pytest.raises(TypeError, match="readonly"):
        peer[HEAD_BYTES] = 1
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(shared.fd, 10)
    mapping.close()
    end = address_of(shared.copies) + SIZE
    assert shared.offset(end - 1, 1) == HEAD_BYTES + SIZE - 1
    assert shared.offset(end - 1, 2) is None
    assert shared.offset(address_of(shared.copies) - 1, 1) is None, "tickets are no copies"
    assert shared.offset(address_of(memoryview(b"elsewhere")), 4) is None


@pytest.mark.parametrize(("change", "text"), [
    ({"name": b"x" * 32}, "another memory"), ({"name": b""}, "no memory"), ({"size": HEAD_BYTES + 5000}, "not"),
    ({"size": HEAD_BYTES}, "no memory"), ({"size": 1 << 60}, "no memory"), ({"ticket": b"t"}, "no ticket"),
    ({"ticket_at": 0}, "no ticket"), ({"ticket_at": HEAD_BYTES - 31}, "no ticket"), ({"ticket_at": -1}, "no ticket"),
    ({"fd": "none"}, "has not come"), ({"fd": "null"}, "not"), ({"fd": "loose"}, "may shrink"), ({"fd": "folder"}, "not")])
def test_what_is_not_meant_is_not_mapped(shared: SharedCopies, change: dict[str, Any], text: str) -> None:
    before = files()
    fields = {"name": shared.name, "size": shared.size, "ticket_at": TICKETS_AT, "ticket": bytes(32), "mark": b""}
    loose = os.memfd_create(prefill.LABEL)
    os.ftruncate(loose, shared.size)
    which = {"null": partial(os.open, "/dev/null", os.O_RDONLY), "loose": partial(os.dup, loose),
             "folder": partial(os.open, "/", os.O_RDONLY), "none": lambda: None}
    fd = which.get(change.get("fd", ""), partial(os.dup, shared.fd))()
    shown = bodies.ShmMemory(**(fields | {name: value for name, value in change.items() if name != "fd"}))
    with pytest.raises((OSError, ValueError), match=text):
        Mapping(fd, shown)
    os.close(loose)
    until(lambda: files() <= before)  # a descriptor that came is closed, whatever it was


def test_pages_go_back_although_a_peer_has_them_mapped_and_names_and_tickets_stay() -> None:
    shared = SharedCopies(1 << 20)
    shared.copies[:] = bytes([1]) * (1 << 20)
    _, shown, mapping = linked(shared, Said())
    assert os.fstat(shared.fd).st_blocks * 512 > 1 << 20
    shared.empty()
    assert os.fstat(shared.fd).st_blocks * 512 < 64 << 10
    assert mapping._memory[HEAD_BYTES] == 0, "no page is missing where one is read"
    assert mapping._memory[:32] == shown.name
    assert mapping._memory[shown.ticket_at:shown.ticket_at + 32] == shown.ticket
    shared.copies[:3] = b"abc"
    assert mapping._memory[HEAD_BYTES:HEAD_BYTES + 3] == b"abc"
    mapping.close()


def test_memory_costs_nothing_before_it_is_used() -> None:
    shared = SharedCopies(1 << 40)
    found, fd = os.fstat(shared.fd), shared.fd
    assert found.st_blocks * 512 < 64 << 10
    del shared
    gc.collect()
    with contextlib.suppress(OSError):  # another thread may have opened something meanwhile
        assert os.fstat(fd).st_ino != found.st_ino


# --- pieces ---

def test_copies_are_taken_in_their_order_and_freed_once_each(shared: SharedCopies) -> None:
    session, freed = Said(), list[int]()
    link, taker, owner, heard = offered(shared, session, freed, 20)
    assert len(session.offers) == prefill.OFFERS_AHEAD
    for n in range(20):
        owner.memory[:] = bytes(SIZE)
        taker.offered(*session.offers[n])
        assert owner.memory == shared.copies
        assert heard.said == [FrameKind.TAKEN] * (n + 1)
        link.taken(read=True)
        assert freed == list(range(n + 1))
    assert heard.spent == 20 * SIZE
    assert not link.busy
    with pytest.raises(ProtocolError, match="not on offer"):
        link.taken(read=True)


def test_an_offer_waits_for_room_and_one_that_nobody_wants_is_answered(shared: SharedCopies) -> None:
    session = Said()
    _, taker, owner, heard = offered(shared, session, [], 3)
    owner.room = False
    for one in session.offers:
        taker.offered(*one)
    assert heard.said == []
    taker.resume()
    assert heard.said == []
    owner.wanted = False
    taker.resume()
    assert heard.said == [FrameKind.TAKEN] * 3
    assert not any(owner.memory)
    owner.wanted = True
    for _ in range(OFFERS_MOST):
        taker.offered(*session.offers[0])
    with pytest.raises(ProtocolError, match="64 pieces before"):
        taker.offered(*session.offers[0])


@pytest.mark.parametrize("at", [-1, 0, HEAD_BYTES - 1, HEAD_BYTES + 1, 1 << 63])
def test_an_offer_that_lies_elsewhere_ends_the_session(shared: SharedCopies, at: int) -> None:
    session = Said()
    _, taker, _, _ = offered(shared, session, [])
    header, offer = session.offers[0]
    with pytest.raises(ProtocolError, match=f"of a memory of {shared.size}"):
        taker.offered(header, bodies.Offer(at, offer.size, None))


def test_a_decode_that_was_stopped_takes_nothing_for_what_was_freed(shared: SharedCopies) -> None:
    """Its peer has given the session up meanwhile: the memory is another's, the ticket says so."""
    session, freed = Said(), list[int]()
    link, taker, _, heard = offered(shared, session, freed)
    link.close()
    link.close()
    assert freed == [0]
    shared.copies[:] = b"y" * SIZE
    with pytest.raises(PeerGone, match="given this session up"):
        taker.offered(*session.offers[0])
    assert heard.said == []
    taker.close()


def test_a_ticket_that_is_wiped_while_blocks_are_copied_is_noticed(shared: SharedCopies,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    session = Said()
    link, taker, _, _ = offered(shared, session, [])
    real = Scatter.read

    class Late:
        """Blocks of which the last byte is copied before the ticket is looked at."""

        def __init__(self, into: Scatter) -> None:
            self.into = into

        def read(self, *args: Any) -> bool:
            self.into.copy(args[0])
            link.close()
            return real(packed(memoryview(bytearray(SIZE)), 1, cover=False), *args)

    bring = taker._bring
    monkeypatch.setattr(taker, "_bring", lambda offer, into: bring(offer, Late(into)))
    with pytest.raises(PeerGone, match="given this session up"):
        taker.offered(*session.offers[0])


def test_tickets_are_bound_and_never_come_twice(shared: SharedCopies) -> None:
    seen = set()
    tickets = shared.tickets
    for _ in range(SESSIONS + 5):  # the places come round
        cell = tickets.take()
        assert cell is not None
        at, ticket = tickets.shown(cell)
        assert ticket != bytes(32)
        seen.add(ticket)
        tickets.give(cell)
        assert tickets.shown(cell) == (at, bytes(32))
    assert len(seen) == SESSIONS + 5
    cells = [tickets.take() for _ in range(SESSIONS)]
    assert sorted(tickets.shown(cell)[0] for cell in cells if cell is not None) == list(range(0, SESSIONS * 32, 32))
    with box_in(None) as box:
        with pytest.raises(ValueError, match="too many sessions"):
            shared.link(Said(), box.name, None)
        tickets.give(cells[7] or 0)
        shared.link(Said(), box.name, None).close()


def test_what_lies_elsewhere_goes_over_tcp(shared: SharedCopies, caplog: pytest.LogCaptureFixture) -> None:
    session, freed = Said(), list[int]()
    link, _, _ = linked(shared, session)
    for n in range(2):
        link.put(key(), Blocks(0, n, 1, memoryview(b"z" * 100), cover=False), partial(freed.append, n))
    assert session.said == [FrameKind.DATA] * 2
    assert freed == [0, 1]
    assert caplog.text.count("go over tcp: they do not lie in the memory that shm reaches") == 1
