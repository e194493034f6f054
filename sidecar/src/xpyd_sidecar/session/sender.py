"""Prefill's I/O thread of one rank: listens for decode ranks, keeps copies until they are asked for, and sends them.

The engine's thread, or the one that waits for copies, hands them over (``push``); the engine's takes reports
(``take_reports``). Neither waits. The memory of a copy goes back to its store when it has left or is dropped.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from xpyd_sidecar import resources
from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import HostPort, Incarnation, join_host_port
from xpyd_sidecar.errors import ConfigError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, copies, frames
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.memory.store import CopyStore, StoreLease
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.session.prefill_endpoint import PrefillEndpoint
from xpyd_sidecar.session.spilling import Spilling
from xpyd_sidecar.session.transfer_trace import Noted, TransferTrace
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.threads.watched import Watched
from xpyd_sidecar.transport.link import Blocks, Sums
from xpyd_sidecar.transport.tcp.link import TcpLink

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 4096
STRANGERS_MAX: Final = 1024
"""Of them, that have not shown that they hold the key; the one that came first gives way to who comes."""
REPORTS_MAX: Final = 1 << 16
"""Until the engine's thread takes them. It does while it has transfers, and has no more of them at once; a peer may ask for
some that there never were.
"""
LACK_S: Final = 1.0
"""How long nobody is accepted after a file was lacking. Those who come wait in the kernel."""


class Kept(NamedTuple):
    """A copy of blocks in host memory. ``view``: its bytes, of those that are leased for it."""

    view: memoryview
    lease: StoreLease
    gone: Callable[[], None] | None = None
    """Called once when the copy is let go."""
    sums: Sums | None = None
    """Of a copy whose checksums are made before it is asked for."""


class SendReport(NamedTuple):
    """A transfer that a rank has ended; ``size``: payload bytes that the peer confirmed."""

    rank: int
    key: Key
    outcome: Outcome
    reason: str
    size: int


class Sender:
    """The thread and its listening socket."""

    def __init__(self, me: LocalRank, machine: Sending[Kept], *, host: str, port: int, store: CopyStore) -> None:
        """Bind and start. ``store``: where copies are.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self.me = me
        self.store = store
        self._machine = machine
        self.spilling = Spilling(machine, store)
        self._began: dict[Key, float] = {}
        self._noting = TransferTrace()
        self.noted: deque[Noted] = deque(maxlen=REPORTS_MAX)
        """Transfers that have ended, for the engine's thread to take."""
        self._peers: dict[int, PrefillEndpoint] = {}
        self._strangers: dict[int, PrefillEndpoint] = {}
        """Those of them of whom nothing was heard after the handshake, the oldest first."""
        self._by_life: dict[Incarnation, PrefillEndpoint] = {}
        """Those of whom something was, by decode rank: each has one connection."""
        self._sent: dict[Key, int] = {}
        self._leaving: Counter[tuple[int, Key]] = Counter()
        """By link and transfer: sends that are on their way."""
        self._unsummed: deque[Sums] = deque()
        """Of copies whose checksums are not made; each copy is in the store."""
        self._reports: deque[SendReport] = deque(maxlen=REPORTS_MAX)
        self._proved = 0
        self._held: deque[tuple[int, Key, Iterable[Copy[Kept]]]] = deque()
        """Copies that nobody may have yet, in order of their steps."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"data_port: cannot listen on {host} port {port}: {error}") from None
        self._listener.setblocking(False)
        self._accepts_at = 0.0
        """When the listener is looked at again; 0: it is."""
        self._lack = resources.Complaint("decode ranks are not accepted for a second")
        self.address: HostPort = join_host_port(host, self._listener.getsockname()[1])
        self._loop = Loop("xpyd-sender", self._tick)
        self.thread: Watched = self._loop.thread
        self._loop.at_end(self._close_all)
        self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        self._loop.start()

    # --- from other threads ---

    def push(self, key: Key, made: Iterable[Copy[Kept]], hold: int = 0) -> None:
        """Take copies of a transfer that are complete. They stay here until step ``hold`` is ``proved``."""
        self._loop.post(partial(self._copied, key, made, hold))

    def proved(self, step: int) -> None:
        """Copies that were held for steps up to this one may leave, but for those of transfers released before."""
        self._loop.post(partial(self._leave, step))

    def release(self, key: Key, outcome: Outcome, reason: str) -> None:
        """Let go of a transfer."""
        self._loop.post(lambda: self._carry_out(self._machine.release(
            key, outcome, reason, retry=outcome is Outcome.ABORTED)))

    def progressed(self, keys: Sequence[Key]) -> None:
        """The engine's work for these transfers has grown."""
        self._loop.post(partial(self._progressed, keys))

    def take_reports(self) -> list[SendReport]:
        """What has ended since the last call."""
        out = []
        while self._reports:
            out.append(self._reports.popleft())
        return out

    def stop(self) -> None:
        """End the thread and close every connection."""
        self._loop.stop()
        self._listener.close()

    # --- on the loop's thread ---

    def _progressed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._machine.progressed(key)

    def _leave(self, step: int) -> None:
        self._proved = step
        while self._held and self._held[0][0] <= step:
            hold, key, made = self._held.popleft()
            self._copied(key, made, hold)

    def _copied(self, key: Key, made: Iterable[Copy[Kept]], hold: int) -> None:
        if hold > self._proved:
            self._held.append((hold, key, made))
            return
        for copy in made:
            self._kept(key, copy)
        self._carry_out(self.spilling.relieve())

    def _kept(self, key: Key, copy: Copy[Kept]) -> None:
        """A copy is made. Until somebody asks for it there is time for its checksums."""
        if self._machine.cover and self.me.grouping is None:
            sums = Sums(copy.data.view, copy.blocks)
            copy = copy._replace(data=copy.data._replace(sums=sums))
            if not self._unsummed:
                self._loop.post(self._sum_up)
            self._unsummed.append(sums)
        self._carry_out(self._machine.copy(key, copy, time.monotonic()))

    def _sum_up(self) -> None:
        """Make the sums of one copy; between two of them the loop serves its sockets."""
        sums = self._unsummed.popleft()
        if self._unsummed:  # whatever becomes of this one
            self._loop.post(self._sum_up)
        sums.make()

    def _accept(self, _: int) -> None:
        for _ in range(32):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not resources.ours(error):
                    continue  # accept(2): as if there was none
                self._lack.add(error)
                self._loop.watch(self._listener, 0, self._accept)
                self._accepts_at = time.monotonic() + LACK_S
                return
            if len(self._peers) >= CONNECTIONS_MAX:
                logger.warning("xpyd: refused a data link from %s: %d are open", address[0], CONNECTIONS_MAX)
                sock.close()
                continue
            if len(self._strangers) >= STRANGERS_MAX:
                first = next(iter(self._strangers.values()))
                first.link.close(PeerGone(first.link.peer, "does not greet, and others wait"))
            peer = PrefillEndpoint(self.me, self._loop, sock, join_host_port(address[0], address[1]),
                                   asked=self._asked, lost=self._lost)
            self._peers[peer.link.number] = self._strangers[peer.link.number] = peer

    def _asked(self, peer: PrefillEndpoint, header: Header, body: memoryview) -> None:
        """A frame of an accepted peer."""
        number, key = peer.link.number, header.key
        if self._strangers.pop(number, None) is not None:
            self._known(peer)
        if header.kind is FrameKind.READY:
            ready = bodies.read_body(body, bodies.Ready)
            self._noting.mark(key, "ready")
            self._carry_out(self._machine.ready(number, key, ready, time.monotonic()))
        elif header.kind is FrameKind.DONE:
            self._carry_out(self._machine.done(number, key))
        elif header.kind is FrameKind.CANCEL:
            why = bodies.read_body(body, bodies.Reason)
            self._carry_out(self._machine.cancel(number, key, why.outcome, why.reason))
        elif header.kind is FrameKind.TAKEN:
            peer.way.link.taken(read=bodies.read_body(body, bodies.Taken).read)
        elif header.kind is FrameKind.POSTED or header.kind is FrameKind.UNGROUP:
            peer.way.link.told(header.kind, body)
        elif header.kind is FrameKind.LINK:
            peer.choose(partial(peer.way.decided, bodies.read_body(body, bodies.LinkChoice)))
        elif header.kind is not FrameKind.PING:
            self._carry_out(self.spilling.heard(number, peer.link.peer, header, body))
            self._carry_out(self.spilling.relieve())

    def _known(self, peer: PrefillEndpoint) -> None:
        """A decode rank says its first word: it has no other connection, whose end may not be known here yet."""
        before = self._by_life.get(peer.life)
        self._by_life[peer.life] = peer
        if before is not None:
            before.link.close(PeerGone(before.link.peer, "it has connected anew"))

    def _lost(self, peer: PrefillEndpoint, error: PeerError) -> None:
        """A connection has ended."""
        self._peers.pop(peer.link.number, None)
        self._strangers.pop(peer.link.number, None)
        if self._by_life.get(peer.life) is peer:
            del self._by_life[peer.life]
        outcome = Outcome.PROTOCOL if isinstance(error, ProtocolError) else Outcome.PEER_LOST
        steps = self._machine.lost(peer.link.number, outcome, str(error))
        if steps or not isinstance(error, PeerGone):
            logger.warning("xpyd: data link to decode ended: %s", error)
        self._carry_out(steps)

    def _carry_out(self, steps: list[copies.Step[Kept]]) -> None:
        """All of them, whatever becomes of one: nobody else knows of the copies in those that follow."""
        for step in steps:
            try:
                self._take(step)
            except Exception as error:
                logger.exception("xpyd: a step of sending failed: %s", type(step).__name__)
                peer = None if isinstance(step, copies.Free | copies.TransferEnded) else self._peers.get(step.link)
                if peer is not None:
                    peer.link.mistaken(error)

    def _take(self, step: copies.Step[Kept]) -> None:
        if isinstance(step, copies.Send):
            self._send(step)
        elif isinstance(step, copies.Free):
            self._drop(step.copy.data, step.uses)
        elif isinstance(step, copies.OfferCopy):
            if (peer := self._peers.get(step.link)) is not None:
                peer.link.say(FrameKind.STORE, None, step.key, region=step.copy.region, first=step.copy.first,
                              blocks=step.copy.blocks)
        elif isinstance(step, copies.StoreCopy):
            self._store(step)
        elif isinstance(step, copies.RefuseTransfer):
            if (peer := self._peers.get(step.link)) is not None:
                self._refuse(peer, step)
        else:
            size = self._sent.pop(step.key, 0)
            began = self._began.pop(step.key, None)
            if step.confirmed and began is not None:
                self.spilling.counted.add(metrics.PUSH_SECONDS, time.monotonic() - began)
            if step.confirmed:
                self._noting.mark(step.key, "done")
            if (noted := self._noting.end(step.key)) is not None:
                self.noted.append(noted)
            confirmed = size if step.confirmed else 0
            self._reports.append(SendReport(self.me.rank, step.key, step.outcome, step.reason, confirmed))

    def _refuse(self, peer: PrefillEndpoint, step: copies.RefuseTransfer) -> None:
        """A peer is told that a transfer will not come.

        One that lives, has let the time for it pass and takes nothing of it would not hear of that, and the copies that
        wait for it would stay: its session ends. One that asks for what has ended is no such peer: it has just spoken.
        """
        if step.outcome is Outcome.DEADLINE and not step.ended and (step.link, step.key) in self._leaving:
            peer.link.close(PeerGone(peer.link.peer, f"{step.reason}, and takes nothing"))
        else:
            peer.link.say(FrameKind.GONE, bodies.Reason(step.outcome, step.reason, step.retry), step.key)

    def _send(self, step: copies.Send[Kept]) -> None:
        size = step.blocks * (step.cut.size if step.cut is not None else len(step.copy.data.view) // step.copy.blocks)
        peer = self._leaves(step, size, step.uses)
        if peer is None:
            return
        lease = self.store.lease(size) if step.cut is not None and peer.way.link.from_store else None
        try:
            data = _cut(step, lease)
        except MemoryError:
            if lease is not None:
                self.store.give(lease)
            self._left(step, size, step.uses)
            raise
        now = time.monotonic()
        self._began.setdefault(step.key, now)
        free = partial(self._pushed, step, lease, size, now, peer.way.link.name)
        sums = step.copy.data.sums if step.cut is None else None
        piece = Blocks(step.copy.region, step.first, step.blocks, data, sums, step.first - step.copy.first,
                       step.cover)
        peer.way.link.put(step.key, piece, free, most=frames.aim(step.frame))

    def _pushed(self, step: copies.Send[Kept], lease: StoreLease | None, size: int, began: float, link: str) -> None:
        if lease is not None:
            self.store.give(lease)
        self._machine.progressed(step.key)
        if step.key in self._began:  # else it has ended, and what is noted of it is told
            self._noting.piece(step.key, began, time.monotonic(), size, link)
        self._left(step, size, step.uses)

    def _store(self, step: copies.StoreCopy[Kept]) -> None:
        """Push a copy ahead: as frames of the session, whatever the link, since nobody has said where it belongs."""
        view = step.copy.data.view
        peer = self._leaves(step, len(view), None)
        if peer is None:
            return
        free = partial(self._left, step, len(view), None)
        self.spilling.counted.add(metrics.AHEAD_BYTES, len(view))
        piece = Blocks(step.copy.region, step.copy.first, step.copy.blocks, view, step.copy.data.sums, cover=step.cover)
        TcpLink(peer.link).put(step.key, piece, free)

    def _leaves(self, step: copies.Send[Kept] | copies.StoreCopy[Kept], size: int,
                uses: copies.Uses | None) -> PrefillEndpoint | None:
        """So many bytes of a copy are about to leave: to whom; None: who asked is gone, and the copy needs them no more."""
        self.spilling.leaving += size
        peer = self._peers.get(step.link)
        self._leaving[step.link, step.key] += 1
        if peer is None:
            self._left(step, size, uses)
        else:
            self._sent[step.key] = self._sent.get(step.key, 0) + size
        return peer

    def _left(self, step: copies.Send[Kept] | copies.StoreCopy[Kept], size: int, uses: copies.Uses | None) -> None:
        """A send has left, or never will."""
        self.spilling.leaving -= size
        self._leaving[step.link, step.key] -= 1
        if not self._leaving[step.link, step.key]:
            del self._leaving[step.link, step.key]
        self._drop(step.copy.data, uses)

    def _drop(self, kept: Kept, uses: copies.Uses | None) -> None:
        """A send of a copy, of ``uses``, needs it no more; nobody else does after the last."""
        if uses is not None and not uses.over():
            return
        self.store.give(kept.lease)
        if kept.sums is not None:
            kept.sums.drop()
        if kept.gone is not None:
            kept.gone()

    def _tick(self, now: float) -> None:
        if self._accepts_at and now >= self._accepts_at:
            self._accepts_at = 0.0
            self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        self._carry_out(self._machine.tick(now))
        self._carry_out(self.spilling.relieve())
        for peer in list(self._peers.values()):
            peer.tick(now, busy=peer.way.link.busy or self._machine.busy(peer.link.number),
                      timeout=self.me.peer_timeout_s)

    def _close_all(self) -> None:
        self._loop.watch(self._listener, 0, self._accept)
        for peer in list(self._peers.values()):
            peer.link.close(PeerGone(peer.link.peer, "this engine stops"))


def _cut(step: copies.Send[Kept], lease: StoreLease | None) -> memoryview:
    """The bytes to send: of the blocks that are wanted, the heads that are; a copy only where blocks are cut.

    ``lease``: where that copy goes; None: into memory of its own.
    """
    view = step.copy.data.view
    each = len(view) // step.copy.blocks
    start = (step.first - step.copy.first) * each
    if step.cut is None:
        return view[start:start + step.blocks * each]
    heads = step.cut.size
    begin = start + step.cut.head * (heads // step.cut.heads)
    into = lease.chunk.view if lease is not None else memoryview(bytearray(step.blocks * heads))
    for nth, at in enumerate(range(begin, begin + step.blocks * each, each)):
        into[nth * heads:(nth + 1) * heads] = view[at:at + heads]
    return into
