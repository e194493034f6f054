"""Frames of a control connection: in clear until both have keys, sealed afterwards, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.session_keys import Sealing
from xpyd_sidecar.kv.wire import BODY_MAX, PREFIX_BYTES, SUMS_MAX, WIRE_VERSION, Frame, FrameKind, Wire, WireError

KEY = Key(TransferId("ab" * 16), Attempt(3), 7)
OURS, THEIRS = bytes(range(32)), bytes(range(1, 33))


def pair() -> tuple[Wire, Wire]:
    """Two ends that have keys."""
    one, other = Wire(), Wire()
    one.seal(Sealing(OURS), Sealing(THEIRS))
    other.seal(Sealing(THEIRS), Sealing(OURS))
    return one, other


@given(st.lists(st.tuples(st.sampled_from([*FrameKind]), st.binary(max_size=200)), max_size=8), st.integers(1, 50))
def test_sealed_frames_come_as_they_were_said_however_bytes_are_cut(said: list[tuple[FrameKind, bytes]], cut: int) -> None:
    one, other = pair()
    data = b"".join(one.frame(kind, body, KEY) for kind, body in said)
    came = [frame for at in range(0, len(data), cut) for frame in other.feed(data[at:at + cut])]
    assert came == [Frame(kind, KEY, body) for kind, body in said]
    assert other.waiting == 0


def test_keys_may_begin_between_two_frames_of_one_read() -> None:
    one, other = Wire(), Wire()
    data = one.frame(FrameKind.HELLO, b"clear")
    one.seal(Sealing(OURS), Sealing(THEIRS))
    data += one.frame(FrameKind.ABLE, b"sealed")
    came = []
    for frame in other.feed(data):
        came.append(frame.body)
        if frame.kind is FrameKind.HELLO:
            other.seal(Sealing(THEIRS), Sealing(OURS))
    assert came == [b"clear", b"sealed"]


@pytest.mark.parametrize("kind", [*FrameKind])
def test_only_what_comes_before_keys_is_taken_in_clear(kind: FrameKind) -> None:
    data = Wire().frame(kind, b"x")
    if kind in {FrameKind.CHALLENGE, FrameKind.HELLO, FrameKind.REJECT, FrameKind.NAME}:
        assert [frame.kind for frame in Wire().feed(data)] == [kind]
    else:
        with pytest.raises(WireError, match="in clear"):
            [*Wire().feed(data)]
    with pytest.raises(WireError, match="in clear"):
        [*pair()[1].feed(data)]


def test_a_sealed_frame_before_there_are_keys_is_refused() -> None:
    with pytest.raises(WireError, match="sealed"):
        [*Wire().feed(pair()[0].frame(FrameKind.HELLO, b"x"))]


@given(st.integers(0), st.integers(1, 255))
def test_a_byte_that_was_changed_anywhere_is_seen(at: int, change: int) -> None:
    one, other = pair()
    data = bytearray(one.frame(FrameKind.ASK, b"body of an ask", KEY))
    data[at % len(data)] ^= change
    try:
        came = [*other.feed(bytes(data))]
    except WireError:
        return
    assert came == []
    assert other.waiting, "a length that grew: the rest is waited for"


@pytest.mark.parametrize(("prefix", "words"), [
    (b"http\x07\x01\x00\x00\x18\x00\x00\x00", "not an xpyd data link"),
    (b"xpyd\x06\x01\x00\x00\x18\x00\x00\x00", f"wire version 6 is not {WIRE_VERSION}"),
    (b"xpyd\x07\x63\x00\x00\x18\x00\x00\x00", "unknown frame kind 99"),
    (b"xpyd\x07\x01\x00\x01\x18\x00\x00\x00", "with flags 0x100"),
    (b"xpyd\x07\x01\x00\x00\x17\x00\x00\x00", "out of bounds"),
    (b"xpyd\x07\x01\x00\x00\xff\xff\xff\xff", "out of bounds"),
])
def test_what_is_no_frame_is_refused_by_its_first_bytes(prefix: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        [*Wire().feed(prefix)]


def test_bodies_are_bounded_on_both_sides() -> None:
    assert [len(frame.body) for frame in pair()[1].feed(pair()[0].frame(FrameKind.SUMS, bytes(SUMS_MAX)))] == [SUMS_MAX]
    for kind, size in ((FrameKind.ASK, BODY_MAX + 1), (FrameKind.SUMS, SUMS_MAX + 1)):
        with pytest.raises(ValueError, match="a body of"):
            pair()[0].frame(kind, bytes(size))
    one, other = pair()
    long = bytearray(one.frame(FrameKind.SUMS, bytes(BODY_MAX + 1)))
    long[5] = FrameKind.ASK
    with pytest.raises(WireError, match="out of bounds"):
        [*other.feed(bytes(long[:PREFIX_BYTES]))]
