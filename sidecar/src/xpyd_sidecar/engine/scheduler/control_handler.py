"""What peers say on the control thread (``session.control``), and what the machines beside the scheduler are told of it.

The lock is held for short computations only, never over I/O.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.legs import Peer
from xpyd_sidecar.contract.timeline import TracedAnswer, TraceQuery
from xpyd_sidecar.engine.scheduler.pair_recorder import PairRecorder
from xpyd_sidecar.engine.scheduler.scheduler_actions import SchedulerActions
from xpyd_sidecar.kv import messages, peers
from xpyd_sidecar.kv.keys import Outcome, Recent
from xpyd_sidecar.kv.messages import Announce, Control, Drop, Hello, Ping, Pong, Prefix, Reject, ToDecode, TryGone, Welcome
from xpyd_sidecar.kv.offers import Offers
from xpyd_sidecar.kv.pairing import Pairing
from xpyd_sidecar.session.receiver import RefusedRank
from xpyd_sidecar.session.transfer_trace import clock
from xpyd_sidecar.threads.idle_polling import IdlePolling

logger = logging.getLogger(__name__)

RANKS_MAX: Final = 1 << 14
"""Of prefill engines, that are remembered."""


class ControlHandler:
    """One engine's ear."""

    def __init__(self, lock: threading.RLock, pairing: Pairing, offers: Offers, carrying: SchedulerActions, *,
                 nap: IdlePolling | None, pairs: PairRecorder) -> None:
        """``pairs``: hears of peers whose KV cannot be taken."""
        self.ours: peers.Self | None = None
        """What this engine says of itself; set before the thread starts."""
        self._lock = lock
        self._pairing = pairing
        self._offers = offers
        self._carrying = carrying
        self._nap = nap
        self._pairs = pairs
        self._instances: Recent[bytes, tuple[InstanceName, Incarnation]] = Recent()
        """Who has said HELLO, by connection."""
        self._ranks: Recent[Incarnation, tuple[InstanceName, Incarnation]] = Recent(RANKS_MAX)
        """Whose ranks have been announced, by the rank's incarnation."""

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The lock; the engine's thread looks at what has changed when it is given back."""
        with self._lock:
            yield
        if self._nap is not None:
            self._nap.wake()

    def from_prefill(self, peer: bytes, message: Control) -> None:
        """A prefill engine says something."""
        ours = self.ours
        assert ours is not None
        with self._awake():
            known = self._carrying.greeted.touch(peer)  # who speaks is not forgotten for those who do not
            if isinstance(message, Hello):
                met = peers.meet(ours, message)
                if known is not None and known != met:  # what it has announced goes by the first
                    self._carrying.post(peer, Reject(Outcome.PROTOCOL, "another HELLO on this connection"))
                    return
                self._carrying.greeted.put(peer, met)
                self._instances.put(peer, (message.instance, message.incarnation))
                if met.refused and met.refused[0] is Outcome.INCOMPATIBLE:
                    self._pairs.refuse(message.instance, message.incarnation, met.refused[1], time.monotonic())
                if met.refused:
                    logger.warning("xpyd: refused prefill engine %s: %s", message.instance, met.refused[1])
                    self._carrying.post(peer, Reject(*met.refused))
                else:
                    if met.warning:
                        logger.warning("xpyd: prefill engine %s: %s", message.instance, met.warning)
                    self._carrying.post(peer, Welcome(ours.instance, ours.incarnation))
            elif isinstance(message, Ping):
                self._carrying.post(peer, Pong(message.seq, ours.incarnation))
                self._carrying.pair(self._pairing.on_progress(peer, message.work))
            elif isinstance(message, TraceQuery):
                told = self._carrying.ring.notes_of(message.transfers)
                self._carrying.post(peer, TracedAnswer(ours.instance, time.monotonic(), clock(), told))
            elif known is None:
                self._carrying.post(peer, Reject(Outcome.INCARNATION, "no HELLO on this connection"))
            elif isinstance(message, Announce):
                self._carrying.ring.mark(message.key, "announced", sends=False)
                self._carrying.look_at_weights()
                if (whose := self._instances.get(peer)) is not None:
                    for rank in message.data:
                        if self._ranks.get(rank.incarnation) != whose:
                            self._ranks.put(rank.incarnation, whose)
                self._carrying.pair(self._pairing.announce(peer, message, time.monotonic(), ranks=known.ranks,
                                                           refused=known.refused))
            elif isinstance(message, TryGone):
                self._carrying.pair(self._pairing.on_gone(message))
            else:
                self._carrying.post(peer, Reject(Outcome.PROTOCOL, f"{type(message).__name__} is not for decode"))

    def unreadable(self, peer: bytes, prefix: Prefix) -> None:
        """A prefill engine of another wire version says something."""
        reason = f"control wire version {messages.WIRE_VERSION} here, {prefix.version} there"
        with self._awake():
            self._carrying.pair(self._pairing.refuse(prefix.transfer, prefix.attempt, Outcome.INCOMPATIBLE, reason))
        self._carrying.post(peer, Reject(Outcome.INCOMPATIBLE, reason))

    def from_decode(self, peer: Peer, message: Control) -> None:
        """A decode engine answers."""
        if isinstance(message, Drop):
            with self._awake():
                self._carrying.offer(self._offers.drop(message.key, message.outcome, message.reason))

    def decode_lost(self, peer: Peer, outcome: Outcome, reason: str) -> None:
        """A decode engine refuses, does not answer, or lives another life."""
        logger.warning("xpyd: decode engine %s (%s): %s", peer.instance, peer.control, reason)
        with self._awake():
            self._carrying.offer(self._offers.peer_lost(peer, outcome, reason))

    def tell_again(self, peer: Peer) -> None:
        """The connection to a decode engine broke: what it was told may be lost."""
        with self._lock:
            self._carrying.offer(self._offers.announce_again(peer))

    def open_peers(self) -> set[Peer]:
        """Decode engines that have transfers open."""
        with self._lock:
            return self._offers.peers()

    def greeting(self, peer: Peer) -> ToDecode:
        """The first message to a decode engine."""
        assert self.ours is not None
        return self.ours.hello(peer.incarnation)

    def on_rank_refused(self, rank: RefusedRank) -> None:
        """A rank here cannot take KV from one of prefill's. With the lock held."""
        if (whose := self._ranks.get(rank.incarnation)) is not None:
            self._pairs.refuse(*whose, rank.reason, time.monotonic())

    def tick(self, now: float) -> None:
        """Do what is due on the control channel."""
        with self._lock:
            self._carrying.pair(self._pairing.tick(now))
            notes = self._pairs.due(now)
        if notes is not None:
            self._pairs.write(notes)
