"""Decode's I/O thread of one rank: sessions with prefill ranks, and what is fetched over them (``kv.fetching``).

A try is one attempt to transfer the KV of a prompt. The engine's thread says which tries are wanted, and from when on they
have blocks (``carry_out``). What has come is reported to it in ``inbox``, one event for each fetch, once it is in its
blocks and its checksums are right: the engine's thread copies nothing.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.contract.pair_notes import MOST_REFUSED
from xpyd_sidecar.errors import ChecksumError, Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import fetch_steps
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.buffer import BufferPlace, TryId
from xpyd_sidecar.kv.fetch_steps import TryError
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.manifests import Ask, Busy, Manifest, ManifestTaken, Sums, TryDone
from xpyd_sidecar.kv.receiving import Cancel, Confirm, WantTry
from xpyd_sidecar.kv.wire import Frame, FrameKind
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.process import resources
from xpyd_sidecar.session.decode_session import DecodeSession, connecting, outcome_of
from xpyd_sidecar.session.greeting import OwnRank
from xpyd_sidecar.session.worse_links import WorseLinks
from xpyd_sidecar.threads.idle_polling import Inbox
from xpyd_sidecar.threads.increments import Increments
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.threads.watched import WatchedThread
from xpyd_sidecar.transport import gates
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.landing import Landing, LoadTarget
from xpyd_sidecar.transport.links import FetchLink, FetchOrder, FetchOwner, LinkFetcher, Session
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.tcp.fetch import TcpFetchLink
from xpyd_sidecar.transport.tcp.pool import StripePool

logger = logging.getLogger(__name__)

ADDRESSES_MAX: Final = 4096
CONFIRMED_MAX: Final = 256
"""Of one session, that it was told DONE of last."""
RETRY_S: Final = 0.1
"""After which prefill may press again."""


class Withdraw(NamedTuple):
    """Instruction: tell a source that a try is given up and not begun again. ``source``: index among the load's sources."""

    key: Key
    source: int
    outcome: Outcome
    reason: str


class RefusedRank(NamedTuple):
    """A rank of prefill from which this one cannot take KV: they are incompatible, or have no link in common."""

    incarnation: Incarnation
    reason: str


class FetchedBlocks(NamedTuple):
    """Event: blocks of a try are in their places in the KV cache, and their checksums are right where these are wanted.

    ``blocks``: (array of the source, first block of the prompt, number of blocks) of each piece. ``size``: bytes of all.
    ``link``: name of the link over which they came.
    """

    key: Key
    source: int
    blocks: tuple[tuple[int, int, int], ...]
    size: int
    link: str
    at: float
    """When, by the monotonic clock."""


class BrokenSource(NamedTuple):
    """Event: a source will not deliver a try. ``final``: no newer try is to be expected in its place."""

    key: Key
    source: int
    outcome: Outcome
    reason: str
    final: bool


