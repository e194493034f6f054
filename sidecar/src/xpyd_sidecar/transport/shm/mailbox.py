"""How the descriptor of prefill's memory comes to decode: as a datagram over a Unix socket, beside the session.

    decode                                             prefill
    binds a socket; ABLE(its name)     ─────────────▶  proves who decode is, and connects to that socket
                                       ◀────(datagram)  a secret
                                       ◀─────────────  WELCOME(what the secret's sum is, the memory's name, …)
    finds it; LINK map (the secret)    ─────────────▶  so the socket is decode's
                                       ◀────(datagram)  the memory's name, with its descriptor
                                       ◀─────────────  SHARED
    takes it, and maps the memory

A datagram between sockets of one kernel is in the receiver's queue when it has been sent. So each of the two is there when
the session says so, or never comes, and nobody waits for it.

The socket has a name in a folder that both share, or, without one, in the network namespace that both are in (an abstract
name, unix(7)). Others may send to it, or put a socket of theirs in its place. So a descriptor goes only to the very socket
that the secret went to, once the session has told the secret: a connected socket stays connected to that one, whoever has
its name by then. And of what comes decode takes what the session has told of, and nothing else.

A socket lives for one handshake. One that was killed in between leaves a name in the folder, which whoever binds there a
minute later removes.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from xpyd_sidecar.process import resources

OTHERWISE: Final = "set kv.sharedMemory, so that both have a folder to share, or kv.transport: auto"
"""What to do where transport is shm and there is no way to share memory."""
PREFIX: Final = "xpyd-kv-"
ABSTRACT: Final = "@"
"""Begins the name of a socket that is in no folder."""
NAME_MAX: Final = 64
"""Bytes."""
LOOKED_AT: Final = 1000
"""Files of a folder, for names that nobody owns: one may have any number of others."""
LETTERS: Final = 32
"""That are looked at: the kernel keeps some ten of them (net.unix.max_dgram_qlen)."""
LETTER_BYTES: Final = 256
SECRET_BYTES: Final = 32
YOUNG_S: Final = 60.0
"""By the clock of files, which may jump: then a name that nobody owns stays for longer."""


class Mailbox:
    """Decode's socket. ``name``: as prefill is told."""

    def __init__(self, folder: Path | None) -> None:
        """Bind one. ``folder``: that prefill shares; None: it is in the same network namespace.

        Raises:
            OSError: the folder cannot be written, or files are lacking.
        """
        drawn = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.name = drawn if folder is not None else ABSTRACT + drawn
        self._path = folder / drawn if folder is not None else None
        if folder is not None:
            sweep(folder)
        self._sock = _datagrams()
        try:
            with _address(self.name, folder) as address:
                self._sock.bind(address)
        except BaseException:
            self._sock.close()
            raise

    def take(self, wanted: Callable[[bytes], bool]) -> tuple[bytes, int | None] | None:
        """What came with the first wanted bytes: these, and a descriptor for the caller to close, if there is one.

        None: nothing wanted has come. What else has come is dropped.
        """
        found: tuple[bytes, int | None] | None = None
        for _ in range(LETTERS):
            try:
                letter, extra, _, _ = self._sock.recvmsg(LETTER_BYTES, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                break
            fd = _descriptor(extra)
            if found is None and wanted(letter):
                found = letter, fd
            elif fd is not None:
                os.close(fd)
        return found

    def close(self) -> None:
        """Remove it; again: nothing."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # gone, or something of others is in its place
                self._path.unlink()
            self._path = None
        self._sock.close()


class MailboxSender:
    """Prefill's side of one mailbox. ``secret``: what was sent there."""

    def __init__(self, mailbox: str, folder: Path | None) -> None:
        """Connect, and send a secret. Never waits, and nor does ``send``.

        Raises:
            OSError: nobody is there, it is full, or files are lacking.
            ValueError: it is no mailbox's name, or no folder is shared.
        """
        plain = mailbox.removeprefix(ABSTRACT)
        if not plain.startswith(PREFIX) or "/" in plain or "\0" in plain or len(plain.encode()) > NAME_MAX:
            raise ValueError("decode names no mailbox")
        if folder is None and plain == mailbox:
            raise ValueError("prefill has no folder to share")
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._sock = _datagrams()
        try:
            with _address(mailbox, folder) as address:
                self._sock.connect(address)
            self._sock.send(self.secret)
        except BaseException:
            self._sock.close()
            raise

    def send(self, name: bytes, fd: int) -> None:
        """Send a descriptor to whom the secret was sent.

        Raises:
            OSError: that one is gone, or full.
        """
        self._sock.sendmsg([name], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])

    def close(self) -> None:
        """Nothing more is sent; again: nothing."""
        self._sock.close()


def mark(secret: bytes) -> bytes:
    """By which a secret is known to whom it was sent, and to nobody else."""
    return hashlib.sha256(secret).digest()


def sweep(folder: Path) -> None:
    """Remove names whose owners have died in the middle of a handshake; of so many that are looked at.

    Raises:
        OSError: the folder cannot be read, or files are lacking.
    """
    with os.scandir(folder) as found:
        old = [Path(one) for one in itertools.islice(found, LOOKED_AT) if one.name.startswith(PREFIX)]
    for path in old:
        try:
            if time.time() - path.lstat().st_mtime >= YOUNG_S and not _lives(path):
                path.unlink()
        except OSError as error:
            if resources.is_own_lack(error):
                raise
            continue  # gone, or not ours to remove: another user's, a folder


def _lives(path: Path) -> bool:
    """Whether a socket has an owner. A file of that name has none.

    Raises:
        OSError: it is another kind of socket, or another user's; or files are lacking.
    """
    with _datagrams() as sock, _address(path.name, path.parent) as address:
        try:
            sock.connect(address)
        except ConnectionRefusedError:
            return False
    return True


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)


@contextlib.contextmanager
def _address(name: str, folder: Path | None) -> Iterator[str]:
    """What a socket of that name is called, within the 107 bytes that the kernel takes, however deep the folder is."""
    if name.startswith(ABSTRACT):
        yield "\0" + name.removeprefix(ABSTRACT)
        return
    assert folder is not None
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{at}/{name}"
    finally:
        os.close(at)


def _descriptor(extra: list[tuple[int, int, bytes]]) -> int | None:
    """The one that came with a datagram; there is room for one, and the kernel closes others."""
    return next((array.array("i", data)[0] for level, kind, data in extra
                 if (level, kind, len(data)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, 4)), None)
