"""Readers of this host: how they join, how each side knows that the other lives, and how side segments reach them.

The writer listens on an abstract unix socket (no file is left behind); a reader connects, shows the handle's token and gets
the ring's descriptor. The connection then stays open and says nothing more, but for side segments: it is there to break.
The kernel closes it when either process ends. A forked child may keep it open, so a pidfd of the peer is watched as well
where the kernel gives one (not across PID namespaces). Only processes of the same user may join.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Container
from pathlib import Path
from typing import Final

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.broadcast.segment import Segment
from xpyd_sidecar.errors import AuthError, PeerGone, ProtocolError
from xpyd_sidecar.process import resources

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_ENDED: Final = select.POLLHUP | select.POLLERR
WAITING_MAX: Final = 64
"""Connections that have not said who they are."""
LACK_S: Final = 0.02
"""How long nobody is let in after a file was lacking. Those who knock wait in the kernel."""


class QueueLink:
    """One end of a joined connection."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self.note = b""
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, 0)
        self._pid, self._pidfd = _process(sock)
        if self._pidfd >= 0:
            self._poll.register(self._pidfd, select.POLLIN)

    def fileno(self) -> int:
        """The file number of the connection."""
        return self._sock.fileno()

    def gone(self) -> bool:
        """The peer's process has ended, or it has closed its end."""
        return any(fd == self._pidfd or events & _ENDED for fd, events in self._poll.poll(0))

    def stopped(self) -> bool:
        """The peer's process is stopped (SIGSTOP, a debugger), as far as this one can see it."""
        if self._pidfd < 0:
            return False
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_bytes()
        except OSError:  # it has ended, which ``is_gone`` says
            return False
        return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")

    def send(self, message: wire.Control, fd: int | None = None) -> None:
        """Say something, with a descriptor beside it.

        Raises:
            PeerGone: the peer has ended, or does not read what it is told.
        """
        try:
            socket.send_fds(self._sock, [wire.pack(message)], [] if fd is None else [fd], socket.MSG_DONTWAIT)
        except OSError as error:
            raise PeerGone(self.peer, f"its connection broke: {error.strerror}") from None

    def receive(self, timeout_s: float) -> tuple[bytes, int]:
        """What the peer says next, and the descriptor beside it (-1: none).

        Raises:
            PeerGone: the peer has ended, or says nothing in time.
        """
        self._sock.settimeout(max(timeout_s, 0.001))
        try:
            raw, fds, _, _ = socket.recv_fds(self._sock, wire.CONTROL_MAX, 4)
        except TimeoutError:
            raise PeerGone(self.peer, f"it said nothing for {timeout_s:.1f} s") from None
        except OSError as error:
            raise PeerGone(self.peer, f"its connection broke: {error.strerror}") from None
        for extra in fds[1:]:
            os.close(extra)
        if not raw:
            for fd in fds:
                os.close(fd)
            raise PeerGone(self.peer, "it has closed the connection or ended")
        return raw, fds[0] if fds else -1

    def close(self) -> None:
        """The peer sees it at once."""
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Door:
    """Where readers of this host join."""

    def __init__(self, queue: str, token: bytes, names: tuple[str, ...], ring: Segment) -> None:
        self.links: dict[str, QueueLink] = {}
        self.notes: dict[str, bytes] = {}
        """Of readers that have mapped the ring."""
        self._queue = queue
        self._token = token
        self._names = names
        self._ring = ring
        self._waiting: list[QueueLink] = []
        self._lack = resources.Complaint(f"broadcast {queue}: readers are not let in")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address = f"xpyd-broadcast-{secrets.token_hex(16)}"
        self._sock.bind(f"\0{self.address}")
        self._sock.listen(WAITING_MAX)
        self._sock.setblocking(False)

    def missing(self) -> tuple[str, ...]:
        """Readers that have not joined."""
        return tuple(name for name in self._names if name not in self.notes)

    def step(self, timeout_s: float) -> None:
        """Let in who knocks; waits at most that long for one."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        waiting = {link.fileno(): link for link in self._waiting}
        joining = {link.fileno(): name for name, link in self.links.items() if name not in self.notes}
        for fd in (*waiting, *joining):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(timeout_s * 1000):
            if fd in waiting:
                self._waiting.remove(waiting[fd])
                self._greet(waiting[fd])
            elif fd in joining:
                self._mapped(joining[fd])
            else:
                self._accept()

    def is_gone(self, name: str) -> bool:
        """A reader's process has ended, or it never joined."""
        link = self.links.get(name)
        return link is None or link.gone()

    def silent(self) -> tuple[str, ...]:
        """Readers whose processes are stopped."""
        return tuple(name for name, link in self.links.items() if link.stopped())

    def after_fork(self) -> None:
        """In a child of the writer's process: what stays open here would look alive when that process has ended."""
        self._sock.close()

    def close(self) -> None:
        """Nobody can join any more; those who have see the connection end."""
        for link in (*self._waiting, *self.links.values()):
            link.close()
        self.links.clear()
        self._waiting.clear()
        self._sock.close()

    def forget(self, name: str) -> None:
        """Close a reader's connection."""
        link = self.links.pop(name, None)
        if link is not None:
            link.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if resources.is_own_lack(error):
                self._lack.add(error)
                time.sleep(LACK_S)
            else:
                logger.info("broadcast %s: a reader that knocked is gone again: %s", self._queue, error)
            return
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (0, os.geteuid()):
            logger.warning("broadcast %s: refused a process of user %d", self._queue, uid)
            sock.close()
            return
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.pop(0).close()
        self._waiting.append(QueueLink(sock, "a process that joins"))

    def _greet(self, link: QueueLink) -> None:
        try:
            hello = wire.expect(link.peer, link.receive(0)[0], wire.QueueHello)
        except (PeerGone, ProtocolError) as error:
            logger.warning("broadcast %s: refused a connection: %s", self._queue, error)
            link.close()
            return
        reason = refusal(hello, self._token, self._names, self.links)
        try:
            if reason:
                logger.warning("broadcast %s: refused reader %r: %s", self._queue, hello.name, reason)
                link.send(wire.QueueRefuse(reason))
                link.close()
                return
            link.peer = hello.name
            link.send(wire.QueueWelcome(), self._ring.fd)
        except PeerGone as error:
            logger.info("broadcast %s: %s", self._queue, error)
            link.close()
            return
        link.note = hello.note
        self.links[hello.name] = link

    def _mapped(self, name: str) -> None:
        link = self.links[name]
        try:
            wire.expect(name, link.receive(0)[0], wire.RingMapped)
        except (PeerGone, ProtocolError) as error:  # it may come again: the place is free
            logger.warning("broadcast %s: reader did not join: %s", self._queue, error)
            self.forget(name)
            return
        self.notes[name] = link.note


