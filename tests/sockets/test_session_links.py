"""Links that two ranks agree on: what both have, or TCP with the reason; and the death of either leaves nothing behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from link_peers import HEAD_BYTES, TIMEOUT_S, DecodeProcess, PrefillProcess
from manifest_ranks import DecodeRank, PrefillRank, key, wait_until

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.session import receiver
from xpyd_sidecar.transport import gates, landing, moves, moves_plain, tickets
from xpyd_sidecar.transport.shm import mailbox, serve
from xpyd_sidecar.transport.shm.mailbox import Mailbox, MailboxSender
from xpyd_sidecar.transport.shm.serve import SharedCopies

IDS = (9, 3, 4, 5, 30, 31)
LINKS = ["tcp", "shm"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "a mailbox is left"


def open_files() -> set[str]:
    """Sockets and shared memory that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # what has listed them
            continue
    return {one for one in found if one.startswith(("socket:", "/memfd:"))}


def mappings() -> int:
    """Of copies, its own and of others, in this process."""
    gc.collect()  # those of other tests
    return Path("/proc/self/maps").read_text().count(f"/memfd:{serve.LABEL}")


def whole(p: PrefillRank, d: DecodeRank, number: int = 1) -> None:
    """A prompt is handed over."""
    p.compute(key(number), 0, 6)
    d.want(key(number), p, IDS)
    d.whole(key(number), 0, IDS)


@pytest.mark.unsanitized
def test_shared_memory_works_without_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "Gate", gates.LockedGate)
    monkeypatch.setattr(landing, "Scatter", moves_plain.Scatter)
    for name, value in {"sums": moves_plain.sums, "COMPILED": False}.items():
        monkeypatch.setattr(moves, name, value)
    with PrefillRank(transport="shm") as p, DecodeRank(transport="shm", head=1, heads=2) as d:
        whole(p, d)
        assert d.links == {"shm"}


