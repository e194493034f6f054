"""Decode's I/O thread of one rank: sessions with prefill ranks, and what is fetched over them (``kv.fetching``).

The engine's thread says which tries are wanted, and from when on they have blocks (``carry_out``); what has come is put
into ``inbox`` for it, one event for each fetch, when it is in its blocks and right. The engine's thread places nothing.
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
    """Tell a source that a try is given up, which is not begun again."""

    key: Key
    source: int
    outcome: Outcome
    reason: str


class RefusedRank(NamedTuple):
    """A rank of prefill whose KV this one cannot take over any link. ``incarnation``: of the rank."""

    incarnation: Incarnation
    reason: str


class FetchedBlocks(NamedTuple):
    """Blocks are in their places, and right: (array of the source, first, count) of each piece. ``link``: its name."""

    key: Key
    source: int
    blocks: tuple[tuple[int, int, int], ...]
    size: int
    link: str
    at: float
    """When, by the monotonic clock."""


class BrokenSource(NamedTuple):
    """A source will not give a try."""

    key: Key
    source: int
    outcome: Outcome
    reason: str
    final: bool


class Receiver:
    """The receiver's I/O thread: decode's sessions with the ranks of prefill."""

    def __init__(self, me: OwnRank, machine: Fetching, landing: Landing, *, peer_timeout_s: float) -> None:
        """``landing``: the memory that bytes come into. ``connect`` says over what, before the first want."""
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
        """Begin. ``fetcher``: over which links this rank can fetch; its fetches are this thread's."""
        self._fetcher = fetcher
        self._landing.start(self._loop.post)
        self._loop.start()

    # --- from the engine's thread ---

    def carry_out(self, step: WantTry | Confirm | Cancel | Withdraw, moment: CopyMark | None = None) -> None:
        """Do what the machine of loads says. ``moment``: on a device, from when on blocks may be written."""
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
        """Nothing more is to be written for a request; ``is_settled`` says when nothing is."""
        for gate in self._gates.get(request, {}).values():
            gate.close()

    def is_settled(self, request: str) -> bool:
        """Whether nothing is written into the blocks of a request that was closed."""
        if not all(gate.done() for gate in self._gates.get(request, {}).values()):
            return False
        self._gates.pop(request, None)
        return True

    def reset(self) -> None:
        """Nothing that was fetched ahead so far is of any use."""
        self._loop.post(lambda: self._carry_out(self._machine.reset()))

    def drop_try(self, key: Key, outcome: Outcome, reason: str) -> None:
        """The request of a try goes on, or has ended, without it: its sources are told how and why, and what has come ahead
        of it is dropped.
        """
        self._loop.post(partial(self._unwanted, key, outcome, reason))

    def spare(self, *, spare: bool) -> None:
        """Whether nobody has a use for the lookup buffer: nothing more comes into it then, and its memory goes back."""
        self._loop.post(partial(self._set_spare, spare))

    @property
    def buffered_bytes(self) -> tuple[int, int]:
        """Bytes in use, of the lookup buffer and of the host pool."""
        return self._machine.buffer.bytes_in_use

    def over_tcp(self, session: Session, owner: FetchOwner, welcome: bodies.LinkWelcome,
                 settled: Callable[[FetchLink | None, str], None]) -> bool:
        """Make the link ``tcp`` of a session (``link_trial.OtherLink``), once there is memory that it can write into.

        On the loop's thread.

        Raises:
            Incompatible: it was not compiled here.
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
        """Say DONE in another session, since the one in which it was said has ended before prefill may have read it."""
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
        """Ask for a try over the session with its source, which is begun where there is none."""
        session = self._session(want)
        if session is None:
            return
        self._sources[session.number, want.key] = want.source
        self._carry_out(self._machine.begin(want.ident, session.number, want.plan, time.monotonic()))

    def _session(self, want: WantTry) -> DecodeSession | None:
        """The session with a source; without one, the try is broken."""
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
        """A try will not come from a source."""
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
        """A frame of a session that has a link."""
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
        """A session has a link."""
        for refused in session.refused:
            self.counted.add(f"{metrics.LINKS_REFUSED}:{refused.partition(':')[0]}", 1)
        self.links.on_session_open(session)

    def _ended(self, session: DecodeSession, error: PeerError) -> None:
        """A session has ended: what was taken over it is asked for once more, if it can be."""
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
        """A fetch is complete, as ``FetchOwner`` has it."""
        self._carry_out(self._machine.on_fetched(number, sums))

    def on_fetch_failed(self, number: int) -> None:
        """A fetch has failed, as ``FetchOwner`` has it."""
        self._carry_out(self._machine.on_fetch_failed(number))

    def _carry_out(self, steps: Sequence[fetch_steps.Step]) -> None:
        """All of them, whatever becomes of one: nobody else knows of what follows. The session of one that fails ends."""
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
        """A try cannot be loaded. Where it has no blocks its source is told, and tells whoever waits for it in decode."""
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
