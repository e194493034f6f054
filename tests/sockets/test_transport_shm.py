"""Memory that decode maps: its descriptor comes to whom it is meant for, and only what is meant is mapped and believed."""

from __future__ import annotations

import contextlib
import gc
import os
from functools import partial
from typing import Any

import pytest
from kv_ranks import key, until
from mailboxes import box_in, descriptor_in, files, secret_in

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.transport.link import Blocks, Session
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.shm import prefill
from xpyd_sidecar.transport.shm.decode import OFFERS_MOST, Mapping, ShmTaker
from xpyd_sidecar.transport.shm.prefill import HEAD_BYTES, TICKETS_AT, SharedCopies, SharedMemoryLink
from xpyd_sidecar.transport.tcp.placement import packed
from xpyd_sidecar.transport.tickets import SESSIONS

SIZE = 100_000


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
