"""Decode's I/O thread of one rank: connects to prefill ranks, asks for transfers, receives into staging and checks.

It never touches the KV cache. What is intact is put into ``inbox`` for the engine's thread, which decides whether it is
placed (``kv.receiving``) and gives the chunk back. When all chunks are in use the connections that need one are not read.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from xpyd_sidecar.contract.ids import HostPort, Incarnation, split_host_port
from xpyd_sidecar.engine.bounds import Chunk, Staging
from xpyd_sidecar.engine.links.tcp import Connection
from xpyd_sidecar.engine.loop import Loop
from xpyd_sidecar.engine.sender import IDLE_S, Me
from xpyd_sidecar.errors import AuthError, Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import frames, messages, proofs
from xpyd_sidecar.kv.frames import NO_TRANSFER, Header, Kind
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.receiving import Ask, Cancel, Confirm

logger = logging.getLogger(__name__)

ADDRESSES_MAX: Final = 4096


class Arrived(NamedTuple):
    """Intact blocks in a chunk; the reader gives the chunk back."""

    key: Key
    region: int
    first: int
    blocks: int
    chunk: Chunk
    size: int


class Broken(NamedTuple):
    """A try will not come."""

    key: Key
    outcome: Outcome
    reason: str
    final: bool


class ChecksumError(ProtocolError):
    """A frame is not what was sent."""


class Receiver:
    """The thread."""

    def __init__(self, me: Me, staging: Staging, *, block_bytes: Sequence[int], largest_frame: int, cover: bool,
                 peer_timeout_s: float) -> None:
        """``block_bytes``: bytes of a block, by array of the cache."""
        self.me = me
        self.inbox: deque[Arrived | Broken] = deque()
        self.staging = staging
        self.cover = cover
        self.block_bytes = tuple(block_bytes)
        self.largest_frame = largest_frame
        self._timeout = peer_timeout_s
        self._sources: dict[tuple[HostPort, Incarnation], Source] = {}
        self._of_key: dict[Key, Source] = {}
        self._loop = Loop("xpyd-receiver", self._tick)
        self._loop.at_end(self._close_all)
        staging.on_free(lambda: self._loop.post(self._resume))
        self._loop.start()

    # --- from the engine's thread ---

    def carry_out(self, step: Ask | Confirm | Cancel) -> None:
        """Do what the machine says."""
        self._loop.post(partial(self._do, step))

    def stop(self) -> None:
        """End the thread and close every connection."""
        self.staging.on_free(None)
        self._loop.stop()

    # --- on the loop's thread ---

    def _do(self, step: Ask | Confirm | Cancel) -> None:
        if isinstance(step, Ask):
            self._ask(step)
            return
        source = self._of_key.pop(step.key, None)
        if source is None:
            return
        source.asked.pop(step.key, None)
        if isinstance(step, Confirm):
            source.tell(Kind.DONE, step.key)
        else:
            source.tell(Kind.CANCEL, step.key, messages.Reason(step.outcome, step.reason))

    def _ask(self, step: Ask) -> None:
        source = self._sources.get((step.address, step.incarnation))
        if source is None:
            if len(self._sources) >= ADDRESSES_MAX:
                self.inbox.append(Broken(step.key, Outcome.OVERFLOW, f"{ADDRESSES_MAX} data links are open", final=True))
                return
            try:
                source = Source(self, self._loop, step.address, step.incarnation)
            except (OSError, ValueError) as error:
                self.inbox.append(Broken(step.key, Outcome.PEER_LOST, f"{step.address}: {error}", final=False))
                return
            self._sources[step.address, step.incarnation] = source
        self._of_key[step.key] = source
        source.ask(step)

    def broken(self, key: Key, outcome: Outcome, reason: str, *, final: bool) -> None:
        """A try will not come."""
        self._of_key.pop(key, None)
        self.inbox.append(Broken(key, outcome, reason, final))

    def lost(self, source: Source) -> None:
        """A connection has ended."""
        self._sources.pop(source.place, None)

    def _resume(self) -> None:
        for source in list(self._sources.values()):
            source.link.resume()

    def _tick(self, now: float) -> None:
        for source in list(self._sources.values()):
            source.tick(now, self._timeout)

    def _close_all(self) -> None:
        for source in list(self._sources.values()):
            source.link.close(PeerGone(source.link.peer, "this engine stops"))


class Source:
    """One connection to a prefill rank."""

    def __init__(self, receiver: Receiver, loop: Loop, address: HostPort, incarnation: Incarnation) -> None:
        """Begin to connect.

        Raises:
            OSError, ValueError: the address cannot be used.
        """
        self.place = (address, incarnation)
        self.asked: dict[Key, Ask] = {}
        self._receiver = receiver
        self._incarnation = incarnation
        self._nonce = secrets.token_bytes(proofs.NONCE_BYTES)
        self._terms: proofs.Terms | None = None
        self._accepted = False
        self._later: list[tuple[Kind, Key, messages.Body | None]] = []
        self._chunk: Chunk | None = None
        self._born = time.monotonic()
        host, port = split_host_port(address)
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        code = sock.connect_ex((host, port))
        if code not in {0, errno.EINPROGRESS}:
            sock.close()
            raise OSError(code, os.strerror(code))
        self.link = Connection(loop, sock, address, self, connecting=True)

    def ask(self, step: Ask) -> None:
        """Ask for a transfer, once the connection is accepted."""
        if not self.asked:
            self.link.last_in = time.monotonic()  # it owed nothing until now, so silence counts from here
        self.asked[step.key] = step
        self.tell(Kind.READY, step.key, step.ready)

    def tell(self, kind: Kind, key: Key, body: messages.Body | None = None) -> None:
        """Send a frame of a transfer, once the connection is accepted."""
        if self._accepted:
            self._say(kind, key, body)
        else:
            self._later.append((kind, key, body))

    def _say(self, kind: Kind, key: Key, body: messages.Body | None = None) -> None:
        payload = messages.body(body) if body is not None else b""
        self.link.queue(frames.encode(kind, key, payload), payload)

    def room(self, connection: Connection, header: Header) -> memoryview | None:
        """Where a payload goes: staging for DATA that may be wanted, any memory for the rest."""
        if header.kind is not Kind.DATA:
            return memoryview(bytearray(header.length))
        if not self._accepted:
            raise ProtocolError(connection.peer, "sent DATA before WELCOME")
        if header.length > self._receiver.largest_frame:
            raise ProtocolError(connection.peer, f"DATA of {header.length} bytes, over {self._receiver.largest_frame}")
        if self._chunk is None:
            self._chunk = self._receiver.staging.take()
        return self._chunk.view[:header.length] if self._chunk is not None else None

    def frame(self, connection: Connection, header: Header, raw: bytes, payload: memoryview) -> None:
        """A frame is complete."""
        if not frames.intact(header, raw, payload):
            raise ChecksumError(connection.peer, f"{header.kind.name} frame with a wrong checksum")
        if header.kind is Kind.DATA:
            self._data(header)
            return
        try:
            self._said(header, payload)
        except messages.MessageError as error:
            raise ProtocolError(connection.peer, str(error)) from None

    def _data(self, header: Header) -> None:
        if self._receiver.cover and not header.covered:
            raise ProtocolError(self.link.peer, "sent DATA without the checksum that was asked for")
        step = self.asked.get(header.key)
        if step is None:
            return  # a try that was cancelled; the chunk serves the next frame
        ready = step.ready
        end = header.first + header.blocks
        inside = ready.first <= header.first < end <= ready.first + ready.count
        if not inside or header.region >= ready.regions:
            raise ProtocolError(self.link.peer, f"sent blocks {header.first}..{end - 1} of array {header.region}, "
                                                f"not among those asked for")
        size = header.blocks * self._receiver.block_bytes[header.region]
        if header.length != size:  # the engine's thread takes the size for granted when it places the blocks
            raise ProtocolError(self.link.peer, f"sent {header.length} bytes for {header.blocks} blocks, not {size}")
        chunk, self._chunk = self._chunk, None
        assert chunk is not None
        self._receiver.inbox.append(Arrived(header.key, header.region, header.first, header.blocks, chunk, header.length))

    def _said(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.CHALLENGE and self._terms is None:
            self._answer(messages.read_body(payload, messages.Challenge))
        elif header.kind is Kind.WELCOME and self._terms is not None and not self._accepted:
            if not proofs.holds(self._receiver.me.key, "prefill", self._terms,
                                messages.read_body(payload, messages.DataWelcome).proof):
                raise AuthError(self.link.peer, "does not hold the service key")
            self._accepted = True
            later, self._later = self._later, []
            for one in later:
                self._say(*one)
        elif header.kind is Kind.REJECT:
            why = messages.read_body(payload, messages.Reason)
            raise Rejected(self.link.peer, why)
        elif header.kind is Kind.GONE and self._accepted:
            why = messages.read_body(payload, messages.Reason)
            if self.asked.pop(header.key, None) is not None:
                self._receiver.broken(header.key, why.outcome, f"{self.link.peer}: {why.reason}", final=not why.retry)
        elif header.kind is not Kind.PING:
            raise ProtocolError(self.link.peer, f"sent {header.kind.name} out of turn")

    def _answer(self, challenge: messages.Challenge) -> None:
        me = self._receiver.me
        self._terms = proofs.Terms(challenge.nonce, self._nonce, challenge.incarnation, me.incarnation)
        proof = proofs.prove(me.key, "decode", self._terms)
        self._say(Kind.HELLO, NO_TRANSFER, messages.DataHello(
            self._nonce, me.instance, me.incarnation, self._incarnation, me.rank, proof))

    def closed(self, _: Connection, error: PeerError) -> None:
        """The connection has ended: every try asked of it is broken."""
        if self._chunk is not None:
            chunk, self._chunk = self._chunk, None
            self._receiver.staging.give(chunk)
        self._receiver.lost(self)
        asked, self.asked = self.asked, {}
        outcome = outcome_of(error)
        final = outcome not in {Outcome.PEER_LOST, Outcome.INCARNATION}
        if asked or not isinstance(error, PeerGone):
            logger.warning("xpyd: data link to prefill ended: %s", error)
        for key in asked:
            self._receiver.broken(key, outcome, str(error), final=final)

    def tick(self, now: float, timeout: float) -> None:
        """Time passes: a source that does not accept, or is silent although it owes something, is given up."""
        link = self.link
        if not self._accepted:
            if now - self._born > timeout:
                link.close(PeerGone(link.peer, f"no connection within {timeout} s"))
            return
        if link.paused:
            link.last_in = now  # we do not read, so we cannot hear
        if self.asked:
            if link.silent(now, timeout):
                link.close(PeerGone(link.peer, f"silent for {timeout} s"))
            elif now - link.last_out > timeout / 4:
                self._say(Kind.PING, NO_TRANSFER)
        elif now - max(link.last_in, link.last_out) > IDLE_S:
            link.close(PeerGone(link.peer, "idle"))


class Rejected(Incompatible):
    """Prefill refuses this rank, with its reason."""

    def __init__(self, peer: str, why: messages.Reason) -> None:
        super().__init__(peer, why.reason)
        self.outcome = why.outcome


def outcome_of(error: PeerError) -> Outcome:
    """The outcome that an ended connection means for what was asked of it."""
    if isinstance(error, Rejected):
        return error.outcome
    if isinstance(error, ChecksumError):
        return Outcome.CHECKSUM
    if isinstance(error, AuthError):
        return Outcome.AUTH
    if isinstance(error, ProtocolError):
        return Outcome.PROTOCOL
    if isinstance(error, Incompatible):
        return Outcome.INCOMPATIBLE
    return Outcome.PEER_LOST
