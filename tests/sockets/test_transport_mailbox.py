"""The descriptor of prefill's memory comes to the mailbox that it is meant for, whoever else is there."""

from __future__ import annotations

import os
import resource
import socket
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_ends import wait_until
from mailboxes import box_in, descriptor_in, files, secret_in

from xpyd_sidecar.transport.shm import mailbox
from xpyd_sidecar.transport.shm.mailbox import Mailbox, MailboxSender
from xpyd_sidecar.transport.shm.serve import SharedCopies

NAME = b"n" * 32


@pytest.fixture
def shared() -> SharedCopies:
    return SharedCopies(100_000)


@pytest.fixture(params=["folder", "namespace", "deep folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    if request.param == "namespace":
        yield None
        return
    found = tmp_path / ("x" * 120 if request.param == "deep folder" else "box")
    found.mkdir()
    yield found
    assert list(found.iterdir()) == []


def test_a_descriptor_comes_to_its_mailbox(folder: Path | None, shared: SharedCopies) -> None:
    with box_in(folder) as box:
        sender = MailboxSender(box.name, folder)
        assert secret_in(box, mailbox.mark(sender.secret)) == sender.secret
        sender.send(shared.name, shared.fd)
        fd = descriptor_in(box, shared.name)
        assert fd is not None
        assert os.fstat(fd).st_ino == os.fstat(shared.fd).st_ino
        assert not os.get_inheritable(fd)
        os.close(fd)
        assert descriptor_in(box, shared.name) is None
    with pytest.raises(ConnectionRefusedError):
        sender.send(shared.name, shared.fd)
    sender.close()
    with pytest.raises(OSError, match=r"refused|No such file"):
        MailboxSender(box.name, folder)


@pytest.mark.parametrize("when", ["before the secret", "after it"])
def test_who_puts_a_socket_in_a_mailboxs_place_gets_no_descriptor(when: str, folder: Path | None,
                                                                  shared: SharedCopies) -> None:
    """A process that may write into the folder, or that is in the network namespace when decode has ended."""
    with box_in(folder) as box, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as thief:
        def steal() -> None:
            if folder is not None:
                (folder / box.name).unlink()
            else:
                box.close()
            with mailbox._address(box.name, folder) as at:
                thief.bind(at)

        if when == "before the secret":
            steal()
        sender = MailboxSender(box.name, folder)
        if when == "before the secret":
            assert thief.recv(100) == sender.secret
            if folder is not None:  # decode finds nothing, so it tells nothing
                assert box.take(lambda letter: letter == sender.secret) is None
        else:
            assert secret_in(box, mailbox.mark(sender.secret)) == sender.secret
            steal()
            if folder is not None:
                sender.send(shared.name, shared.fd)
                fd = descriptor_in(box, shared.name)
                assert fd is not None, "it comes to whom the secret came to"
                os.close(fd)
            else:
                with pytest.raises(ConnectionRefusedError):
                    sender.send(shared.name, shared.fd)
        sender.close()
        with pytest.raises(BlockingIOError):
            thief.recvmsg(100, socket.CMSG_SPACE(4))


def test_what_strangers_send_is_closed_and_does_not_stand_in_for_it(shared: SharedCopies) -> None:
    before = files()
    stranger = os.open("/dev/null", os.O_RDONLY)
    with box_in(None) as box, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        at = "\0" + box.name[1:]
        many = array("i", [stranger] * 3)
        sock.sendmsg([b"x" * 5000], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)], 0, at)
        sock.sendto(b"", at)
        sender = MailboxSender(box.name, None)
        assert secret_in(box, mailbox.mark(sender.secret)) == sender.secret
        sock.sendmsg([b"x" * 5000], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)], 0, at)
        sender.send(shared.name, shared.fd)
        sender.send(shared.name, stranger)  # later than the right one
        sender.close()
        fd = descriptor_in(box, shared.name)
        assert fd is not None
        assert os.fstat(fd).st_ino == os.fstat(shared.fd).st_ino
        os.close(fd)
    os.close(stranger)
    wait_until(lambda: files() <= before)  # threads of other tests may have some for a moment


def test_a_full_mailbox_is_told_at_once() -> None:
    with box_in(None) as box:
        def fill() -> None:
            for _ in range(10_000):
                MailboxSender(box.name, None).close()

        with pytest.raises(BlockingIOError):
            fill()
        assert box.take(lambda letter: letter == NAME) is None
        MailboxSender(box.name, None).close()


@pytest.mark.parametrize("name", ["", "@", "x", "@x", "/etc/passwd", f"{mailbox.PREFIX}../../etc",
                                  f"@{mailbox.PREFIX}\0", mailbox.PREFIX + "x" * 100, mailbox.PREFIX + "\u20ac" * 30])
def test_no_other_socket_is_sent_to(name: str, tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(ValueError, match="names no mailbox"):
            MailboxSender(name, folder)
    with pytest.raises(ValueError, match="no folder to share"):
        MailboxSender(mailbox.PREFIX + "1", None)


def test_names_without_an_owner_are_swept_and_others_are_not(tmp_path: Path) -> None:
    dead, file, young, alien = (tmp_path / name for name in (
        f"{mailbox.PREFIX}dead", f"{mailbox.PREFIX}file", f"{mailbox.PREFIX}young", "something-else"))
    for path in (dead, young):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, mailbox._address(path.name, tmp_path) as at:
            sock.bind(at)
    for path in (file, alien):
        path.write_bytes(b"x")
    living = Mailbox(tmp_path)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with mailbox._address(f"{mailbox.PREFIX}stream", tmp_path) as at:
        stream.bind(at)
    stream.listen()
    (tmp_path / f"{mailbox.PREFIX}loose").symlink_to(tmp_path / "nowhere")
    (tmp_path / f"{mailbox.PREFIX}folder").mkdir()
    for path in tmp_path.iterdir():
        if path != young:
            os.utime(path, (0, time.time() - 2 * mailbox.YOUNG_S), follow_symlinks=False)
    mailbox.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        young.name, alien.name, living.name, f"{mailbox.PREFIX}stream", f"{mailbox.PREFIX}loose",
        f"{mailbox.PREFIX}folder"}
    stream.close()
    living.close()


def test_a_folder_full_of_others_files_costs_a_bounded_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(20):
        (tmp_path / f"{mailbox.PREFIX}{n}").touch()
        os.utime(tmp_path / f"{mailbox.PREFIX}{n}", (0, time.time() - 2 * mailbox.YOUNG_S))
    monkeypatch.setattr(mailbox, "LOOKED_AT", 7)
    mailbox.sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 13


def test_a_mailbox_in_whose_place_is_something_else_is_closed_all_the_same(tmp_path: Path) -> None:
    before = files()
    box = Mailbox(tmp_path)
    (tmp_path / box.name).unlink()
    (tmp_path / box.name).mkdir()
    box.close()
    box.close()
    wait_until(lambda: files() <= before)  # threads of other tests may have some for a moment


def test_a_mailbox_that_cannot_be_bound_leaves_no_file(tmp_path: Path) -> None:
    before = files()
    with pytest.raises(FileNotFoundError):
        Mailbox(tmp_path / "none")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Mailbox(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: files() <= before)  # threads of other tests may have some for a moment
