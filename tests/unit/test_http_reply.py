from __future__ import annotations

import pytest

from xpyd_sidecar.router.api.faults import bad_request
from xpyd_sidecar.router.http.reply import Reply
from xpyd_sidecar.router.relay.plain import Outlet


class Paper(Outlet):
    """An outlet that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


class Wire:
    """A connection that writes down what it is given."""

    def __init__(self, *, draining: bool = False) -> None:
        self.server = self
        self.draining, self.turned_away = draining, False
        self.date = b"now"
        self.outlet = Paper()
        self.closed: list[bool] = []

    @property
    def data(self) -> bytes:
        return self.outlet.data

    def on_reply_end(self, *, close: bool) -> None:
        self.closed.append(close)


def reply(wire: Wire, *, close: bool = False, old: bool = False, head_only: bool = False) -> Reply:
    return Reply(wire, "id-1", close=close, old=old, head_only=head_only)


def test_a_whole_answer() -> None:
    wire = Wire()
    reply(wire).send_whole(200, [(b"content-type", b"text/plain")], b"hello")
    assert wire.data == (b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\nx-request-id: id-1\r\n"
                         b"date: now\r\n\r\nhello")
    assert wire.closed == [False]


def test_head_and_closing_and_a_status_without_a_name() -> None:
    wire = Wire(draining=True)
    reply(wire, head_only=True).send_whole(599, [], b"hello")
    assert wire.data.startswith(b"HTTP/1.1 599 Status\r\ncontent-length: 5\r\nconnection: close\r\n")
    assert wire.data.endswith(b"\r\n\r\n")
    assert wire.closed == [True]


def test_a_stream_that_came_with_its_end_leaves_in_one_write() -> None:
    wire = Wire()
    answer = reply(wire)
    answer.begin(200, b"x-kept: k\r\n", b"1\r\na\r\n", ends=True)
    assert (wire.data, answer.started, answer.sent_bytes) == (b"", True, 6)
    answer.end()
    assert wire.data.startswith(b"HTTP/1.1 200 OK\r\nx-kept: k\r\ntransfer-encoding: chunked\r\n")
    assert wire.data.endswith(b"\r\n\r\n1\r\na\r\n0\r\n\r\n")
    assert wire.closed == [False]


def test_a_stream_and_its_end() -> None:
    wire = Wire()
    answer = reply(wire)
    assert answer.framed
    answer.begin(200, b"", b"1\r\na\r\n")
    answer.write(b"1\r\nb\r\n")
    answer.end()
    head, _, body = wire.data.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
    assert wire.closed == [False]


def test_a_stream_that_fails() -> None:
    wire = Wire()
    answer = reply(wire)
    answer.begin(200, b"", b"1\r\na\r\n")
    answer.fail(bad_request("x").event())
    assert wire.data.count(b"HTTP/1.1") == 1
    assert wire.data.endswith(b"\n\n\r\n0\r\n\r\n")
    assert wire.closed == [True]


def test_an_old_client_gets_no_frames_and_is_closed() -> None:
    wire = Wire()
    answer = reply(wire, old=True)
    assert not answer.framed
    answer.begin(200, b"", b"a")
    answer.fail(b"data: x\n\n")
    assert b"chunked" not in wire.data
    assert wire.data.endswith(b"\r\n\r\nadata: x\n\n")
    assert wire.closed == [True]


def test_never_a_second_head_or_end() -> None:
    answer = reply(Wire())
    answer.begin(200, b"", b"")
    with pytest.raises(AssertionError, match="second response head"):
        answer.fault(bad_request("x"))
    answer.end()
    with pytest.raises(AssertionError, match="second end"):
        answer.end()
