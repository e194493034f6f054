"""Memory of prefill's that decode maps: only what is meant is mapped, and what its owner lets go of is given back."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from typing import Any

import pytest
from kv_ranks import key

from xpyd_sidecar.engine import kv_cache
from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.bodies import Offer, Within
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.transport.link import Blocks, Session
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.shm import mapped
from xpyd_sidecar.transport.shm.mapped import HEAD_BYTES, Mapping
from xpyd_sidecar.transport.shm.process_vm import ProcessLink, ProcessReader
from xpyd_sidecar.transport.tcp.placement import packed


class Said(Session):
    """A session that keeps what is offered."""

    number = 1
    peer = "d"

    def __init__(self) -> None:
        self.offers: list[Offer] = []

    def queue(self, header: bytes, payload: memoryview | bytes, sent: Any = None) -> None:
        assert frames.decode(header).kind is FrameKind.OFFER
        self.offers.append(bodies.read_body(payload, Offer))


def within(view: memoryview) -> Within:
    found = mapped.find(address_of(view), len(view))
    assert found is not None
    return found


@pytest.fixture
def made() -> memoryview:
    view = mapped.make(100_000)
    view[:] = bytes(n % 251 for n in range(100_000))
    return view


def test_what_is_mapped_is_what_was_made(made: memoryview) -> None:
    found = within(made[5000:])
    mapping = Mapping(os.getpid(), found)
    assert found.offset == HEAD_BYTES + 5000
    assert found.size == HEAD_BYTES + 100_000
    peer = mapping._memory
    assert peer[HEAD_BYTES:] == made
    made[7] = 77
    assert peer[HEAD_BYTES + 7] == 77
    with pytest.raises(TypeError, match="readonly"):
        peer[HEAD_BYTES] = 1
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(found.fd, 10)
    mapping.close()
    beyond = address_of(made) + len(made)
    assert mapped.find(beyond - 1, 2) is None
    assert mapped.find(address_of(memoryview(b"elsewhere")), 4) is None


@pytest.mark.parametrize(("change", "text"), [
    ({"name": b"x" * 32}, "another memory"), ({"name": b""}, "no memory's name"), ({"size": 5000}, "not 5000"),
    ({"size": 1 << 60}, "no memory's name"), ({"fd": -1}, "no memory's name"), ({"fd": 1 << 20}, "No such file"),
    ({"fd": "null"}, "another file"), ({"fd": "loose"}, "may shrink"), ({"pid": 2 ** 22 + 1}, "No such file")])
def test_what_is_not_meant_is_not_mapped(made: memoryview, change: dict[str, Any], text: str) -> None:
    found = within(made)
    loose, null = os.memfd_create(mapped.LABEL), os.open("/dev/null", os.O_RDONLY)
    os.ftruncate(loose, found.size)
    fd = {"null": null, "loose": loose}.get(change.get("fd", ""), change.get("fd", found.fd))
    bad = Within(change.get("name", found.name), fd, change.get("size", found.size), found.offset)
    with pytest.raises((OSError, ValueError), match=text):
        Mapping(change.get("pid", os.getpid()), bad)
    os.close(loose)
    os.close(null)


@pytest.mark.unsanitized
def test_memories_are_found_while_the_collector_lets_go_of_others(made: memoryview) -> None:
    """It may run in any allocation: what is in no use, but part of a cycle, ends there."""
    threshold = gc.get_threshold()
    held = [mapped.make(4096) for _ in range(30)]  # more than the interpreter keeps room for without an allocation
    for after in range(60):  # allocations until it runs: one of them is the one that matters
        gc.collect()
        cycle: list[object] = [mapped.make(4096)]
        cycle.append(cycle)
        del cycle
        gc.set_threshold(after + 1)
        try:
            found = mapped.find(address_of(made), len(made))
        finally:
            gc.set_threshold(*threshold)
        assert found is not None
    assert len(held) == 30


def test_memory_goes_back_with_its_last_view_although_a_peer_has_it_mapped() -> None:
    size = 1 << 20
    view = mapped.make(size)
    for at in range(0, size, mmap.PAGESIZE):
        view[at] = 1
    found, kept = within(view), view[10:20]
    mapping = Mapping(os.getpid(), found)
    watched = os.dup(found.fd)
    assert os.fstat(watched).st_blocks * 512 > size
    del view
    assert os.readlink(f"/proc/self/fd/{found.fd}").startswith(f"/memfd:{mapped.LABEL}"), "a copy is still held"
    assert mapping._memory[HEAD_BYTES] == 1
    del kept
    assert os.fstat(watched).st_blocks == 0
    os.close(watched)
    assert mapping._memory[HEAD_BYTES] == 0, "no page is missing where one is read"
    with pytest.raises(OSError, match="Bad file"):
        fcntl.fcntl(found.fd, fcntl.F_GETFD)
    mapping.close()


def test_the_late_end_of_a_memory_leaves_alone_the_one_that_another_thread_made_at_its_place() -> None:
    # The interpreter unmaps a memory without its lock, and tells of its end afterwards.
    size = 1 << 20
    old = mapped.make(size)
    place, name = address_of(old) - HEAD_BYTES, within(old).name
    later = mapped.make(size)
    one = mapped._made[within(later).name]
    mapped._made[one.name] = one._replace(base=place)  # as if it had come to lie there
    try:
        later[:] = b"\x07" * size
        found = mapped.find(place + HEAD_BYTES, size)
        assert found is not None
        assert found.name == one.name, "the newest one at that place"
        del old
        assert name not in mapped._made
        assert bytes(later) == b"\x07" * size, "emptied"
        assert os.fstat(one.fd).st_size == HEAD_BYTES + size, "still open"
    finally:
        mapped._made[one.name] = one
    del later
    assert one.name not in mapped._made


def test_a_forked_child_that_lets_go_of_it_empties_nothing() -> None:
    view = mapped.make(10_000)
    view[:3] = b"abc"
    child = os.fork()
    if not child:
        del view
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert view[:3] == b"abc"


def test_memory_made_later_is_not_taken_for_the_one_before(made: memoryview) -> None:
    """At the same address and with the same descriptor, as after a switch of roles: its name is another."""
    session, into = Said(), bytearray(100)
    link = ProcessLink(session)
    reader = ProcessReader("p", link.near())
    for turn in range(3):
        view = mapped.make(100)
        view[:] = bytes([turn]) * 100
        link.put(key(), Blocks(0, turn, 1, view, cover=False), lambda: None)
        way = reader.read(session.offers.pop(), packed(memoryview(into), 1, cover=False))
        assert (way, into) == ("mapped", bytes([turn]) * 100)
        link.taken(read=True)
        del view
    link.put(key(), Blocks(0, 3, 1, memoryview(b"z" * 100), cover=False), lambda: None)
    assert session.offers[0].within is None
    way = reader.read(session.offers.pop(), packed(memoryview(into), 1, cover=False))
    assert (way, into) == ("process_vm", b"z" * 100)
    reader.close()


def test_what_cannot_be_mapped_is_read_and_asked_for_once(made: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    session, into, tries = Said(), bytearray(100_000), []
    link = ProcessLink(session)
    reader = ProcessReader("p", link.near())
    monkeypatch.setattr(Mapping, "__init__", lambda *args: tries.append(args) or (_ for _ in ()).throw(OSError("no")))
    for n in range(3):
        link.put(key(), Blocks(0, n, 1, made, cover=False), lambda: None)
        way = reader.read(session.offers.pop(), packed(memoryview(into), 1, cover=False))
    assert (way, len(tries), into) == ("process_vm", 1, made)


def test_a_reader_that_is_late_or_is_told_of_other_bytes_takes_nothing(made: memoryview) -> None:
    session, freed = Said(), []
    link = ProcessLink(session)
    reader = ProcessReader("p", link.near())
    link.put(key(), Blocks(0, 0, 1, made, cover=False), lambda: freed.append(1))
    offer, into = session.offers[0], packed(memoryview(bytearray(100_000)), 1, cover=False)
    assert offer.within is not None
    for offset in (-1, 0, HEAD_BYTES - 1, HEAD_BYTES + 1):
        bad = Within(offer.within.name, offer.within.fd, offer.within.size, offset)
        with pytest.raises(ProtocolError, match="of a memory of 104096"):
            reader.read(Offer(offer.address, offer.size, None, bad), into)
    link.close()
    assert freed == [1]
    with pytest.raises(PeerGone, match="given this session up"):
        reader.read(offer, packed(memoryview(bytearray(100_000)), 1, cover=False))
    reader.close()


def test_a_pool_has_memory_to_be_mapped_where_the_system_makes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = kv_cache.mapped_chunk(5000)
    chunk.tensor[10:20] = 7
    assert chunk.view[10:20] == b"\7" * 10
    assert within(chunk.view).offset == HEAD_BYTES
    monkeypatch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError("none here")))
    plain = kv_cache.mapped_chunk(5000)
    assert len(plain.view) == 5000
    assert mapped.find(address_of(plain.view), 5000) is None
