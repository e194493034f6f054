"""Of prefill's memory decode maps only what it was told of, what cannot shrink, and nothing else whatever it is sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from control_ends import wait_until
from mailboxes import files

from xpyd_sidecar.kv.session_bodies import SharedStore
from xpyd_sidecar.transport.shm.fetch import Mapping
from xpyd_sidecar.transport.shm.serve import HEAD_BYTES, LABEL, TICKETS_AT, SharedCopies

SIZE = 100_000


@pytest.fixture
def shared() -> SharedCopies:
    return SharedCopies(SIZE)


def shown(shared: SharedCopies, **changed: Any) -> SharedStore:
    fields = {"name": shared.name, "size": shared.size, "ticket_at": TICKETS_AT, "ticket": bytes(32), "mark": b""}
    return SharedStore(**(fields | changed))


@pytest.mark.parametrize(("change", "text"), [
    ({"name": b"x" * 32}, "another memory"), ({"name": b""}, "no memory"), ({"size": HEAD_BYTES + 5000}, "not"),
    ({"size": HEAD_BYTES}, "no memory"), ({"size": 1 << 60}, "no memory"), ({"size": -1}, "no memory"),
    ({"ticket": b"t"}, "no ticket"), ({"ticket_at": 0}, "no ticket"), ({"ticket_at": HEAD_BYTES - 31}, "no ticket"),
    ({"ticket_at": -1}, "no ticket")])
def test_what_is_told_wrong_is_not_mapped(shared: SharedCopies, change: dict[str, Any], text: str) -> None:
    before = files()
    with pytest.raises(ValueError, match=text):
        Mapping(os.dup(shared.fd), shown(shared, **change))
    wait_until(lambda: files() <= before)  # a descriptor that came is closed, whatever it was


def loose(size: int) -> int:
    """Memory that its owner may shrink."""
    fd = os.memfd_create(LABEL, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


SENT: dict[str, tuple[Callable[[int], int], str]] = {
    "a device": (lambda _: os.open("/dev/null", os.O_RDONLY), "a file of 0 bytes"),
    "a folder": (lambda _: os.open("/", os.O_RDONLY), "a file of"),
    "no file": (lambda _: os.eventfd(0), "a file of 0 bytes"),
    "what may shrink": (loose, "may shrink")}


@pytest.mark.parametrize("what", SENT)
def test_whatever_else_is_sent_is_not_mapped(shared: SharedCopies, what: str) -> None:
    before = files()
    make, text = SENT[what]
    with pytest.raises((OSError, ValueError), match=text):
        Mapping(make(shared.size), shown(shared))
    wait_until(lambda: files() <= before)


def test_nothing_that_has_come_is_said() -> None:
    shared = SharedCopies(SIZE)
    with pytest.raises(ValueError, match="has not come"):
        Mapping(None, shown(shared))


def test_a_mapping_outlives_whoever_has_made_the_memory() -> None:
    """A read of it never fails, whatever becomes of prefill."""
    shared = SharedCopies(SIZE)
    shared.copies[:5] = b"right"
    mapping = Mapping(os.dup(shared.fd), shown(shared))
    del shared
    assert mapping.view[HEAD_BYTES:HEAD_BYTES + 5] == b"right"
    mapping.close()
    mapping.close()


def test_a_view_that_an_error_still_holds_does_not_keep_it_from_being_closed(shared: SharedCopies) -> None:
    mapping = Mapping(os.dup(shared.fd), shown(shared))
    held = mapping.view
    mapping.close()
    assert held[:4] == shared.name[:4], "it goes with the last view"


def test_nothing_stays_mapped_of_what_is_let_go(shared: SharedCopies) -> None:
    def mapped() -> int:
        with open("/proc/self/maps", encoding="ascii") as maps:
            return maps.read().count(f"/memfd:{LABEL}")

    before = mapped()
    mapping = Mapping(os.dup(shared.fd), shown(shared))
    assert mapped() == before + 1
    mapping.close()
    assert mapped() == before
