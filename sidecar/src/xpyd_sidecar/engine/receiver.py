"""Decode's I/O thread of one rank: connects to prefill ranks, asks for transfers, receives into staging and checks.

Where a try has a target (``engine.gates``), bytes are written right into its blocks; else into a chunk of staging memory.
What is intact is put into ``inbox`` for the engine's thread, which counts it (``kv.receiving``), places what is in a chunk
and gives the chunk back. When all chunks are in use the connections that need one are not read.
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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from xpyd_sidecar.contract.ids import HostPort, Incarnation, split_host_port
from xpyd_sidecar.engine.ahead import RETRY_S, Ahead, Expecting, Slot
from xpyd_sidecar.engine.bounds import Chunk, Staging
from xpyd_sidecar.engine.gates import Cache, Gate, Target, parts
from xpyd_sidecar.engine.links import near
from xpyd_sidecar.engine.links.near import Reader, Ways
from xpyd_sidecar.engine.links.process_vm import address_of
from xpyd_sidecar.engine.links.tcp import NOWHERE, Connection, Place
from xpyd_sidecar.engine.loop import Loop
from xpyd_sidecar.engine.sender import IDLE_S, Me
from xpyd_sidecar.errors import AuthError, ChecksumError, Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import frames, messages, proofs
from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.frames import NO_TRANSFER, Header, Kind
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.receiving import Ask, Cancel, Confirm, Pull
from xpyd_sidecar.kv.stores import Busy, Fetch

logger = logging.getLogger(__name__)

ADDRESSES_MAX: Final = 4096
PART_BYTES: Final = 1 << 20
"""Of an offer that are read at once where they are summed up; a fraction of a core's own cache."""


class Arrived(NamedTuple):
    """Intact blocks: in a chunk, which the reader gives back, or in their places (None). ``way``: name of the link."""

    key: Key
    region: int
    first: int
    blocks: int
    chunk: Chunk | None
    size: int
    way: str
    source: int


class Broken(NamedTuple):
    """A source will not send a try."""

    key: Key
    outcome: Outcome
    reason: str
    final: bool
    source: int


class Asked(NamedTuple):
    """A try that a source owes. ``have``: by (region, block), what has come: nothing comes twice."""

    step: Ask
    target: Target | None
    have: bytearray