class Receiver:
    """The I/O thread of one rank of decode: holds its sessions with ranks of prefill, and fetches KV over them."""

    def __init__(self, me: OwnRank, machine: Fetching, landing: Landing, *, peer_timeout_s: float) -> None:
        """Begin nothing before ``start``.

        Args:
            me: this rank.
            machine: decides what is fetched when, and into what.
            landing: the memory that bytes come into.
            peer_timeout_s: seconds after which a silent peer that owes something is given up.
        """
        self.inbox: Inbox[FetchedBlocks | BrokenSource] = Inbox()
        self.counted = Increments()
        """Metrics, for the engine's thread to take."""
        self.refused: deque[RefusedRank] = deque(maxlen=MOST_REFUSED)
        """For the engine's thread to take."""
        self.links = WorseLinks()
        self._me = me
        self._machine = machine
        self._landing = landing
        self._timeout_s = peer_timeout_s
        self._fetcher: LinkFetcher | None = None
        self._gates: dict[str, dict[Key, Gate]] = {}
        """By request and try; of the engine's thread alone."""
        self._sessions: dict[tuple[HostPort, Incarnation], DecodeSession] = {}
        self._numbers: dict[int, DecodeSession] = {}
        self._wants: dict[TryId, WantTry] = {}
        self._sources: dict[tuple[int, Key], int] = {}
        """By session and try: its place among the sources of the load."""
        self._targets: dict[TryId, LoadTarget] = {}
        self._again: set[TryId] = set()
        """Tries whose session has ended, of which nothing has come since."""
        self._confirmed: dict[int, deque[tuple[float, WantTry, Confirm]]] = {}
        """By session: what it was told DONE of, and when: where it ends before prefill has read that, it is told again."""
        self._stopping = False
        self._told_at = 0.0
        self._loop = Loop("xpyd-receiver", self._tick)
        self.thread: WatchedThread = self._loop.thread
        self._loop.at_end(self._close_all)
        self._stripes = StripePool(self._loop, peer_timeout_s) if gates.COMPILED else None

    def start(self, fetcher: LinkFetcher) -> None:
        """Start the thread. ``fetcher``: makes the links over which this rank fetches; they are used on the thread."""
        self._fetcher = fetcher
        self._landing.start(self._loop.post)
        self._loop.start()

    # --- from the engine's thread ---

    def carry_out(self, step: WantTry | Confirm | Cancel | Withdraw, moment: CopyMark | None = None) -> None:
        """Have an instruction of the machine of loads (``kv.receiving``) carried out; does not wait.

        ``moment``: on a device, after which copies blocks may be written.
        """
        target = None
        if isinstance(step, WantTry) and step.tables is not None and step.plan.parts:
            gates = self._gates.setdefault(step.request, {})
            for key, gate in gates.items():
                if key != step.key:
                    gate.close()
            tables = [(one.first, array("q", one.ids)) for one in step.tables]
            target = LoadTarget(gates.setdefault(step.key, Gate()), tables, step.plan.parts, moment)
        self._loop.post(partial(self._do, step, target))

    def close(self, request: str) -> None:
        """Let no write into the blocks of a request begin any more; ``is_settled`` says when those under way are over."""
        for gate in self._gates.get(request, {}).values():
            gate.close()

    def is_settled(self, request: str) -> bool:
        """Whether no write into the blocks of a request is under way any more, after ``close`` was called for it."""
        if not all(gate.done() for gate in self._gates.get(request, {}).values()):
            return False
        self._gates.pop(request, None)
        return True

    def reset(self) -> None:
        """Drop all KV that was fetched before its request had blocks, since this engine's caches were reset."""
        self._loop.post(lambda: self._carry_out(self._machine.reset()))

    def drop_try(self, key: Key, outcome: Outcome, reason: str) -> None:
        """End a try without blocks, which its request does not need any more: its sources are told ``outcome`` and
        ``reason``, and what was fetched ahead is dropped.
        """
        self._loop.post(partial(self._unwanted, key, outcome, reason))

    def spare(self, *, spare: bool) -> None:
        """Set whether the lookup buffer is of no use, as in prefill: it takes no new tries, and is freed when empty."""
        self._loop.post(partial(self._set_spare, spare))

    @property
    def buffered_bytes(self) -> tuple[int, int]:
        """Bytes in use, of the lookup buffer and of the host pool."""
        return self._machine.buffer.bytes_in_use

    def over_tcp(self, session: Session, owner: FetchOwner, welcome: bodies.LinkWelcome,
                 settled: Callable[[FetchLink | None, str], None]) -> bool:
        """Make decode's side of the link ``tcp`` of a session, once there is host memory that it can write into.

        Must be called on the I/O thread. ``settled`` is called with the link and "" when it is made. Returns False: prefill
        does not wait for this side meanwhile (``link_trial.OtherLink``).

        Raises:
            Incompatible: the code of the link was not compiled here.
        """
        if self._stripes is None:
            raise Incompatible(session.peer, gates.REASON)
        connect = partial(self._connect, session, owner, self._stripes, welcome, settled)
        ring = self._landing.host_ring
        if ring is None or ring.ready():
            connect()
        else:
            ring.settle(partial(session.post, connect))
        return False

    def _connect(self, session: Session, owner: FetchOwner, pool: StripePool, welcome: bodies.LinkWelcome,
                 settled: Callable[[FetchLink | None, str], None]) -> None:
        mine = next((one for one in self._numbers.values() if one.link is session), None)
        if mine is None:
            return  # it has ended meanwhile
        assert mine.keys is not None
        ring = self._landing.host_ring
        if ring is not None and not ring.made:
            raise PeerGone(session.peer, "there is no memory here for what comes over tcp")
        settled(TcpFetchLink(session, owner, self._loop, pool, keys=mine.keys, connect=lambda: connecting(mine.place[0]),
                             stripes=welcome.stripes, encrypts=welcome.encrypts), "")

    def stop(self) -> None:
        """End the thread and close every session."""
        self._loop.stop()

    # --- on the loop's thread ---

    def _do(self, step: WantTry | Confirm | Cancel | Withdraw, target: LoadTarget | None) -> None:
        if isinstance(step, WantTry):
            self._want(step, target)
            return
        ident = step.key, step.source
        want = self._forget(ident)
        if want is None:
            return
        self._carry_out(self._machine.cancel(ident, given_up=isinstance(step, Withdraw)))
        session = self._sessions.get((want.address, want.incarnation))
        if session is not None and isinstance(step, Confirm):
            session.send(FrameKind.DONE, TryDone(step.size), step.key)
            told = self._confirmed.setdefault(session.number, deque(maxlen=CONFIRMED_MAX))
            told.append((time.monotonic(), want, step))
        elif session is not None and isinstance(step, Cancel | Withdraw):
            session.send(FrameKind.CANCEL, bodies.Reason.from_words(step.outcome, step.reason), step.key)

    def _confirm_again(self, want: WantTry, step: Confirm) -> None:
        """Send DONE again in another session: the one in which it was sent ended, perhaps before prefill had read it."""
        session = self._session(want)
        if session is not None:
            session.send(FrameKind.ASK, Ask(want.plan.takers, not want.plan.parts), step.key)
            session.send(FrameKind.DONE, TryDone(step.size), step.key)

    def _want(self, want: WantTry, target: LoadTarget | None) -> None:
        known = self._wants.get(want.ident)
        self._wants[want.ident] = want
        if target is not None:
            self._targets[want.ident] = target
        if known is None:
            self._ask(want)
        if want.tables is not None and want.plan.parts and want.ident in self._wants:
            self._carry_out(self._machine.allot(want.ident, want.tables))

    def _ask(self, want: WantTry) -> None:
        """Ask for a try over the session with its source; where there is none, one is begun."""
        session = self._session(want)
        if session is None:
            return
        self._sources[session.number, want.key] = want.source
        self._carry_out(self._machine.begin(want.ident, session.number, want.plan, time.monotonic()))

    def _session(self, want: WantTry) -> DecodeSession | None:
        """The session with the source of a try, begun where there is none; None: it cannot be, and the try is broken."""
        place = want.address, want.incarnation
        session = self._sessions.get(place)
        if session is not None:
            return session
        if len(self._sessions) >= ADDRESSES_MAX:
            self._broken(want.ident, Outcome.OVERFLOW, f"{ADDRESSES_MAX} data links are open", final=True)
            return None
        assert self._fetcher is not None
        try:
            session = DecodeSession(self._me, self._loop, place, self._fetcher, told=self._told, ended=self._ended,
                                    chose=self._chose)
        except (OSError, ValueError) as error:
            if resources.is_own_lack(error):
                self._broken(want.ident, Outcome.OVERFLOW, f"decode cannot connect: {resources.words(error)}", final=True)
            else:
                self._broken(want.ident, Outcome.PEER_LOST, f"{want.address}: {error}", final=False)
            return None
        self._sessions[place] = self._numbers[session.number] = session
        return session

    def _broken(self, ident: TryId, outcome: Outcome, reason: str, *, final: bool) -> None:
        """Forget a try that its source will not deliver, and report that to the engine's thread."""
        if self._forget(ident) is not None:
            self._carry_out(self._machine.cancel(ident, forget=False))
            self.inbox.append(BrokenSource(*ident, outcome, reason, final))

    def _forget(self, ident: TryId) -> WantTry | None:
        want = self._wants.pop(ident, None)
        self._targets.pop(ident, None)
        self._again.discard(ident)
        if want is not None and (session := self._sessions.get((want.address, want.incarnation))) is not None:
            self._sources.pop((session.number, want.key), None)
        return want

    # --- what prefill says ---

    def _told(self, session: DecodeSession, frame: Frame) -> None:
        """Take a frame of a session that has a link. Raises ProtocolError when it may not be sent or cannot be right."""
        number, key = session.number, frame.key
        if session.fetches is not None and session.fetches.at_hand:
            self._machine.at_hand.add(number)
        ident = key, self._sources.get((number, key), -1)
        try:
            match frame.kind:
                case FrameKind.MANIFEST:
                    steps = self._machine.on_manifest(number, ident, bodies.read_body(frame.body, Manifest))
                case FrameKind.SUMS:
                    steps = self._machine.on_sums(number, ident, bodies.read_body(frame.body, Sums))
                case FrameKind.PRESS:
                    pressed = bodies.read_body(frame.body, bodies.PressManifest)
                    steps = self._machine.on_press(number, ident, pressed.number, RETRY_S)
                case FrameKind.GONE:
                    why = bodies.read_body(frame.body, bodies.Reason)
                    want = self._wants.get(ident)
                    nothing = want is not None and not want.plan.parts
                    self._broken(ident, why.outcome, f"{session.link.peer}: {why.reason}", final=nothing or not why.retry)
                    session.send(FrameKind.CANCEL, bodies.Reason(why.outcome, "it is gone"),
                                 key)  # nothing is read any more
                    steps = []
                case _:
                    raise ProtocolError(session.link.peer, f"sent {frame.kind.name} out of turn")
        except TryError as error:
            raise ProtocolError(session.link.peer, str(error)) from None
        self._carry_out(steps)

    def _chose(self, session: DecodeSession) -> None:
        """Count a session whose link is chosen, and the better links that it could not have."""
        for refused in session.refused:
            self.counted.add(f"{metrics.LINKS_REFUSED}:{refused.partition(':')[0]}", 1)
        self.links.on_session_open(session)

    def _ended(self, session: DecodeSession, error: PeerError) -> None:
        """Forget a session that has ended; its tries are asked for once more if the peer was merely lost, else broken."""
        if self._sessions.get(session.place) is session:
            del self._sessions[session.place]
        self._numbers.pop(session.number, None)
        for entry in [one for one in self._sources if one[0] == session.number]:
            del self._sources[entry]
        self.links.on_session_ended(session)
        outcome = outcome_of(error)
        if outcome is Outcome.INCOMPATIBLE:
            self.refused.append(RefusedRank(session.place[1], str(error)))
        final = outcome not in {Outcome.PEER_LOST, Outcome.INCARNATION}
        idents = self._machine.on_session_lost(session.number)
        if idents or not isinstance(error, PeerGone):
            logger.warning("xpyd: data link to prefill ended: %s", error)
        for ident in idents:
            want = self._wants.get(ident)
            worked = outcome is Outcome.PEER_LOST and session.fetches is not None
            if worked and ident not in self._again and want is not None:
                self._again.add(ident)
                self._ask(want)
            else:
                self._broken(ident, outcome, str(error), final=final)
        confirmed, since = self._confirmed.pop(session.number, ()), time.monotonic() - self._timeout_s
        if isinstance(error, PeerGone) and not session.idle and not self._stopping:
            for at, want, step in confirmed:
                if at > since:
                    self._confirm_again(want, step)

    # --- fetches (``FetchOwner``) ---

    def on_fetched(self, number: int, sums: NDArray[np.uint64]) -> None:
        """Take a link's answer that a fetch is complete. ``sums``: of the pieces that went into blocks directly."""
        self._carry_out(self._machine.on_fetched(number, sums))

    def on_fetch_failed(self, number: int) -> None:
        """Take a link's answer that a fetch has failed: nothing more comes of it, and nothing writes for it."""
        self._carry_out(self._machine.on_fetch_failed(number))

    def _carry_out(self, steps: Sequence[fetch_steps.Step]) -> None:
        """Carry out all steps, also after one has raised: the machine says each once. One that raises ends its session."""
        for step in steps:
            try:
                self._take(step)
            except Exception:
                logger.exception("xpyd: a step of fetching failed: %s", type(step).__name__)
                if isinstance(step, fetch_steps.Fetch):
                    self._loop.post(partial(self.on_fetch_failed, step.number))
                if (session := self._numbers.get(getattr(step, "link", -1))) is not None:
                    gone = PeerGone(session.link.peer, "a step failed on this side")
                    session.link.post(partial(session.link.close, gone))

    def _take(self, step: fetch_steps.Step) -> None:
        if isinstance(step, fetch_steps.SayFrame):
            if isinstance(step.body, Busy):
                self.counted.add(metrics.BUFFER_BUSY, 1)
            if (session := self._numbers.get(step.link)) is not None:
                session.send(KINDS[type(step.body)], step.body, step.key)
        elif isinstance(step, fetch_steps.Fetch):
            self._fetch(step)
        elif isinstance(step, fetch_steps.Place):
            self._loop.post(partial(self._place, step))
        elif isinstance(step, fetch_steps.BlocksArrived):
            self._arrived(step)
        elif isinstance(step, fetch_steps.LeftBuffer):
            reason = "it was given up, or what had come of it has left decode's buffer"
            self._give_up((step.key, step.source), Outcome.OVERFLOW, reason)
        elif (session := self._numbers.get(step.link)) is not None:
            error = ChecksumError(session.link.peer, "told other bytes than came")
            session.link.post(partial(session.link.close, error))

    def _fetch(self, step: fetch_steps.Fetch) -> None:
        session, target = self._numbers.get(step.link), self._targets.get((step.key, step.source))
        if session is None or session.fetches is None or (target is None and not isinstance(step.at, BufferPlace)):
            self._loop.post(partial(self.on_fetch_failed, step.number))
            return
        rows: Sequence[Scatter] = ()
        gate = at = None
        if step.at is None:
            assert target is not None
            rows, gate = self._landing.blocks(target, step.batch), target.gate
        elif isinstance(step.at, int):
            at = step.at
            if session.fetches.reads_into_device:
                assert target is not None
                self._landing.expect(target, step.batch, at)
            else:
                rows = self._landing.host_places(step.batch, at)
        else:
            rows = self._landing.host_places(step.batch, step.at)
            self.counted.add(metrics.BUFFERED_BYTES, step.at.size)
        session.fetches.fetch(FetchOrder(step.number, step.key, step.manifest, step.batch, rows, gate, at))

    def _place(self, step: fetch_steps.Place) -> None:
        target = self._targets.get((step.key, step.source))
        if target is None:
            self._placed(step.number, None)
            return
        try:
            self._landing.place(target, step.batch, step.at, partial(self._placed, step.number))
        except Exception:
            logger.exception("xpyd: KV that has come is not put into its blocks")
            self._placed(step.number, None)

    def _placed(self, number: int, sums: NDArray[np.uint64] | None) -> None:
        self._carry_out(self._machine.on_not_placed(number) if sums is None else self._machine.on_placed(number, sums))

    def _arrived(self, step: fetch_steps.BlocksArrived) -> None:
        self._again.discard((step.key, step.source))
        want = self._wants.get((step.key, step.source))
        session = self._sessions.get((want.address, want.incarnation)) if want is not None else None
        name = session.fetches.name if session is not None and session.fetches is not None else "buffer"
        self.inbox.append(FetchedBlocks(step.key, step.source, step.blocks, step.size, name, time.monotonic()))

    # --- time ---

    def _tick(self, now: float) -> None:
        for ident in self._machine.tick(now):
            self.counted.add(metrics.UNCLAIMED, 1)
            self._give_up(ident, Outcome.DEADLINE, "no request has claimed it in decode's buffer")
        self._drop_if_spare()
        if now - self._told_at > self._timeout_s / 4:
            self._told_at = now
            for number, key in self._machine.goes_on():
                if (session := self._numbers.get(number)) is not None:
                    session.send(FrameKind.GOES_ON, None, key)
        for session in list(self._sessions.values()):
            busy = self._machine.busy(session.number) or self._machine.waits(session.number)
            session.tick(now, busy=busy, timeout=self._timeout_s)

    def _unwanted(self, key: Key, outcome: Outcome, reason: str) -> None:
        for ident in [one for one, want in self._wants.items() if one[0] == key and want.tables is None]:
            self._do(Cancel(*ident, outcome, reason), None)
        self._machine.on_request_ended(key)

    def _set_spare(self, spare: bool) -> None:
        self._machine.buffer.closed = spare
        self._drop_if_spare()

    def _drop_if_spare(self) -> None:
        if self._machine.buffer.closed and self.buffered_bytes == (0, 0):
            self._landing.buffers.drop()

    def _give_up(self, ident: TryId, outcome: Outcome, reason: str) -> None:
        """Give up a try that cannot be loaded: its source is told where it has no blocks, else it is reported as broken."""
        want = self._wants.get(ident)
        if want is not None and want.tables is None:
            self._do(Withdraw(*ident, outcome, reason), None)
        elif want is not None:
            self._broken(ident, outcome, reason, final=True)

    def _close_all(self) -> None:
        self._stopping = True
        for session in list(self._sessions.values()):
            session.link.close(PeerGone(session.link.peer, "this engine stops"))


KINDS: Final[Mapping[type, FrameKind]] = {Ask: FrameKind.ASK, ManifestTaken: FrameKind.TAKEN, Busy: FrameKind.BUSY}
"""By body: the frame that it is of."""
