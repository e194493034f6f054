"""The link ``nccl``, prefill's side: what decode fetches leaves in a group of two ranks, from GPU to GPU.

    prefill                                                decode
                  ◀──────── GROUP(0)                       wants a group
    GROUP(number, id) ────────────────────────────────▶    joins; both make their communicators meanwhile
                  ◀──────── FETCH(number, pieces, group)   has launched ncclRecv into memory of its device
    SENT(there)   ────────────────────────────────────▶    …
    ncclSend      ════════════════════════════════════▶    has all bytes, and knows that they are the manifest's

So both sides launch the same messages of a group in the same order, and prefill launches only what decode has launched: a
send never occupies the GPU for want of its receive. Every fetch in a group is answered by as many bytes as it asks for,
also where its manifest is not there any more: a receive that is launched can end in no other way but with its group.

A group ends with the session, when idle, when another one needs its place, or when NCCL fails. What decode then still lacks
it fetches over stripes, as over the link ``tcp``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.extents import round_up
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import ALIGN
from xpyd_sidecar.kv.wire import Frame, FrameKind
from xpyd_sidecar.transport.links import ServeLink, Session
from xpyd_sidecar.transport.nccl.driver import Message
from xpyd_sidecar.transport.nccl.stretches import views_of
from xpyd_sidecar.transport.nccl.thread import NcclThread
from xpyd_sidecar.transport.tcp.serve import CopyBytes, TcpServeLink, TcpServer


class NcclServer:
    """What a rank has for this link."""

    def __init__(self, hub: NcclThread, gpu: bodies.Gpu, tcp: Callable[[], TcpServer], *, one_gpu: bool) -> None:
        """``gpu``: of this rank; ``tcp``: what serves the same copies over TCP; ``one_gpu``: peers may be on it, too."""
        self._hub = hub
        self._gpu = gpu
        self._tcp = tcp
        self._one_gpu = one_gpu

    def serve(self, session: Session, able: bodies.Able) -> tuple[ServeLink, bodies.LinkWelcome] | str:
        """A session's link on this side, and this rank's GPU for decode; or why the two can form no group."""
        ours, theirs = self._gpu, able.gpu
        if theirs is None:
            return "decode's transport is not nccl"
        if theirs.nccl != ours.nccl:
            return f"nccl: version {ours.nccl} at prefill, {theirs.nccl} at decode"
        if theirs.name == ours.name and not self._one_gpu:
            return "nccl: both on one GPU"
        server = self._tcp()
        tcp = server.link(session)
        if isinstance(tcp, str):
            return tcp
        return NcclServeLink(self._hub, session, server, tcp), bodies.LinkWelcome(gpu=ours)


class NcclServeLink(ServeLink):
    """Prefill's side of the NCCL link, of one session."""

    name = "nccl"

    def __init__(self, hub: NcclThread, session: Session, server: TcpServer, tcp: TcpServeLink) -> None:
        """``server``: knows the copies; ``tcp``: serves them where no group does."""
        self._hub = hub
        self._session = session
        self._copy = server.copy
        self._tcp = tcp
        self.stripes = tcp.stripes
        self._number = 0
        """Of the group that decode may fetch in, or that is being made; 0: there is none."""
        self._last = 0
        """Of the last group that decode was told of."""
        self._sends = 0
        """Messages that the GPU may still read."""
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether copies are being sent, as ``ServeLink`` has it."""
        return bool(self._sends)

    def attach(self, sock: socket.socket, number: int, answer: bytes, keys: bytes) -> None:
        """Take over a connection, as ``ServeLink`` has it."""
        self._tcp.attach(sock, number, answer, keys)

    def on_frame(self, frame: Frame) -> bool:
        """Take a frame of decode's, as ``ServeLink`` has it."""
        if frame.kind is FrameKind.GROUP:
            if self._number:
                raise ProtocolError(self._session.peer, f"asks for a group beside group {self._number}")
            self._number = self._hub.join(self, Way.SEND)
        elif frame.kind is FrameKind.UNGROUP:
            group = bodies.read_body(frame.body, bodies.Group)
            if self._number and group.number == self._number:
                self._hub.leave(self._number, f"decode: {group.reason}")
                self._number = 0
        elif frame.kind is FrameKind.FETCH:
            self._fetched(frame.key, bodies.read_body(frame.body, bodies.FetchBytes))
        else:
            return False
        return True

    def _fetched(self, key: Key, asked: bodies.FetchBytes) -> None:
        """Send what decode receives in a group; of one that has ended here decode is told, or has been.

        Raises:
            ProtocolError: there never was such a group, or the bytes lie outside of the manifest.
        """
        if not 0 < asked.group <= self._last:
            raise ProtocolError(self._session.peer, f"fetches in group {asked.group}, of which it was not told")
        if asked.group != self._number:
            return
        copy = self._copy(key, asked.manifest)
        message = Message(_size(asked), tag=copy)
        if not 0 < message.size <= self._hub.driver.piece:
            raise ProtocolError(self._session.peer, f"fetches {message.size} bytes at once in a group")
        if copy is not None:
            message.spans = _spans(views_of(copy, asked, self._session.peer))
            copy.hold()
        self._sends += 1
        self._session.send(FrameKind.SENT, bodies.FetchSent(asked.number, copy is not None), key)
        self._hub.move(self._number, message, self)

    def close(self) -> None:
        """End the link, as ``ServeLink`` has it: copies that the GPU reads are held until the group has ended."""
        if self._closed:
            return
        self._closed = True
        if self._number:
            self._hub.leave(self._number, "the session has ended")
        self._tcp.close()

    # --- told by the communicator thread, on the session's thread (``GroupMember``) ---

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on that thread."""
        self._session.post(call)

    def on_group_begun(self, number: int, uid: bytes) -> None:
        """The group is being made: decode may join."""
        if number == self._number and not self._closed:
            self._last = number
            self._session.send(FrameKind.GROUP, bodies.Group(number, uid))

    def on_group_open(self, number: int) -> None:
        """Decode has joined; its fetches say so."""

    def on_posted(self, message: Message) -> None:
        """Never called here: only receivers post messages."""

    def on_moved(self, message: Message) -> None:
        """A message is out."""
        self._sends -= 1
        copy: CopyBytes | None = message.tag
        if copy is not None:
            copy.let_go()

    def on_group_lost(self, number: int, reason: str) -> None:
        """The group does no more. What becomes of fetches in it, decode decides."""
        if number == self._number:
            self._number = 0
            self._session.send(FrameKind.UNGROUP, bodies.Group(number, reason=reason))

    def on_released(self, messages: tuple[Message, ...]) -> None:
        """The GPU has let go of messages that were not done."""
        for message in messages:
            self.on_moved(message)


def _size(asked: bodies.FetchBytes) -> int:
    """Bytes of a message: pieces, each of which begins at a multiple of ``ALIGN``."""
    return sum(round_up(sum(comb.size * comb.count for comb in combs), ALIGN) for combs in asked.pieces)


def _spans(pieces: list[list[memoryview]]) -> list[tuple[int, memoryview]]:
    """Where the bytes of pieces are in a message."""
    spans, begin = [], 0
    for views in pieces:
        at = begin
        for view in views:
            spans.append((at, view))
            at += len(view)
        begin += round_up(at - begin, ALIGN)
    return spans