@pytest.mark.parametrize("sides", ["both", "decode"])
def test_tcp_is_refused_by_name_where_it_was_not_compiled(sides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lack() -> None:
        monkeypatch.setattr(gates, "COMPILED", False)
        monkeypatch.setattr(gates, "REASON", "tcp: its loops were not compiled")

    if sides == "both":
        lack()
    with PrefillRank(transport="tcp") as p:
        lack()
        with DecodeRank(transport="tcp") as d:
            p.compute(key(), 0, 6)
            d.want(key(), p, IDS)
            assert d.broken_off() == [Outcome.INCOMPATIBLE]
            assert "its loops were not compiled" in d.broken[0].reason


def test_processes_share_memory_by_a_folder_or_by_their_network_namespace(folder: Path) -> None:
    for shared in (folder, None):
        with PrefillRank(transport="shm", folder=shared) as p, DecodeRank(transport="shm", folder=shared) as d:
            whole(p, d)
            assert d.links == {"shm"}


@pytest.mark.parametrize(("ours", "theirs", "reason"), [
    ("tcp", "auto", ""), ("auto", "tcp", "shm: decode wants no link within a host; nixl: not at prefill")])
def test_one_side_that_wants_tcp_gets_it(ours: str, theirs: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with PrefillRank(transport=ours) as p, DecodeRank(transport=theirs) as d:
        whole(p, d)
        assert d.links == {"tcp"}
    assert f"over tcp{f' ({reason})' if reason else ''}" in caplog.text


@pytest.mark.parametrize(("ours", "theirs", "reason"), [
    ("shm", "tcp", "transport shm: shm: decode wants no link within a host"),
    ("tcp", "shm", "transport shm: prefill has welcomed over tcp"),
    ("rdma", "auto", "transport rdma: nixl: not at prefill")])
def test_sides_that_insist_on_different_links_are_refused(ours: str, theirs: str, reason: str) -> None:
    with PrefillRank(transport=ours) as p, DecodeRank(transport=theirs) as d:
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        assert d.broken_off() == [Outcome.INCOMPATIBLE]
        assert reason in d.broken[0].reason
        assert d.broken[0].final


@pytest.mark.parametrize(("transport", "expected"), [("auto", None), ("shm", Outcome.INCOMPATIBLE)])
def test_another_host_gets_tcp_or_a_refusal(transport: str, expected: Outcome | None) -> None:
    with PrefillRank(transport=transport) as p, DecodeRank(transport=transport, host="another host") as d:
        if expected is None:
            whole(p, d)
            assert d.links == {"tcp"}
            words = d.receiver.links.words
            assert words == ("blocks come over tcp: nixl: not at prefill",), "nobody misses shared memory there"
        else:
            p.compute(key(), 0, 6)
            d.want(key(), p, IDS)
            assert d.broken_off() == [expected]
            assert "not on one host" in d.broken[0].reason


CANNOT = {"no folder at prefill": "prefill has no folder to share", "two folders": "decode's mailbox: No such file",
          "no letter comes": "nothing of prefill's has come", "nothing comes": "has not come",
          "nobody is there any more": "decode's mailbox: refused", "another comes": "another memory",
          "no memory": "prefill has no memory to share", "too many": "too many sessions"}


@pytest.mark.parametrize("transports", ["auto auto", "shm shm", "auto shm", "shm auto"])
@pytest.mark.parametrize("why", CANNOT)
def test_where_memory_cannot_be_shared_it_is_said_with_what_would_help(  # noqa: PLR0917  # fixtures
        why: str, transports: str, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    other = SharedCopies(1 << 20)
    folders: dict[str, Path | None] = {"p": folder, "d": folder}

    def refused(*_: object) -> None:
        raise ConnectionRefusedError(111, "refused")

    real = MailboxSender.send
    if why == "no folder at prefill":
        folders["p"] = None
    elif why == "two folders":
        folders["d"] = tmp_path_factory.mktemp("other")
    elif why == "no letter comes":
        monkeypatch.setattr(Mailbox, "take", lambda *_: None)
    elif why == "nothing comes":
        monkeypatch.setattr(MailboxSender, "send", lambda *_: None)
    elif why == "nobody is there any more":
        monkeypatch.setattr(MailboxSender, "send", refused)
    elif why == "another comes":
        monkeypatch.setattr(MailboxSender, "send", lambda box, name, _: real(box, name, other.fd))
    ours, theirs = transports.split()
    with PrefillRank(transport=ours, folder=folders["p"]) as p, DecodeRank(transport=theirs, folder=folders["d"]) as d:
        if why == "no memory":
            p.shm.copies = None
        while why == "too many" and p.shared.tickets.take() is not None:
            pass
        if transports == "auto auto":
            whole(p, d)
            assert d.links == {"tcp"}
            assert CANNOT[why] in caplog.text
            assert d.receiver.counted[f"{metrics.LINKS_REFUSED}:shm"] == 1
            assert [words.partition(": ")[0] for words in d.receiver.links.words] == ["blocks come over tcp"]
            assert CANNOT[why] in d.receiver.links.words[0]
            assert not d.receiver.refused
            return
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        assert d.broken_off() == [Outcome.INCOMPATIBLE]
        reason = d.broken[0].reason
        assert "transport shm: " in reason
        assert CANNOT[why] in reason
        assert "set kv.sharedMemory, so that both have a folder to share, or kv.transport: auto" in reason
        assert [(one.incarnation, one.reason) for one in d.receiver.refused] == [(p.me.incarnation, reason)]


@pytest.mark.parametrize("lack", ["prefill", "mailbox is full"])
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_what_is_lacking_for_a_moment_is_no_refusal_and_the_next_try_is_served(
        lack: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where: Any = serve if lack == "prefill" else MailboxSender
    name = "MailboxSender" if lack == "prefill" else "send"
    error = OSError(24, "Too many open files") if lack == "prefill" else BlockingIOError(11, "full")
    lacks, real = iter([error, error] if transport == "shm" else [error]), getattr(where, name)

    def once(*args: object) -> object:
        if (found := next(lacks, None)) is not None:
            raise found
        return real(*args)

    monkeypatch.setattr(where, name, once)
    with PrefillRank(transport=transport) as p, DecodeRank(transport=transport) as d:
        if transport == "auto":
            whole(p, d)
            assert d.links == {"tcp"}
            return
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        assert d.broken_off() == [Outcome.PEER_LOST]
        assert not d.broken[0].final
        d.broken.clear()
        next(lacks, None)
        whole(p, d, 2)
        assert d.links == {"shm"}


# --- kills ---

@pytest.mark.parametrize("link", LINKS)
def test_prefill_killed_in_the_middle_is_noticed_and_its_memory_is_let_go(link: str, folder: Path) -> None:
    before = mappings()
    with (PrefillProcess(link, folder) as p,
          DecodeRank(transport=link, folder=folder, head_bytes=HEAD_BYTES, timeout_s=TIMEOUT_S) as d):
        d.want(key(), p, IDS)
        wait_until(lambda: d.has(key(), 0, 2))
        assert d.links == {link}
        assert mappings() == before + int(link == "shm")
        p.kill()
        assert d.broken_off() == [Outcome.PEER_LOST]
        wait_until(lambda: mappings() == before)


@pytest.mark.parametrize("link", LINKS)
def test_decode_killed_in_the_middle_leaves_no_memory_descriptor_or_file_at_prefill(link: str, folder: Path) -> None:
    with PrefillRank(transport=link, folder=folder, store_bytes=16 << 20, head_bytes=HEAD_BYTES, grace_s=0.5,
                     timeout_s=TIMEOUT_S) as p:
        before = open_files()
        p.compute(key(), 0, 2)
        p.compute(key(2), 0, 6)
        with DecodeProcess(link, folder, p) as d:
            wait_until(lambda: key(2) in p.machine and p.publisher._by_life)
            assert p.store.used_bytes
            assert open_files() - before
            d.kill()
            assert {one.outcome for one in p.reported(2)} == {Outcome.PEER_LOST}
        wait_until(lambda: p.store.used_bytes == 0 and not p.publisher._sessions)
        wait_until(lambda: open_files() <= before)
        assert len(p.shared.tickets._free) == tickets.SESSIONS


def test_decode_killed_during_the_handshake_leaves_only_a_name_that_is_swept(tmp_path: Path) -> None:
    Mailbox(tmp_path)._sock.close()  # as the kernel does for who is killed
    (left,) = tmp_path.iterdir()
    Mailbox(tmp_path).close()
    assert list(tmp_path.iterdir()) == [left], "it is young"
    os.utime(left, (0, time.time() - 2 * mailbox.YOUNG_S))
    Mailbox(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
