"""Messages of joining, handles, and the heads of remote messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.broadcast.layout import Layout
from xpyd_sidecar.errors import Incompatible, ProtocolError

HANDLE = wire.Handle(wire.WIRE_VERSION, "q", b"t" * 16, Layout(1), ("a",), "door", ("b",), "tcp://[::1]:1", True, 1 << 20)
MESSAGES: list[wire.Control] = [wire.QueueHello(1, b"t", "a", b"note"), wire.QueueWelcome(), wire.QueueRefuse("why"),
                                wire.RingMapped(), wire.SideSegment(3, 1), wire.QueueTaken(9), wire.Bye(12)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_read_as_they_were_said(message: wire.Control) -> None:
    assert wire.unpack("p", wire.pack(message)) == message
    assert wire.expect("p", wire.pack(message), type(message)) == message


def test_a_handle_survives_the_journey_and_does_so_as_bytes() -> None:
    assert wire.read_handle(wire.pack(HANDLE)) == HANDLE


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_with_the_peer_named(raw: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.unpack("rank 7", raw)
    assert caught.value.peer == "rank 7"


@given(st.binary(max_size=200))
def test_bytes_that_are_no_handle_are_refused(raw: bytes) -> None:
    with pytest.raises((ProtocolError, Incompatible)):
        wire.read_handle(raw)


def test_another_kind_of_message_than_expected_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="p: sent QueueWelcome instead of QueueHello"):
        wire.expect("p", wire.pack(wire.QueueWelcome()), wire.QueueHello)


@given(st.integers(0, 2**64 - 1), st.integers(0, 1024))
def test_heads_of_remote_messages_are_told_from_control_messages(number: int, parts: int) -> None:
    assert wire.read_number("p", wire.pack_number(number, parts)) == (number, parts)
    for message in MESSAGES:
        assert wire.read_number("p", wire.pack(message)) is None
    with pytest.raises(ProtocolError, match="has 17 bytes, not 16"):
        wire.read_number("p", wire.pack_number(number, parts) + b"x")
