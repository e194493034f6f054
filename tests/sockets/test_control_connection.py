"""The control connection over real sockets: frames come as they were said, and what is wrong ends it once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import pytest
from control_ends import End, connected_sockets, on, wait_until

from xpyd_sidecar.errors import AuthError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.manifests import ManifestTaken, Sums
from xpyd_sidecar.kv.session_keys import Sealing
from xpyd_sidecar.kv.wire import BODY_MAX, Frame, FrameKind
from xpyd_sidecar.session import control_connection
from xpyd_sidecar.threads.loop import Loop

ONE, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop("test-control", lambda now: None)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def ends(loop: Loop) -> Iterator[tuple[End, End]]:
    with connected_sockets() as (near, far):
        made: list[End] = []
        on(loop, lambda: made.extend(End(loop, sock) for sock in (near, far)))
        one, other = made
        on(loop, partial(one.link.seal, Sealing(ONE), Sealing(OTHER)))
        on(loop, partial(other.link.seal, Sealing(OTHER), Sealing(ONE)))
        yield one, other


def test_frames_come_as_they_were_said_in_both_directions(loop: Loop, ends: tuple[End, End]) -> None:
    one, other = ends
    sums = Sums(7, bytes(900_000))
    on(loop, lambda: [one.link.send(FrameKind.SUMS, sums), one.link.send(FrameKind.TAKEN, ManifestTaken(3))])
    on(loop, lambda: other.link.send(FrameKind.PING))
    wait_until(lambda: len(other.frames) == 2 and one.frames)
    assert [frame.kind for frame in other.frames] == [FrameKind.SUMS, FrameKind.TAKEN]
    assert len(other.frames[0].body) > 900_000
    assert not one.link.writing


@pytest.mark.parametrize("wrong", [ProtocolError("peer", "is wrong"), KeyError("ours")])
def test_what_its_owner_raises_ends_it_before_the_next_frame(loop: Loop, ends: tuple[End, End], wrong: Exception) -> None:
    one, other = ends
    heard: list[FrameKind] = []

    def hear(frame: Frame) -> None:
        heard.append(frame.kind)
        raise wrong

    other.heard = hear
    on(loop, lambda: [one.link.send(FrameKind.PING), one.link.send(FrameKind.TAKEN, ManifestTaken(3))])
    wait_until(lambda: other.errors and one.errors)
    assert heard == [FrameKind.PING]
    assert [type(error) for error in other.errors] == [ProtocolError if isinstance(wrong, PeerError) else PeerGone]
    assert [type(error) for error in one.errors] == [PeerGone]
    assert not other.link.open


def test_bytes_that_are_no_frame_end_it_by_name(loop: Loop) -> None:
    with connected_sockets() as (near, far):
        made: list[End] = []
        on(loop, lambda: made.append(End(loop, near)))
        far.send(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: made[0].errors)
        assert "not an xpyd data link" in str(made[0].errors[0])


def test_last_words_leave_before_it_is_closed(loop: Loop, ends: tuple[End, End]) -> None:
    one, other = ends

    def refuse() -> None:
        one.link.send(FrameKind.TAKEN, ManifestTaken(9))
        one.link.close(PeerGone("peer", "over"))

    on(loop, refuse)
    wait_until(lambda: other.errors)
    assert [frame.kind for frame in other.frames] == [FrameKind.TAKEN]
    on(loop, partial(one.link.close, PeerGone("peer", "again")))
    on(loop, partial(one.link.send, FrameKind.PING))
    assert [error.reason for error in one.errors] == ["over"]


@pytest.mark.parametrize(("error", "kind"), [(PeerGone("peer", "its data connection has ended"), AuthError),
                                             (ProtocolError("peer", "is wrong"), ProtocolError)])
def test_what_the_peer_has_said_for_good_counts_where_its_end_shows_elsewhere_first(
        loop: Loop, ends: tuple[End, End], error: PeerError, kind: type[PeerError]) -> None:
    one, other = ends
    heard: list[FrameKind] = []

    def hear(frame: Frame) -> None:
        heard.append(frame.kind)
        raise AuthError("peer", "says why")

    other.heard = hear

    def both() -> None:
        one.link.send(FrameKind.PING)
        one.link.send(FrameKind.REJECT)
        one.link.close(PeerGone("peer", "is over"))
        other.link.close(error)

    on(loop, both)
    assert [type(found) for found in other.errors] == [kind]
    assert heard == ([FrameKind.REJECT] if kind is AuthError else [])


@pytest.mark.parametrize("words", [b"", b"no frame"])
def test_without_such_words_it_ends_as_it_would_have(loop: Loop, ends: tuple[End, End], words: bytes) -> None:
    one, other = ends
    gone = PeerGone("peer", "its data connection has ended")
    on(loop, lambda: [one.link._sock.send(words) if words else None, other.link.close(gone)])
    assert other.errors == [gone]


def test_a_peer_that_does_not_read_is_given_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_connection, "QUEUED_MAX", 1 << 20)
    with connected_sockets() as (near, _):
        made: list[End] = []
        on(loop, lambda: made.append(End(loop, near)))
        (end,) = made
        on(loop, partial(end.link.seal, Sealing(ONE), Sealing(OTHER)))
        for _ in range(400):
            on(loop, partial(end.link.send, FrameKind.TAKEN, Sums(0, bytes(BODY_MAX - 16))))
            if end.errors:
                break
        wait_until(lambda: end.errors)
        assert "does not read" in end.errors[0].reason


def test_a_connection_that_cannot_be_made_is_named(loop: Loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(address)
    made: list[End] = []
    on(loop, lambda: made.append(End(loop, sock, connecting=True)))
    wait_until(lambda: made[0].errors)
    assert "cannot connect" in made[0].errors[0].reason


def test_silence_is_found_at_two_looks_in_a_row(loop: Loop, ends: tuple[End, End]) -> None:
    one, _ = ends
    then = one.link.last_in
    assert not one.link.silent(then + 6, 5.0)
    assert one.link.silent(then + 6.1, 5.0)
    assert not one.link.silent(then + 4, 5.0)


def test_who_seals_with_another_key_does_not_hold_the_service_key(loop: Loop, ends: tuple[End, End]) -> None:
    one, other = ends
    on(loop, partial(one.link.seal, Sealing(OTHER), Sealing(ONE)))
    on(loop, partial(one.link.send, FrameKind.PING))
    wait_until(lambda: other.errors)
    assert [type(error) for error in other.errors] == [AuthError]


def test_a_sealed_frame_that_was_changed_later_is_no_question_of_keys(loop: Loop, ends: tuple[End, End]) -> None:
    one, other = ends
    on(loop, partial(one.link.send, FrameKind.PING))
    wait_until(lambda: other.frames)
    on(loop, partial(one.link.seal, Sealing(OTHER), Sealing(ONE)))
    on(loop, partial(one.link.send, FrameKind.PING))
    wait_until(lambda: other.errors)
    assert [type(error) for error in other.errors] == [ProtocolError]
