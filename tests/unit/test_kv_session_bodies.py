"""Bodies of sealed frames: what is wrong is named, and combs stand for just their stretches."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv.session_bodies import Able, Comb, FetchBytes, Reason, combs, read_body, refused_links


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=12))
def test_combs_stand_for_just_their_stretches(gaps: list[tuple[int, int]]) -> None:
    at, stretches = 0, []
    for gap, size in gaps:
        at += gap
        stretches.append((at, size))
        at += size
    found = combs(tuple(stretches))
    assert [(one.offset + n * one.step, one.size) for one in found for n in range(one.count)] == stretches


def test_stretches_that_lie_equally_far_apart_are_one_comb() -> None:
    assert combs(((0, 4), (10, 4), (20, 4), (100, 8))) == (Comb(0, 4, 10, 3), Comb(100, 8))
    assert combs(()) == ()


@given(st.binary(max_size=60), st.sampled_from([Able, FetchBytes]))
def test_what_cannot_be_read_is_an_error_of_messages(raw: bytes, kind: type) -> None:
    with contextlib.suppress(MessageError):  # and nothing else
        assert isinstance(read_body(raw, kind), kind)


def test_bodies_come_back_as_they_were_and_name_what_is_wrong() -> None:
    asked = FetchBytes(1, 2, ((Comb(0, 256, 1024, 4),), (Comb(8192, 512),)), 3)
    assert read_body(msgspec.msgpack.encode(asked), FetchBytes) == asked
    with pytest.raises(MessageError, match=r"Reason: .*outcome"):
        read_body(msgspec.msgpack.encode({"reason": "gone"}), Reason)


def test_text_that_is_none_is_no_fault_of_ours() -> None:
    raw = msgspec.msgpack.encode({"host": "xx"}).replace(b"xx", b"\xff\xfe")
    with pytest.raises(MessageError, match="Able"):
        read_body(raw, Able)


@pytest.mark.parametrize(("reason", "links"), [
    ("", ()),
    ("shm: not on one host; nixl: no RDMA device is here (no /dev/infiniband/uverbs*) at prefill", ()),
    ("shm: decode wants no link within a host; nixl: decode has or wants none", ()),
    ("shm: not on one host; nixl: NIXL cannot be loaded: no; such file (add it to engine.image) at prefill",
     ("nixl: NIXL cannot be loaded: no; such file (add it to engine.image) at prefill",)),
    ("shm: decode's mailbox: No such file; nixl: a timeout", ("shm: decode's mailbox: No such file", "nixl: a timeout")),
    ("words of no link; map: neither", ()),
])
def test_links_that_could_be_expected_and_were_refused_are_told_from_those_that_nobody_misses(
        reason: str, links: tuple[str, ...]) -> None:
    assert refused_links(reason) == links
