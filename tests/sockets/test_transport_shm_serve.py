"""Prefill's memory for copies: what it is, whom it is shown to, and what a session of it leaves behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
from control_ends import wait_until
from mailboxes import box_in, descriptor_in, files, secret_in

from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.session_bodies import Able, LinkChoice, SharedStore
from xpyd_sidecar.kv.wire import FrameKind
from xpyd_sidecar.transport.shm import serve
from xpyd_sidecar.transport.shm.fetch import Mapping
from xpyd_sidecar.transport.shm.mailbox import MailboxSender
from xpyd_sidecar.transport.shm.serve import HEAD_BYTES, TICKETS_AT, SharedCopies, ShmServeLink, ShmServer
from xpyd_sidecar.transport.tickets import SESSIONS

SIZE = 100_000
HOST = "this host"


class Session:
    """What is said is kept."""

    peer = "d"

    def __init__(self) -> None:
        self.said: list[tuple[FrameKind, Any]] = []

    def send(self, kind: FrameKind, body: Any = None, key: Any = None) -> bytes:
        self.said.append((kind, body))
        return b""

    def post(self, call: Callable[[], None]) -> None:
        raise AssertionError("nothing is posted")

    def close(self, error: PeerError) -> None:
        raise AssertionError("nothing is closed")


@pytest.fixture
def shared() -> SharedCopies:
    made = SharedCopies(SIZE)
    made.copies[:] = bytes(n % 251 for n in range(SIZE))
    return made


def server_of(shared: SharedCopies | None, *, insists: bool = False) -> ShmServer:
    made = ShmServer(HOST, None, insists=insists)
    made.copies = shared
    return made


def served(server: ShmServer, session: Session, mailbox: str) -> tuple[ShmServeLink, SharedStore]:
    found = server.serve(session, Able(HOST, mailbox))
    assert not isinstance(found, str), found
    link, welcome = found
    assert isinstance(link, ShmServeLink)
    assert welcome.shared is not None
    return link, welcome.shared


def tickets_free(shared: SharedCopies) -> int:
    return len(shared.tickets._free)


# --- the memory ---

def test_what_is_mapped_is_what_was_made_and_cannot_be_written_or_shrunk(shared: SharedCopies) -> None:
    session = Session()
    with box_in(None) as box:
        link, shown = served(server_of(shared), session, box.name)
        link.hand_over(secret_in(box, shown.mark))
        assert session.said == [(FrameKind.SHARED, LinkChoice("shm", ""))]
        fd = descriptor_in(box, shown.name)
    assert fd is not None
    for change in (lambda: os.pwrite(fd, b"x", HEAD_BYTES), lambda: os.ftruncate(fd, 10)):
        with pytest.raises(OSError, match=r"Bad file|Invalid argument|not permitted"):
            change()
    mapping = Mapping(fd, shown)
    assert len(mapping.view) == shown.size == HEAD_BYTES + SIZE
    assert mapping.view[HEAD_BYTES:] == shared.copies
    shared.copies[7] = 77
    assert mapping.view[HEAD_BYTES + 7] == 77
    assert mapping.holds(shown.ticket_at, shown.ticket)
    with pytest.raises(TypeError, match="read-only"):
        mapping.view[HEAD_BYTES] = 1
    link.close()
    link.close()
    assert not mapping.holds(shown.ticket_at, shown.ticket)


def test_memory_costs_nothing_before_it_is_used_and_goes_with_its_last_user() -> None:
    shared = SharedCopies(1 << 40)
    found, fd = os.fstat(shared.fd), shared.fd
    assert found.st_blocks * 512 < 64 << 10
    del shared
    gc.collect()
    with contextlib.suppress(OSError):  # another thread may have opened something meanwhile
        assert os.fstat(fd).st_ino != found.st_ino


def test_a_system_that_cannot_keep_others_from_writing_has_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = files()

    def refused(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(serve.fcntl, "fcntl", refused)
    with pytest.raises(OSError, match="Invalid argument"):
        SharedCopies(SIZE)
    wait_until(lambda: files() <= before)


def test_tickets_are_bound_and_never_come_twice(shared: SharedCopies) -> None:
    seen = set()
    tickets = shared.tickets
    for _ in range(SESSIONS + 5):  # the places come round
        cell = tickets.take()
        assert cell is not None
        at, ticket = tickets.descriptor(cell)
        assert ticket != bytes(32)
        seen.add(ticket)
        tickets.give(cell)
        assert tickets.descriptor(cell) == (at, bytes(32))
    assert len(seen) == SESSIONS + 5
    cells = [tickets.take() for _ in range(SESSIONS)]
    assert sorted(tickets.descriptor(cell)[0] for cell in cells if cell is not None) == list(range(0, SESSIONS * 32, 32))
    with box_in(None) as box:
        server = server_of(shared)
        assert server.serve(Session(), Able(HOST, box.name)) == "shm: too many sessions are open at prefill"
        assert cells[7] is not None
        tickets.give(cells[7])
        link, shown = served(server, Session(), box.name)
        assert shown.ticket_at == TICKETS_AT + cells[7] * 32
        link.close()


# --- who is shown it ---

@pytest.mark.parametrize(("able", "reason"), [
    (Able("", "@xpyd-kv-1"), "shm: decode wants no link within a host"),
    (Able("elsewhere", "@xpyd-kv-1"), "shm: not on one host"),
    (Able(HOST, ""), "shm: decode names no mailbox"), (Able(HOST, "/etc/passwd"), "shm: decode names no mailbox"),
    (Able(HOST, "xpyd-kv-1"), "shm: prefill has no folder to share"),
    (Able(HOST, "@xpyd-kv-nobody"), "shm: decode's mailbox: Connection refused")])
@pytest.mark.parametrize("insists", [True, False])
def test_who_is_not_shown_it_is_told_why(shared: SharedCopies, able: Able, reason: str, insists: bool) -> None:
    assert server_of(shared, insists=insists).serve(Session(), able) == reason
    assert tickets_free(shared) == SESSIONS


def test_without_memory_it_is_said() -> None:
    assert server_of(None).serve(Session(), Able(HOST, "@xpyd-kv-1")) == "shm: prefill has no memory to share"


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM])
def test_what_is_lacking_for_a_moment_is_no_reason_where_there_is_no_other_link(
        shared: SharedCopies, lack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object) -> None:
        raise OSError(lack, os.strerror(lack)) if lack != errno.EAGAIN else BlockingIOError(lack, os.strerror(lack))

    monkeypatch.setattr(serve, "MailboxSender", lacks)
    able = Able(HOST, "@xpyd-kv-1")
    assert server_of(shared).serve(Session(), able) == f"shm: decode's mailbox: {os.strerror(lack)}"
    with pytest.raises(PeerGone, match="cannot be sent the memory now"):
        server_of(shared, insists=True).serve(Session(), able)
    assert tickets_free(shared) == SESSIONS


def test_who_does_not_tell_the_secret_gets_no_descriptor(shared: SharedCopies) -> None:
    session = Session()
    with box_in(None) as box:
        link, shown = served(server_of(shared), session, box.name)
        for wrong in (b"", bytes(32), shown.mark):
            with pytest.raises(ProtocolError, match="does not know what was sent"):
                link.hand_over(wrong)
        secret = secret_in(box, shown.mark)
        assert descriptor_in(box, shared.name) is None
        assert session.said == []
        link.hand_over(secret)
        link.hand_over(secret)  # it is sent once
        assert [body.reason for _, body in session.said] == ["", "shm: decode's mailbox: Bad file descriptor"]
        fd = descriptor_in(box, shared.name)
        assert fd is not None
        os.close(fd)
        assert descriptor_in(box, shared.name) is None


def test_a_descriptor_that_cannot_be_sent_is_a_reason_to_do_without(shared: SharedCopies,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    session = Session()
    with box_in(None) as box:
        link, shown = served(server_of(shared, insists=True), session, box.name)
        monkeypatch.setattr(MailboxSender, "send", gone)
        link.hand_over(secret_in(box, shown.mark))
    assert session.said == [(FrameKind.SHARED, LinkChoice("shm", "shm: decode's mailbox: Connection refused"))]


def test_a_session_goes_on_with_the_memory_that_it_was_shown(shared: SharedCopies) -> None:
    """A store that is given up is another memory for who comes next; the one that is given up wipes its own ticket."""
    with box_in(None) as box:
        server = server_of(shared)
        link, shown = served(server, Session(), box.name)
        server.copies = SharedCopies(SIZE)
        later, other = served(server, Session(), box.name)
        assert other.name != shown.name
        link.close()
        assert tickets_free(shared) == SESSIONS
        assert tickets_free(server.copies) == SESSIONS - 1
        later.close()