def refusal(hello: wire.QueueHello, token: bytes, names: tuple[str, ...], joined: Container[str]) -> str:
    """Why a reader is not taken; empty where it is. ``joined``: the names that are taken."""
    if hello.version != wire.WIRE_VERSION:
        return f"broadcast version {wire.WIRE_VERSION} here, {hello.version} there"
    if not secrets.compare_digest(hello.token, token):
        return "it does not hold this queue's handle"
    if hello.name not in names:
        return f"{hello.name!r} is not one of its readers: {', '.join(names)}"
    if hello.name in joined:
        return f"{hello.name!r} has joined already"
    return ""


def join(handle: wire.Handle, name: str, note: bytes, timeout_s: float) -> tuple[QueueLink, Segment]:
    """A reader's part of joining: the connection and the ring.

    Raises:
        AuthError: the writer refuses; the reason is its own.
        PeerGone: the writer has ended, or does not answer in time.
        ProtocolError: its answer is none of this protocol.
    """
    writer = f"writer of {handle.queue}"
    end = time.monotonic() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(f"\0{handle.door}")
    except TimeoutError:
        sock.close()
        raise PeerGone(writer, f"it let nobody in for {timeout_s:.1f} s") from None
    except OSError as error:
        sock.close()
        raise PeerGone(writer, f"nobody is there on this host: {error.strerror}") from None
    link = QueueLink(sock, writer)
    try:
        link.send(wire.QueueHello(wire.WIRE_VERSION, handle.token, name, note))
        ring = _welcomed(link, handle.layout.size, end - time.monotonic())
        link.send(wire.RingMapped())
    except BaseException:
        link.close()
        raise
    return link, ring


def _welcomed(link: QueueLink, size: int, timeout_s: float) -> Segment:
    raw, fd = link.receive(timeout_s)
    answer = wire.unpack(link.peer, raw)
    if isinstance(answer, wire.QueueRefuse):
        raise AuthError(link.peer, answer.reason)
    if not isinstance(answer, wire.QueueWelcome) or fd < 0:
        raise ProtocolError(link.peer, f"sent {type(answer).__name__} instead of Welcome with a descriptor")
    return open_segment(link.peer, fd, size)


def open_segment(writer: str, fd: int, least: int) -> Segment:
    """Map a descriptor that the writer sent.

    Raises:
        ProtocolError: it is not a sealed segment of at least that many bytes.
    """
    try:
        segment = Segment(fd)
    except (OSError, ValueError) as error:
        raise ProtocolError(writer, f"sent a descriptor that is no segment: {error}") from None
    if segment.size < least:
        size = segment.size
        segment.close()
        raise ProtocolError(writer, f"sent a segment of {size} bytes, not {least}")
    return segment


def _process(sock: socket.socket) -> tuple[int, int]:
    """Id and pidfd of the process at the other end; no pidfd (-1) from another PID namespace, or with an old kernel."""
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if pid <= 0 or pid == os.getpid():
        return pid, -1
    try:
        return pid, os.pidfd_open(pid)
    except OSError as error:
        logger.info("broadcast: no pidfd of process %d (%s): its connection alone tells when it ends", pid, error)
        return pid, -1
