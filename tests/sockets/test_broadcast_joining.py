"""Who is let into a broadcast queue, and who is refused with which words."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from files import no_files
from queue_peers import KEY
from queues import JOIN_S, Make, making

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.broadcast.local import open_segment
from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.reader import LocalReader, join
from xpyd_sidecar.broadcast.segment import Segment
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import AuthError, ConfigError, Incompatible, PeerGone, ProtocolError, SidecarError
from xpyd_sidecar.process import resources


@pytest.fixture
def make() -> Iterator[Make]:
    yield from making()


def test_readers_that_do_not_join_are_named() -> None:
    writer = Writer("q", local=("a", "b"), remote=("c",), key=KEY)
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(join, writer.handle, "b", timeout_s=JOIN_S)
        while "b" in writer._shared.door.missing():  # type: ignore[union-attr]
            writer._shared.door.step(0.05)  # type: ignore[union-attr]
        with pytest.raises(PeerGone, match=r"a, c: did not join q within 0\.2 s"):
            writer.wait_ready(0.2)
        joined.result().close()
    writer.close()


def refused(writer: Writer, handle: bytes, name: str, key: ServiceKey | None = KEY,
            timeout_s: float = JOIN_S) -> SidecarError:
    """Why a reader is not taken."""
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join, handle, name, timeout_s=timeout_s, key=key)
        while not joining.done():
            with pytest.raises(PeerGone):
                writer.wait_ready(0.2)
        error = joining.exception()
    assert isinstance(error, SidecarError)
    return error


@pytest.mark.parametrize(("name", "way"), [("a", "local"), ("c", "remote")])
def test_who_does_not_hold_the_handle_is_refused(name: str, way: str) -> None:
    writer = Writer("q", local=("a",), remote=("c",), key=KEY)
    handle = wire.pack(msgspec.structs.replace(wire.read_handle(writer.handle), token=b"no"))
    error = refused(writer, handle, name)
    assert isinstance(error, AuthError)
    assert "does not hold this queue's handle" in str(error)
    writer.close()


def test_a_remote_reader_with_another_service_key_is_not_let_in() -> None:
    writer = Writer("q", remote=("c",), key=KEY)
    assert isinstance(refused(writer, writer.handle, "c", ServiceKey(bytes(32)), timeout_s=0.8), PeerGone)
    with pytest.raises(ConfigError, match="wants the service's key"):
        join(writer.handle, "c", timeout_s=1)
    writer.close()


def test_a_reader_that_connects_once_reads_as_any_other_and_is_never_called_silent() -> None:
    writer = Writer("q", remote=("c",), key=KEY)
    handle = wire.pack(msgspec.structs.replace(wire.read_handle(writer.handle), second=""))
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join, handle, "c", timeout_s=JOIN_S, key=KEY)
        writer.wait_ready(JOIN_S)
        reader = joining.result()
    writer.send(b"x")
    assert reader.recv(JOIN_S) == [b"x"]
    assert writer.silent() == ()
    reader.close()
    writer.close()


@pytest.mark.parametrize("way", ["local", "remote"])
def test_a_name_is_taken_once(make: Make, way: str) -> None:
    queue = make(way)
    name = next(iter(queue.readers))
    writer = queue.writer
    missing = Writer("other", local=("x",))
    with ThreadPoolExecutor() as pool:
        second = pool.submit(join, writer.handle, name, timeout_s=JOIN_S, key=KEY)
        end = time.monotonic() + JOIN_S
        while not second.done() and time.monotonic() < end:
            if writer._shared is not None:
                writer._shared.door.step(0.05)
            if writer._remotes is not None:
                writer._remotes.step(0.05)
        error = second.exception()
    assert isinstance(error, AuthError)
    assert "has joined already" in str(error)
    missing.close()


def test_bad_handles_names_and_notes_are_refused_before_anything_is_sent(make: Make) -> None:
    handle = make().writer.handle
    with pytest.raises(ProtocolError, match="not a handle"):
        join(b"garbage", "l0")
    with pytest.raises(ConfigError, match="'zz' is not one of its readers: l0, l1"):
        join(handle, "zz")
    with pytest.raises(ConfigError, match="note: 40000 bytes"):
        join(handle, "l0", note=bytes(40_000))
    newer = msgspec.structs.replace(wire.read_handle(handle), version=2)
    with pytest.raises(Incompatible, match="broadcast version 1 here, 2 there"):
        join(wire.pack(newer), "l0")


def test_a_handle_whose_writer_is_gone_says_so() -> None:
    writer = Writer("q", local=("a",), remote=("b",), key=KEY)
    handle = writer.handle
    writer.close()
    for name in ("a", "b"):
        with pytest.raises(PeerGone):
            join(handle, name, timeout_s=1, key=KEY)


def test_strangers_at_the_door_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer("q", local=("a",))
    door = wire.read_handle(writer.handle).door
    strangers = []
    for say in (b"garbage", b"", wire.pack(wire.RingMapped()), None):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"\0{door}")
        if say is not None:
            stranger.send(say)
        strangers.append(stranger)
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(join, writer.handle, "a", timeout_s=JOIN_S)
        writer.wait_ready(JOIN_S)
        reader = joined.result()
    writer.send(b"x")
    assert reader.recv(20) == [b"x"]
    assert "refused a connection" in caplog.text
    for stranger in strangers:
        stranger.close()
    reader.close()
    writer.close()


def test_without_a_file_nobody_is_let_in_for_a_while_which_is_said_once_and_costs_nothing(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resources, "SAY_S", 60.0)  # however long it takes here, no second line is due
    writer = Writer("q", local=("a",))
    assert writer._shared is not None
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(join, writer.handle, "a", timeout_s=JOIN_S)
        while not select.select([writer._shared.door._sock], [], [], 0.1)[0]:
            assert not joined.done()
        began = time.thread_time()
        with no_files(), caplog.at_level(logging.INFO), pytest.raises(PeerGone, match="a: did not join q"):
            writer.wait_ready(0.9)
        assert time.thread_time() - began < 0.3
        assert [one.getMessage() for one in caplog.records if one.name.startswith("xpyd_")] == [
            "broadcast q: readers are not let in: no file descriptors are left to this process"]
        writer.wait_ready(JOIN_S)
        joined.result().close()
    writer.close()


def test_a_segment_that_is_not_sealed_is_refused(make: Make) -> None:
    reader = make().each()[0]
    assert isinstance(reader, LocalReader)
    bare = os.memfd_create("bare", os.MFD_ALLOW_SEALING)
    os.ftruncate(bare, 4096)
    with pytest.raises(ProtocolError, match="no segment"):
        open_segment("w", bare, 1)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(bare)
    with pytest.raises(ProtocolError, match="of 8192 bytes, not 9000"):
        open_segment("w", os.dup(Segment.create("small", 8192).fd), 9000)


@pytest.mark.parametrize(("options", "reason"), [
    ({}, "readers need names"),
    ({"local": ("a",), "remote": ("a",), "key": KEY}, "each once"),
    ({"remote": ("a",), "listen": "0.0.0.0"}, "key: readers from elsewhere can reach 0.0.0.0"),
    ({"local": ("a",), "chunks": 1}, "chunks: 1 is not between"),
    ({"local": ("a",), "chunk_bytes": 100}, "chunk_bytes: 100"),
    ({"remote": ("a",), "listen": "203.0.113.7", "key": KEY}, "cannot listen on 203.0.113.7"),
])
def test_wrong_settings_are_refused_by_name(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Writer("q", **options)  # type: ignore[arg-type]
