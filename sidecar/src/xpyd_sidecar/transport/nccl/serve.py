"""Prefill's side of the link ``nccl``: sends the KV that decode fetches from GPU to GPU, in an NCCL group of two ranks.

    prefill                                                decode
                  ◀──────── GROUP(0)                       wants a group
    GROUP(number, id) ────────────────────────────────▶    joins; both make their communicators meanwhile
                  ◀──────── FETCH(number, pieces, group)   has launched ncclRecv into memory of its device
    SENT(there)   ────────────────────────────────────▶    …
    ncclSend      ════════════════════════════════════▶    has all bytes, and knows that they are the manifest's

Both sides launch the messages of a group in the same order, and prefill launches a send only when decode has launched its
receive, so that no send occupies the GPU while it waits for one. Every fetch in a group is answered with as many bytes as
it asks for, also where its manifest is gone: else a launched receive would end only with its group.

A group ends with the session, when idle, when another one needs its place, or when NCCL fails. What decode then still lacks
it fetches over TCP data connections (stripes), as over the link ``tcp``.
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
    """What a rank of prefill has to serve sessions over the link ``nccl``."""

    def __init__(self, hub: NcclThread, gpu: bodies.Gpu, tcp: Callable[[], TcpServer], *, one_gpu: bool) -> None:
        """``gpu``: this rank's; ``tcp``: gives the server of the same copies over TCP; ``one_gpu``: whether a peer may be
        on the same GPU.
        """
        self._hub = hub
        self._gpu = gpu
        self._tcp = tcp
        self._one_gpu = one_gpu

    def serve(self, session: Session, able: bodies.Able) -> tuple[ServeLink, bodies.LinkWelcome] | str:
        """Prefill's side of a session's link, and the answer that names this rank's GPU to decode; or why there is none.

        Raises:
            PeerGone: there is no room for the session's TCP data connections now.
        """
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
    """Prefill's side of the link ``nccl`` of one session, with TCP data connections for what no group carries."""

    name = "nccl"

    def __init__(self, hub: NcclThread, session: Session, server: TcpServer, tcp: TcpServeLink) -> None:
        """``hub``: the communicator thread; ``server``: finds the copy of a manifest; ``tcp``: serves copies where no
        group does.
        """
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
        """Whether messages were given to the communicator thread that are not done: the GPU may still read their bytes."""
        return bool(self._sends)

    def attach(self, sock: socket.socket, number: int, answer: bytes, keys: bytes) -> None:
        """Take over a TCP data connection of the session; arguments and errors are those of ``ServeLink.attach``."""
        self._tcp.attach(sock, number, answer, keys)

    def on_frame(self, frame: Frame) -> bool:
        """Act on a GROUP, UNGROUP or FETCH frame of decode's; False: it is another frame, which is not for this link.

        Raises:
            ProtocolError: decode asks for a second group, or fetches what it may not.
            MessageError: the frame's body cannot be read.
        """
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
        """Send the bytes that decode receives in a group; nothing where the group has ended, as decode knows or is told.

        Raises:
            ProtocolError: decode was told of no group of so high a number, the bytes lie outside of the manifest's copy, or
                they are none, or more than a message may have.
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
        """End the link, since the session has ended. Copies that the GPU reads are held until the group has ended."""
        if self._closed:
            return
        self._closed = True
        if self._number:
            self._hub.leave(self._number, "the session has ended")
        self._tcp.close()

    # --- told by the communicator thread, on the session's thread (``GroupMember``) ---

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` made on the session's I/O thread."""
        self._session.post(call)

    def on_group_begun(self, number: int, uid: bytes) -> None:
        """The group is being made: tell decode the ``uid`` by which it joins."""
        if number == self._number and not self._closed:
            self._last = number
            self._session.send(FrameKind.GROUP, bodies.Group(number, uid))

    def on_group_open(self, number: int) -> None:
        """Decode has joined the group. Nothing is to be done: prefill sends when a fetch comes."""

    def on_posted(self, message: Message) -> None:
        """Never called here: only receivers post messages."""

    def on_moved(self, message: Message) -> None:
        """A message is sent: its copy is no longer held for it."""
        self._sends -= 1
        copy: CopyBytes | None = message.tag
        if copy is not None:
            copy.let_go()

    def on_group_lost(self, number: int, reason: str) -> None:
        """The group sends no more: tell decode, which decides what becomes of its fetches there."""
        if number == self._number:
            self._number = 0
            self._session.send(FrameKind.UNGROUP, bodies.Group(number, reason=reason))

    def on_released(self, messages: tuple[Message, ...]) -> None:
        """The GPU no longer reads these messages, which were not sent: their copies are no longer held for them."""
        for message in messages:
            self.on_moved(message)


def _size(asked: bodies.FetchBytes) -> int:
    """Bytes of the message that answers a fetch: those of its pieces, each rounded up to a multiple of ``ALIGN``."""
    return sum(round_up(sum(comb.size * comb.count for comb in combs), ALIGN) for combs in asked.pieces)


def _spans(pieces: list[list[memoryview]]) -> list[tuple[int, memoryview]]:
    """Every view of these pieces with its offset in the message, in bytes; a piece begins at a multiple of ``ALIGN``."""
    spans, begin = [], 0
    for views in pieces:
        at = begin
        for view in views:
            spans.append((at, view))
            at += len(view)
        begin += round_up(at - begin, ALIGN)
    return spans