class Receiver:
    """The thread."""

    def __init__(self, me: Me, staging: Staging, *, block_bytes: Sequence[int], largest_frame: int, cover: bool,
                 peer_timeout_s: float, ways: Ways, caches: Sequence[Cache | None] = (),
                 make: Callable[[int], Chunk] | None = None, buffer_bytes: int = 0, pool_bytes: int = 0,
                 claim_s: float = 0.0) -> None:
        """``block_bytes``: bytes of a block, by array of the cache; ``caches``: those that may be written directly.

        ``make``, ``buffer_bytes``, ``pool_bytes``, ``claim_s``: of the buffer for what comes before it is asked for.
        """
        self.me = me
        self.inbox: deque[Arrived | Broken] = deque()
        self.staging = staging
        self.cover = cover
        self.block_bytes = tuple(block_bytes)
        self.largest_frame = largest_frame
        self.ways = ways
        self._caches = tuple(caches)
        self._gates: dict[str, dict[Key, Gate]] = {}
        """By request and try; of the engine's thread alone."""
        self._timeout = peer_timeout_s
        self._sources: dict[tuple[HostPort, Incarnation], Source] = {}
        self._of_key: dict[tuple[Key, int], Source] = {}
        """By try and place among its sources."""
        self._loop = Loop("xpyd-receiver", self._tick)
        self._loop.at_end(self._close_all)
        self.ahead: Ahead | None = None
        if make is not None:
            self.ahead = Ahead(make, buffer_bytes=buffer_bytes, pool_bytes=pool_bytes, block_bytes=self.block_bytes,
                               cover=cover, ttl_s=claim_s, post=self._loop.post)
        staging.on_free(lambda: self._loop.post(self._resume))
        self._loop.start()

    # --- from the engine's thread ---

    def carry_out(self, step: Ask | Pull | Confirm | Cancel | Expecting) -> None:
        """Do what the machine says."""
        target = None
        if isinstance(step, Ask) and any(self._caches):
            gates = self._gates.setdefault(step.request, {})
            for key, gate in gates.items():
                if key != step.key:
                    gate.close()
            target = Target(gates.setdefault(step.key, Gate()), step.ready.first, step.ids, self._caches, step.units)
            if all(self._caches):
                step = step._replace(ready=replace(step.ready, frame=frames.DIRECT_BYTES))
        self._loop.post(partial(self._do, step, target))

    def close(self, request: str) -> None:
        """Nothing more is to be written for a request; ``settled`` says when nothing is."""
        for gate in self._gates.get(request, {}).values():
            gate.close()

    def settled(self, request: str) -> bool:
        """Whether nothing is written into the blocks of a request that was closed."""
        if not all(gate.done() for gate in self._gates.get(request, {}).values()):
            return False
        self._gates.pop(request, None)
        return True

    def stop(self) -> None:
        """End the thread and close every connection."""
        self.staging.on_free(None)
        self._loop.stop()

    # --- on the loop's thread ---

    def _do(self, step: Ask | Pull | Confirm | Cancel | Expecting, target: Target | None) -> None:
        if isinstance(step, Ask):
            self._ask(step, target)
            return
        if isinstance(step, Expecting):
            self._expect(step)
            return
        if isinstance(step, Pull):
            if (owes := self._of_key.get((step.key, step.source))) is not None:
                owes.tell(Kind.FETCH, step.key, Fetch(step.until))
            return
        source = self._of_key.pop((step.key, step.source), None)
        if source is None:
            return
        source.asked.pop(step.key, None)
        if isinstance(step, Confirm):
            source.tell(Kind.DONE, step.key)
        else:
            source.tell(Kind.CANCEL, step.key, messages.Reason(step.outcome, step.reason))

    def _ask(self, step: Ask, target: Target | None) -> None:
        source = self._source(step.address, step.incarnation)
        if isinstance(source, Source):
            self._of_key[step.key, step.source] = source
            source.ask(step, target)
        else:
            self.inbox.append(Broken(step.key, *source, step.source))
        if self.ahead is None or not step.plain:
            return
        for one in self.ahead.claim(step.key, step.identity, step.ready.first, step.ready.count):
            self.inbox.append(Arrived(step.key, one.region, one.first, one.blocks, one.chunk, one.size, "buffer",
                                      step.source))

    def _source(self, address: HostPort, incarnation: Incarnation) -> Source | tuple[Outcome, str, bool]:
        """The connection to a prefill rank, or why there is none (and whether that is final)."""
        source = self._sources.get((address, incarnation))
        if source is None:
            if len(self._sources) >= ADDRESSES_MAX:
                return Outcome.OVERFLOW, f"{ADDRESSES_MAX} data links are open", True
            try:
                source = Source(self, self._loop, address, incarnation)
            except (OSError, ValueError) as error:
                return Outcome.PEER_LOST, f"{address}: {error}", False
            self._sources[address, incarnation] = source
        return source

    def _expect(self, step: Expecting) -> None:
        if self.ahead is None:
            return
        source = self._source(step.address, step.incarnation)
        if not isinstance(source, Source):
            return  # the load will find that out
        body, gone = self.ahead.expect(step, time.monotonic())
        self._unclaimed(gone, "too many others are waited for")
        if body is not None:
            source.expect(step.key)
            source.tell(Kind.EXPECT, step.key, body)

    def _unclaimed(self, keys: Sequence[Key], reason: str) -> None:
        for key in keys:
            for source in self._sources.values():
                if key in source.expected:
                    source.expected.discard(key)
                    source.tell(Kind.CANCEL, key, messages.Reason(Outcome.DEADLINE, reason))

    def broken(self, step: Ask, outcome: Outcome, reason: str, *, final: bool) -> None:
        """What was asked for will not come."""
        self._of_key.pop((step.key, step.source), None)
        self.inbox.append(Broken(step.key, outcome, reason, final, step.source))

    def lost(self, source: Source) -> None:
        """A connection has ended."""
        self._sources.pop(source.place, None)

    def _resume(self) -> None:
        for source in list(self._sources.values()):
            source.link.resume()

    def _tick(self, now: float) -> None:
        if self.ahead is not None:
            self._unclaimed(self.ahead.tick(now), "no request has claimed it in decode's buffer")
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
        self.asked: dict[Key, Asked] = {}
        self.expected: set[Key] = set()
        """Tries that may be pushed ahead, and have not been asked for."""
        self._slot: Slot | None = None
        self._receiver = receiver
        self._incarnation = incarnation
        self._nonce = secrets.token_bytes(proofs.NONCE_BYTES)
        self._terms: proofs.Terms | None = None
        self._welcome: messages.DataWelcome | None = None
        self._settled = False
        """How blocks travel is agreed."""
        self._reader: Reader | None = None
        self._why = ""
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

    def ask(self, step: Ask, target: Target | None) -> None:
        """Ask for a transfer, once the link is agreed."""
        if not self.asked and not self.expected:
            self.link.last_in = time.monotonic()  # it owed nothing until now, so silence counts from here
        self.asked[step.key] = Asked(step, target, bytearray(step.ready.regions * step.ready.count))
        self.expected.discard(step.key)
        self.tell(Kind.READY, step.key, step.ready)

    def expect(self, key: Key) -> None:
        """A try may be pushed ahead."""
        if not self.asked and not self.expected:
            self.link.last_in = time.monotonic()
        self.expected.add(key)

    def tell(self, kind: Kind, key: Key, body: messages.Body | None = None) -> None:
        """Send a frame of a transfer, once the link is agreed."""
        if self._settled:
            self._say(kind, key, body)
        else:
            self._later.append((kind, key, body))

    def _say(self, kind: Kind, key: Key, body: messages.Body | None = None) -> None:
        payload = messages.body(body) if body is not None else b""
        self.link.queue(frames.encode(kind, key, payload), payload)

    def room(self, connection: Connection, header: Header) -> Place | None:
        """Where a payload goes: blocks of their own or staging for what is wanted, nowhere for what no longer is."""
        if header.kind is not Kind.DATA and header.kind is not Kind.OFFER:
            return Place((memoryview(bytearray(header.length)),)) if header.length else NOWHERE
        if not self._settled:
            raise ProtocolError(connection.peer, f"sent {header.kind.name} before the link was agreed")
        offer = header.kind is Kind.OFFER
        body = Place((memoryview(bytearray(header.length)),)) if offer else NOWHERE
        asked = self.asked.get(header.key)
        if asked is None:
            return body if offer else self._beforehand(header)
        size = self._expected(asked, header)
        if not offer and header.length != size:
            raise ProtocolError(connection.peer, f"sent {header.length} bytes for {header.blocks} blocks, not {size}")
        if not offer and self._receiver.cover and not header.covered:
            raise ProtocolError(connection.peer, "sent DATA without the checksum that was asked for")
        direct = asked.target.extents(header.region, header.first, header.blocks) if asked.target is not None else None
        if direct is not None:
            cache, extents = direct
            assert asked.target is not None
            return body if offer else Place([cache.view[at:at + many] for at, many in extents], asked.target.gate)
        if self._chunk is None:
            self._chunk = self._receiver.staging.take()
        if self._chunk is None:
            return None
        return body if offer else Place((self._chunk.view[:header.length],))

    def _beforehand(self, header: Header) -> Place:
        """A place in the buffer for what no load has asked for, if it was granted."""
        ahead = self._receiver.ahead
        self._slot = ahead.begin(header) if ahead is not None else None
        if self._slot is None:
            return NOWHERE
        if self._receiver.cover and not header.covered:
            raise ProtocolError(self.link.peer, "sent DATA without the checksum that was asked for")
        return Place((self._slot.chunk.view,))

    def _buffered(self, header: Header, slot: Slot) -> None:
        """A frame for the buffer is complete; a load may have begun to ask for it meanwhile."""
        if not frames.intact(header, slot.chunk.view):
            self._receiver.staging.give(slot.chunk)
            raise ChecksumError(self.link.peer, "DATA frame with a wrong checksum")
        assert self._receiver.ahead is not None
        asked = self.asked.get(header.key)
        if asked is None:
            self._receiver.ahead.complete(header, slot)
            return
        ready = asked.step.ready
        first, count = overlap(header.first, header.blocks, ready.first, ready.count)
        if not count or not asked.step.plain:
            self._receiver.staging.give(slot.chunk)
            return
        each = header.length // header.blocks
        skip, size = (first - header.first) * each, count * each
        tensor = slot.chunk.tensor[skip:skip + size] if slot.chunk.tensor is not None else None
        chunk = slot.chunk._replace(tensor=tensor, view=slot.chunk.view[skip:skip + size])
        self._receiver.inbox.append(Arrived(header.key, header.region, first, count, chunk, size, "buffer",
                                            asked.step.source))

    def _expected(self, asked: Asked, header: Header) -> int:
        """Bytes of the blocks that a header speaks of, which must have been asked for and not have come."""
        ready = asked.step.ready
        end = header.first + header.blocks
        unit = asked.step.units.get(header.region)
        if unit is None or not ready.first <= header.first < end <= ready.first + ready.count:
            raise ProtocolError(self.link.peer, f"sent blocks {header.first}..{end - 1} of array {header.region}, "
                                                f"not among those asked for")
        slot = unit.nth * ready.count + header.first - ready.first
        if asked.have.find(1, slot, slot + header.blocks) >= 0:
            raise ProtocolError(self.link.peer, f"sent blocks {header.first}..{end - 1} of array {header.region} twice")
        size = header.blocks * unit.size
        most = max(self._receiver.largest_frame, ready.frame)
        if size > most:
            raise ProtocolError(self.link.peer, f"sent {size} bytes in one frame, over {most}")
        return size

    def frame(self, connection: Connection, header: Header, place: Place) -> None:
        """A frame is complete."""
        if header.kind is Kind.DATA:
            self._data(header, place)
            return
        payload = place.views[0] if place.views else memoryview(b"")
        if not frames.intact(header, payload):
            raise ChecksumError(connection.peer, f"{header.kind.name} frame with a wrong checksum")
        try:
            if header.kind is Kind.OFFER:
                self._offered(header, messages.read_body(payload, messages.Offer))
            else:
                self._said(header, payload)
        except messages.MessageError as error:
            raise ProtocolError(connection.peer, str(error)) from None

    def _data(self, header: Header, place: Place) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._buffered(header, slot)
            return
        asked = self.asked.get(header.key)
        if asked is None or not place.views:
            return  # a try that was cancelled; a chunk serves the next frame
        self._check(header, place, header.checksum if header.covered else None, self.link.checksum())
        self._came(asked, header, header.length, place.gate is None, "tcp")

    def _offered(self, header: Header, offer: messages.Offer) -> None:
        """Read blocks from where prefill says they are."""
        if self._reader is None:
            raise ProtocolError(self.link.peer, "sent OFFER over a link of TCP alone")
        asked = self.asked.get(header.key)
        read = True
        if asked is not None:
            if self._receiver.cover and offer.checksum is None:
                raise ProtocolError(self.link.peer, "sent OFFER without the checksum that was asked for")
            size = self._expected(asked, header)
            if offer.size != size:
                raise ProtocolError(self.link.peer, f"offered {offer.size} bytes for {header.blocks} blocks, not {size}")
            read = self._read(asked, header, offer)
        self._say(Kind.TAKEN, header.key, messages.Taken(read))

    def _read(self, asked: Asked, header: Header, offer: messages.Offer) -> bool:
        assert self._reader is not None
        direct = asked.target.extents(header.region, header.first, header.blocks) if asked.target is not None else None
        gate = None
        if direct is not None:
            assert asked.target is not None
            cache, extents = direct
            gate = asked.target.gate
            place = Place([cache.view[at:at + many] for at, many in extents], gate)
            into = [(cache.address + at, many) for at, many in extents]
        else:
            assert self._chunk is not None
            place = Place((self._chunk.view[:offer.size],))
            into = [(address_of(self._chunk.view), offer.size)]
        if gate is not None and not gate.enter():
            return True
        try:
            found = self._read_parts(offer, into, place.views)
        finally:
            if gate is not None:
                gate.leave()
        if found is None:
            return False
        self.link.spend(offer.size)
        self._check(header, place, offer.checksum, found.value())
        self._came(asked, header, offer.size, gate is None, self._reader.name)
        return True

    def _read_parts(self, offer: messages.Offer, into: Sequence[tuple[int, int]],
                    views: Sequence[memoryview]) -> frames.Sum | None:
        """Read an offer in parts that are still in the processor's cache when they are summed up; None: unreadable."""
        assert self._reader is not None
        total = frames.Sum()
        address = offer.address
        for part in parts(into, offer.size if offer.checksum is None else PART_BYTES):
            if not self._reader.read(address, sum(many for _, _, many in part),
                                     [(into[at][0] + offset, many) for at, offset, many in part]):
                return None
            for at, offset, many in part:
                address += many
                if offer.checksum is not None:
                    total.add(views[at][offset:offset + many])
        return total

    def _check(self, header: Header, place: Place, expected: int | None, found: int | None) -> None:
        if expected is None or found == expected:
            return
        if place.gate is None or place.gate.enter():  # else the blocks may be another's by now
            if place.gate is not None:
                place.gate.leave()
            raise ChecksumError(self.link.peer, f"{header.kind.name} frame with a wrong checksum")

    def _came(self, asked: Asked, header: Header, size: int, staged: bool, way: str) -> None:
        unit = asked.step.units[header.region]
        slot = unit.nth * asked.step.ready.count + header.first - asked.step.ready.first
        asked.have[slot:slot + header.blocks] = b"\1" * header.blocks
        chunk = None
        if staged:
            chunk, self._chunk = self._chunk, None
            assert chunk is not None
        self._receiver.inbox.append(Arrived(header.key, header.region, header.first, header.blocks, chunk, size, way,
                                            asked.step.source))

    def _said(self, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.CHALLENGE and self._terms is None:
            self._answer(messages.read_body(payload, messages.Challenge))
        elif header.kind is Kind.WELCOME and self._terms is not None and self._welcome is None:
            self._welcomed(messages.read_body(payload, messages.DataWelcome))
        elif header.kind is Kind.ARENA and self._welcome is not None and not self._settled:
            self._reader, reason = near.try_arena(self.link.peer, self._receiver.ways.folder,
                                                  messages.read_body(payload, messages.Arena))
            self._settle("; ".join(one for one in (self._why, reason) if one))
        elif header.kind is Kind.REJECT:
            why = messages.read_body(payload, messages.Reason)
            raise Rejected(self.link.peer, why)
        elif header.kind is Kind.STORE and self._settled and self._receiver.ahead is not None:
            self._store(header, self._receiver.ahead)
        elif header.kind is Kind.GONE and self._settled:
            why = messages.read_body(payload, messages.Reason)
            self._drop(header.key)
            gone = self.asked.pop(header.key, None)
            if gone is not None:
                self._receiver.broken(gone.step, why.outcome, f"{self.link.peer}: {why.reason}", final=not why.retry)
        elif header.kind is not Kind.PING:
            raise ProtocolError(self.link.peer, f"sent {header.kind.name} out of turn")

    def _store(self, header: Header, ahead: Ahead) -> None:
        try:
            room = ahead.store(header)
        except ValueError as error:
            raise ProtocolError(self.link.peer, f"STORE: {error}") from None
        kind, body = (Kind.ROOM, b"") if room else (Kind.BUSY, messages.body(Busy(RETRY_S)))
        self.link.queue(frames.encode(kind, header.key, body, region=header.region, first=header.first,
                                      blocks=header.blocks), body)

    def _drop(self, key: Key) -> None:
        """Nothing more of a try will come, and nobody wants what has."""
        self.expected.discard(key)
        if self._receiver.ahead is not None:
            self._receiver.ahead.forget(key)

    def _answer(self, challenge: messages.Challenge) -> None:
        me = self._receiver.me
        self._terms = proofs.Terms(challenge.nonce, self._nonce, challenge.incarnation, me.incarnation)
        proof = proofs.prove(me.key, "decode", self._terms)
        self._say(Kind.HELLO, NO_TRANSFER, messages.DataHello(
            self._nonce, me.instance, me.incarnation, self._incarnation, me.rank, proof, self._receiver.ways.host))

    def _welcomed(self, welcome: messages.DataWelcome) -> None:
        if self._terms is None or not proofs.holds(self._receiver.me.key, "prefill", self._terms, welcome.proof):
            raise AuthError(self.link.peer, "does not hold the service key")
        self._welcome = welcome
        self._reader, self._why = near.try_process(self.link.peer, welcome)
        if self._reader is None and welcome.near is not None and self._receiver.ways.folder is not None:
            self._say(Kind.LINK, NO_TRANSFER, messages.LinkChoice("make_arena", self._why))
            return
        self._settle(self._why)

    def _settle(self, reason: str) -> None:
        """How blocks travel is clear: say so, then ask for what was ordered meanwhile."""
        way: Literal["tcp", "process_vm", "arena"] = self._reader.name if self._reader is not None else "tcp"
        self._say(Kind.LINK, NO_TRANSFER, messages.LinkChoice(way, reason))
        if self._reader is None and self._receiver.ways.transport == "shm":
            self.link.flush()
            raise Incompatible(self.link.peer, f"transport shm: {reason}")
        logger.info("xpyd: blocks of %s come over %s%s", self.link.peer, way, f" ({reason})" if reason else "")
        self._settled = True
        later, self._later = self._later, []
        for one in later:
            self._say(*one)

    def closed(self, _: Connection, error: PeerError) -> None:
        """The connection has ended: every try asked of it is broken."""
        if self._chunk is not None:
            chunk, self._chunk = self._chunk, None
            self._receiver.staging.give(chunk)
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._receiver.staging.give(slot.chunk)
        if self._reader is not None:
            self._reader.close()
        if self._receiver.ahead is not None:
            for key in self.expected:
                self._receiver.ahead.lost(key)
        self._receiver.lost(self)
        asked, self.asked = self.asked, {}
        outcome = outcome_of(error)
        final = outcome not in {Outcome.PEER_LOST, Outcome.INCARNATION}
        if asked or not isinstance(error, PeerGone):
            logger.warning("xpyd: data link to prefill ended: %s", error)
        for one in asked.values():
            self._receiver.broken(one.step, outcome, str(error), final=final)

    def tick(self, now: float, timeout: float) -> None:
        """Time passes: a source that does not accept, or is silent although it owes something, is given up."""
        link = self.link
        if not self._settled:
            if now - self._born > timeout:
                link.close(PeerGone(link.peer, f"no connection within {timeout} s"))
            return
        if link.paused:
            link.last_in = now  # we do not read, so we cannot hear
        if self.asked or self.expected:
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
