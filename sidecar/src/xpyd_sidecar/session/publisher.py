"""Prefill's I/O thread of one rank: listens for decode ranks, tells what there is in the store, and frees what is taken.

The engine's thread, or the one that waits for copies, hands copies over (``push``); the engine's takes reports
(``take_reports``). Neither waits. The memory of a copy goes back to the store when it is taken, or its try has ended.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import HostPort, Incarnation, join_host_port
from xpyd_sidecar.errors import AuthError, ConfigError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import publishing
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.manifests import Ask, Busy, Manifest, ManifestTaken, Sums, TryDone
from xpyd_sidecar.kv.publishing import Publishing
from xpyd_sidecar.kv.wire import Frame, FrameKind
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.process import resources
from xpyd_sidecar.session.greeting import OwnRank
from xpyd_sidecar.session.prefill_session import PrefillSession
from xpyd_sidecar.session.stored_copy import StoredCopy
from xpyd_sidecar.session.transfer_trace import TransferNote, TransferTrace
from xpyd_sidecar.threads.increments import Increments
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.threads.watched import WatchedThread
from xpyd_sidecar.transport.links import LinkServer
from xpyd_sidecar.transport.tcp.serve import TcpServer

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 4096
STRANGERS_MAX: Final = 1024
"""Of them, that have not chosen a link; the one that came first gives way to who comes."""
REPORTS_MAX: Final = 1 << 16
"""Until the engine's thread takes them. It does while it has transfers, and has no more of them at once; a peer may ask for
some that there never were.
"""
NAME_BYTES: Final = 32
PLACED_MAX: Final = 1 << 50
"""Bytes that a rank of decode can have placed of one try."""
LACK_S: Final = 1.0
"""How long nobody is accepted after a file was lacking. Those who come wait in the kernel."""
RETRY_LEAST_S: Final = 0.01
RETRY_MOST_S: Final = 5.0
"""What a decode that is busy may have prefill wait for."""


class SendReport(NamedTuple):
    """A transfer that a rank has ended; ``size``: bytes of copies that the peer has confirmed."""

    rank: int
    key: Key
    outcome: Outcome
    reason: str
    size: int


class PublisherSettings(NamedTuple):
    """What a rank of prefill is set to."""

    host: str
    port: int
    """0: any."""
    transport: str
    """``kv.transport``."""
    peer_timeout_s: float
    cover: bool
    """Sums are made of all copies that have none; else of those that a decode which wants them is told of."""
    encrypts: bool = False
    """``kv.encryption``."""


class Publisher:
    """The thread and its listening socket."""

    def __init__(self, me: OwnRank, settings: PublisherSettings, machine: Publishing[StoredCopy], *, store: CopyStore,
                 servers: Mapping[str, LinkServer]) -> None:
        """Bind and start. ``store``: where copies are; ``servers``: by name of a link, what this rank has for it.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self.store = store
        self.counted = Increments()
        """Metrics, for the engine's thread to take."""
        self.noted: deque[TransferNote] = deque(maxlen=REPORTS_MAX)
        """Transfers that have ended, for the engine's thread to take."""
        self._me = me
        self._settings = settings
        self._machine = machine
        self._servers: dict[str, LinkServer] = dict(servers)
        self._noting = TransferTrace()
        self._began: dict[Key, float] = {}
        self._sizes: dict[Key, int] = {}
        """Bytes that takers say to have placed of a try."""
        self._sessions: dict[int, PrefillSession] = {}
        self._strangers: dict[int, PrefillSession] = {}
        """Those of them of whom nothing was heard after the choice of a link, the oldest first."""
        self._by_life: dict[Incarnation, PrefillSession] = {}
        """Those of whom something was, by decode rank: each has one session."""
        self._copies: dict[tuple[Key, int], StoredCopy] = {}
        """What was told and is not freed, by the number of its manifest."""
        self._unsummed: deque[StoredCopy] = deque()
        self._reports: deque[SendReport] = deque(maxlen=REPORTS_MAX)
        self._proved = 0
        self._held: deque[tuple[int, Key, Iterable[StoredCopy]]] = deque()
        """Copies that nobody may have yet, in order of their steps."""
        try:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            self._listener = socket.create_server((settings.host, settings.port), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"data_port: cannot listen on {settings.host} port {settings.port}: {error}") from None
        self._listener.setblocking(False)
        self._accepts_at = 0.0
        """When the listener is looked at again; 0: it is."""
        self._lack = resources.Complaint("decode ranks are not accepted for a second")
        self.address: HostPort = join_host_port(settings.host, self._listener.getsockname()[1])
        self._loop = Loop("xpyd-sender", self._tick)
        self.thread: WatchedThread = self._loop.thread
        self._loop.at_end(self._close_all)
        self.tcp = TcpServer(self._loop, settings.peer_timeout_s, self.copy_of)
        """Sends bytes of copies over TCP, also for links that cannot always move them by themselves."""
        if settings.transport in {"auto", "tcp"}:
            self._servers["tcp"] = self.tcp
        self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        self._loop.start()

    # --- from other threads ---

    def push(self, key: Key, made: Iterable[StoredCopy], hold: int = 0) -> None:
        """Take copies of a transfer that are complete. They stay here until step ``hold`` is proved."""
        self._loop.post(partial(self._copied, key, made, hold))

    def on_copies_proved(self, step: int) -> None:
        """Copies that were held for steps up to this one may be told of, but for those of transfers released before."""
        self._loop.post(partial(self._leave, step))

    def release(self, key: Key, outcome: Outcome, reason: str) -> None:
        """Let go of a transfer."""
        self._loop.post(lambda: self._carry_out(self._machine.release(
            key, outcome, reason, retry=outcome is Outcome.ABORTED)))

    def on_progress(self, keys: Sequence[Key]) -> None:
        """The engine's work for these transfers has grown."""
        self._loop.post(partial(self._progressed, keys))

    def end_sessions(self, link: str, reason: str) -> None:
        """End all sessions over a link: the memory that they read is given up."""
        self._loop.post(partial(self._end_sessions, link, reason))

    def take_reports(self) -> list[SendReport]:
        """What has ended since the last call."""
        out = []
        while self._reports:
            out.append(self._reports.popleft())
        return out

    def stop(self) -> None:
        """End the thread and close every session."""
        self._loop.stop()
        self._listener.close()

    # --- copies, on the loop's thread ---

    def _progressed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._machine.on_progress(key)

    def _leave(self, step: int) -> None:
        self._proved = step
        while self._held and self._held[0][0] <= step:
            hold, key, made = self._held.popleft()
            self._copied(key, made, hold)

    def _copied(self, key: Key, made: Iterable[StoredCopy], hold: int) -> None:
        if hold > self._proved:
            self._held.append((hold, key, made))
            return
        for copy in made:
            self._carry_out(self._machine.publish(key, partial(self._numbered, key, copy), (copy, copy.size),
                                                  time.monotonic()))
            if self._settings.cover:
                self._sum_later(copy)
        self._relieve()

    def _sum_later(self, copy: StoredCopy) -> None:
        if not copy.sums and not copy.freed and not copy.summing:
            copy.summing = True
            self._unsummed.append(copy)
            if len(self._unsummed) == 1:
                self._loop.post(self._sum_up)

    def _numbered(self, key: Key, copy: StoredCopy, number: int) -> Manifest:
        """The manifest of a copy."""
        self._copies[key, number] = copy
        copy.key, copy.number = key, number
        self.tcp.add(key, number, copy)
        return copy.manifest(number)

    def _sum_up(self) -> None:
        """Make the sums of one copy and tell them to who was told of it; between two the loop serves its sockets."""
        copy = self._unsummed.popleft()
        if self._unsummed:  # whatever becomes of this one
            self._loop.post(self._sum_up)
        if copy.freed:
            return
        told, copy.told = copy.told, []
        try:
            copy.sum_up()
        except Exception:
            copy.summing = False
            logger.exception("xpyd: the sums of a copy could not be made")
            self._end_for_our_fault(told)
            return
        for number in told:
            if (session := self._sessions.get(number)) is not None:
                session.link.send(FrameKind.SUMS, Sums(copy.number, copy.sums), copy.key)

    def _relieve(self) -> None:
        """A store that is more than half full has decode take what it was told of."""
        over = self.store.used_bytes - self.store.bound // 2 - self._machine.pressed_bytes
        if over > 0:
            self._carry_out(self._machine.press(over, time.monotonic()))

    # --- sessions ---

    def _accept(self, _: int) -> None:
        for _ in range(32):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not resources.is_own_lack(error):
                    continue  # accept(2): as if there was none
                self._lack.add(error)
                self._loop.watch(self._listener, 0, self._accept)
                self._accepts_at = time.monotonic() + LACK_S
                return
            if len(self._sessions) >= CONNECTIONS_MAX:
                logger.warning("xpyd: refused a data link from %s: %d are open", address[0], CONNECTIONS_MAX)
                sock.close()
                continue
            if len(self._strangers) >= STRANGERS_MAX:
                first = next(iter(self._strangers.values()))
                first.link.close(PeerGone(first.link.peer, "does not greet, and others wait"))
            session = PrefillSession(self._me, self._loop, sock, join_host_port(address[0], address[1]),
                                     servers=self._servers, transport=self._settings.transport,
                                     encrypts=self._settings.encrypts, asked=self._asked, named=self._named,
                                     lost=self._lost)
            self._sessions[session.number] = self._strangers[session.number] = session

    def _asked(self, session: PrefillSession, frame: Frame) -> None:
        """A frame of a peer that has chosen a link."""
        number, life, key, machine = session.number, session.life, frame.key, self._machine
        if self._strangers.pop(number, None) is not None:
            self._known(session)
        match frame.kind:
            case FrameKind.ASK:
                self._noting.mark(key, "heard")
                self._carry_out(machine.ask(number, life, key, bodies.read_body(frame.body, Ask), time.monotonic()))
            case FrameKind.TAKEN:
                taken = bodies.read_body(frame.body, ManifestTaken).number
                if (copy := self._copies.get((key, taken))) is not None and session.serves is not None:
                    self._noting.piece(key, copy.told_at, time.monotonic(), copy.size, session.serves.name)
                self._carry_out(machine.on_taken(number, life, key, taken))
            case FrameKind.BUSY:
                busy = bodies.read_body(frame.body, Busy)
                wait = busy.retry_s if RETRY_LEAST_S <= busy.retry_s <= RETRY_MOST_S else RETRY_MOST_S  # also no number
                machine.on_busy(number, life, key, busy.number, time.monotonic() + wait)
                self.counted.add(metrics.STORE_RETRIES, 1)
            case FrameKind.GOES_ON:
                machine.on_progress(key)
            case FrameKind.DONE:
                size = bodies.read_body(frame.body, TryDone).size
                if key in machine and 0 <= size <= PLACED_MAX:
                    self._sizes[key] = self._sizes.get(key, 0) + size
                self._carry_out(machine.on_done(number, life, key))
            case FrameKind.CANCEL:
                why = bodies.read_body(frame.body, bodies.Reason)
                self._carry_out(machine.cancel(number, life, key, why.outcome, why.reason))
            case _:
                raise ProtocolError(session.link.peer, f"sent {frame.kind.name} where prefill listens")
        self._relieve()

    def _named(self, stranger: PrefillSession, name: bytes) -> None:
        """A connection is no session of its own, but a stripe of one."""
        for session in list(self._sessions.values()) if len(name) == NAME_BYTES else ():
            if any(hmac.compare_digest(one, name) for one in session.names):
                self._sessions.pop(stranger.number, None)
                self._strangers.pop(stranger.number, None)
                session.link.run(partial(session.attach, name, stranger.link.detach()))
                return
        raise AuthError(stranger.link.peer, "names no session of this rank")

    def copy_of(self, key: Key, number: int) -> StoredCopy | None:
        """The copy that a manifest was told of, if it is not freed; on the loop's thread."""
        return self._copies.get((key, number))

    def _known(self, session: PrefillSession) -> None:
        """A decode rank says its first word: it has no other session, whose end may not be known here yet."""
        before = self._by_life.get(session.life)
        self._by_life[session.life] = session
        if before is not None:
            before.link.close(PeerGone(before.link.peer, "it has connected anew"))

    def _lost(self, session: PrefillSession, error: PeerError) -> None:
        """A session has ended."""
        self._sessions.pop(session.number, None)
        self._strangers.pop(session.number, None)
        if self._by_life.get(session.life) is session:
            del self._by_life[session.life]
        busy = self._machine.busy(session.number)
        if busy or not isinstance(error, PeerGone):
            logger.warning("xpyd: data link to decode ended: %s", error)
        self._carry_out(self._machine.on_session_lost(session.number, time.monotonic()))

    def _end_sessions(self, link: str, reason: str) -> None:
        for session in [one for one in self._sessions.values() if one.may_use(link)]:
            session.link.close(PeerGone(session.link.peer, reason))

    # --- what the machine says ---

    def _carry_out(self, steps: Sequence[publishing.Step[StoredCopy]]) -> None:
        """All of them, whatever becomes of one: nobody else knows of the copies in those that follow."""
        for step in steps:
            try:
                self._take(step)
            except Exception:
                logger.exception("xpyd: a step of publishing failed: %s", type(step).__name__)
                link = getattr(step, "link", None)
                self._end_for_our_fault([] if link is None else [link])

    def _end_for_our_fault(self, numbers: Sequence[int]) -> None:
        """What these sessions were owed they will not get: left open, they would wait for it until a deadline."""
        for number in numbers:
            if (session := self._sessions.get(number)) is not None:
                session.link.close(PeerGone(session.link.peer, "a step failed on this side"))

    def _take(self, step: publishing.Step[StoredCopy]) -> None:
        if isinstance(step, publishing.FreeCopy):
            if self._copies.pop((step.data.key, step.data.number), None) is not None:
                self.tcp.take(step.data.key, step.data.number, step.data)
            step.data.free(self.store)
        elif isinstance(step, publishing.PublishEnded):
            self._report(step)
        elif (session := self._sessions.get(step.link)) is None:
            return
        elif isinstance(step, publishing.Tell):
            self._tell(session, step)
        elif isinstance(step, publishing.EndSession):
            session.link.close(PeerGone(session.link.peer, "does not answer that a try is gone"))
        elif isinstance(step, publishing.Press):
            session.link.send(FrameKind.PRESS, bodies.PressManifest(step.number), step.key)
        else:
            session.link.send(FrameKind.GONE, bodies.Reason.from_words(step.outcome, step.reason, step.retry), step.key)

    def _tell(self, session: PrefillSession, step: publishing.Tell) -> None:
        session.link.send(FrameKind.MANIFEST, step.manifest, step.key)
        if session.serves is not None:
            session.serves.on_told()
        copy = self._copies[step.key, step.manifest.number]
        copy.told_at = time.monotonic()
        self._began.setdefault(step.key, copy.told_at)
        if session.sums and copy.sums:
            session.link.send(FrameKind.SUMS, Sums(copy.number, copy.sums), step.key)
        elif session.sums:
            copy.told.append(session.number)
            self._sum_later(copy)

    def _report(self, step: publishing.PublishEnded) -> None:
        size, began = self._sizes.pop(step.key, 0), self._began.pop(step.key, None)
        if step.confirmed and began is not None:
            self.counted.add(metrics.PUSH_SECONDS, time.monotonic() - began)
        if step.confirmed:
            self._noting.mark(step.key, "done")
        if (noted := self._noting.end(step.key)) is not None:
            self.noted.append(noted)
        self._reports.append(SendReport(self._me.rank, step.key, step.outcome, step.reason, size if step.confirmed else 0))

    def _tick(self, now: float) -> None:
        if self._accepts_at and now >= self._accepts_at:
            self._accepts_at = 0.0
            self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        self._carry_out(self._machine.tick(now))
        self._relieve()
        for session in list(self._sessions.values()):
            session.tick(now, busy=self._machine.busy(session.number), timeout=self._settings.peer_timeout_s)

    def _close_all(self) -> None:
        self._loop.watch(self._listener, 0, self._accept)
        for session in list(self._sessions.values()):
            session.link.close(PeerGone(session.link.peer, "this engine stops"))
