"""Decode's scheduler side: which request waits for which transfer, and what becomes of it.

Laws
1. A request holds no blocks while PARKED; nothing is promised to prefill before its blocks are allocated.
2. Of several tries of a transfer the greatest (attempt, generation) wins, whoever sends it; a try below the leg's own
   attempt or below one already seen is stale.
3. Every announcement ends: it is loaded, or its sender is told to drop it. Unclaimed ones run out. The sender of a try that
   another has taken over during the load is told when the load is over: earlier, its answer could end the newer one.
4. A transfer that has ended never loads again under the same or an older attempt.
5. What a load has ended of is what the workers report, also where its request has ended before: of a load that fails, vLLM
   ends the request first unless it computes the prompt itself.
6. No load begins from a source with other weights than this engine has at that moment.
7. Work that prefill speaks of is progress of a load once for each growth of its numbers, and only if who announced the try
   speaks of it.

    register ──▶ PARKED ──allocated(load)──▶ LOADING ──finished──▶ DONE
                   │ announce, gone, refuse: PARKED, other source │ announce: LOADING from the new source
                   └──allocated(nothing) ─────────────────────────────▶ DONE        end (any state): forgotten, entombed
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.messages import Announce, TryGone, WorkDone

UNCLAIMED_MAX: Final = 4096
FOREVER: Final = Lease(math.inf)
LEFT_MAX: Final = 32
"""Tries of one load that another has taken over and whose senders are told; those before them let go at their deadlines."""


class DecodeLegState(StrEnum):
    """Where one decode leg stands."""

    PARKED = "parked"
    LOADING = "loading"
    DONE = "done"


class LoadVerdict(Enum):
    """What to answer when the scheduler asks for a request."""

    WAIT = "wait"
    LOAD = "load"
    COMPUTE = "compute"
    FAIL = "fail"


class DropPeer(NamedTuple):
    """Tell the sender of a try to let go."""

    peer: bytes
    key: Key
    outcome: Outcome
    reason: str


class StartLoad(NamedTuple):
    """Have the workers load blocks ``first``.. of a request from ``source``; again for a newer try."""

    request: str
    source: Announce


class LoadProgress(NamedTuple):
    """Tell the workers that prefill's work for a load has grown."""

    key: Key


class FailLoad(NamedTuple):
    """Have the workers report the request's load as failed."""

    request: str


class Abandon(NamedTuple):
    """Have the workers let go of a load whose request has ended."""

    request: str


class DecodeLegEnded(NamedTuple):
    """A transfer is over on this side."""

    request: str
    key: Key
    outcome: Outcome
    reason: str


Instruction = DropPeer | StartLoad | LoadProgress | FailLoad | Abandon | DecodeLegEnded


@dataclass
class DecodeLeg:
    """One request that waits for KV."""

    request: str
    transfer: TransferId
    attempt: Attempt
    identity: bytes
    tokens: int
    handed: int
    """Tokens whose KV it takes."""
    lease: Lease
    state: DecodeLegState = DecodeLegState.PARKED
    source: Announce | None = None
    peer: bytes = b""
    failed: tuple[Outcome, str] | None = None
    asked: LoadVerdict = LoadVerdict.WAIT
    why: tuple[Outcome, str] = (Outcome.ABORTED, "prefill withdrew")
    """Of the last answer COMPUTE or FAIL: a newer announcement may since have cleared ``failed``."""
    loading: Key | None = None
    ends: Lease = FOREVER
    """When the router's time for all of it is over."""
    tokens_done: int = 0
    """What prefill has said of its work for ``source``, and the next too."""
    steps_waited: int = 0
    barred: Key | None = None
    """The try that was in hand when what prefill had computed was no longer wanted; it may be announced again."""
    left: deque[tuple[bytes, Key]] = field(default_factory=lambda: deque(maxlen=LEFT_MAX))
    """Senders and tries that workers may have asked before another one took over. They cancel them over the data link, but
    what was asked may not have come to the sender, as that link may have broken: it would keep its copies."""

    def key(self) -> Key:
        """The try in hand, or the leg's own attempt where there is none yet."""
        return self.source.key if self.source else Key(self.transfer, self.attempt, 1)


class UnclaimedOffer(NamedTuple):
    """An announcement whose decode leg has not come yet."""

    peer: bytes
    source: Announce
    refused: tuple[Outcome, str] | None
    lease: Lease


class Pairing:
    """The machine. Every method returns instructions in the order in which they must be carried out."""

    def __init__(self, *, recompute: bool, unclaimed_s: float) -> None:
        self._recompute = recompute
        self._unclaimed_s = unclaimed_s
        self._weights = ""
        """Of this engine."""
        self._legs: dict[str, DecodeLeg] = {}
        self._active: dict[str, DecodeLeg] = {}  # those not DONE: decode legs stay known for as long as they generate
        self._by_transfer: dict[TransferId, DecodeLeg] = {}
        self._unreported: dict[str, tuple[DecodeLegEnded, tuple[Outcome, str] | None]] = {}
        """Loads whose requests have ended and whose workers have not: how that would be told, and what is known of it."""
        self._unclaimed: OrderedDict[TransferId, UnclaimedOffer] = OrderedDict()
        self._tombs: Recent[TransferId, tuple[int, Outcome, str]] = Recent()

    @property
    def open(self) -> int:
        """Transfers that are waited for."""
        return len(self._active)

    def leg(self, request: str) -> DecodeLeg | None:
        """The leg of a request."""
        return self._legs.get(request)

    def weights_are(self, version: str) -> list[Instruction]:
        """What the weights of this engine are called now: no load begins from others any more."""
        out: list[Instruction] = []
        if version == self._weights:
            return out
        self._weights = version
        for leg in self._active.values():
            if leg.state is DecodeLegState.PARKED and leg.source is not None and (why := self._other_weights(leg.source)):
                out.append(DropPeer(leg.peer, leg.source.key, *why))
                leg.source, leg.failed = None, why
        return out

    def _other_weights(self, source: Announce) -> tuple[Outcome, str] | None:
        """Why a source is of other weights; None: it is not, or one side does not say."""
        if not self._weights or not source.weights or source.weights == self._weights:
            return None
        return Outcome.INCOMPATIBLE, f"weights: version {self._weights[:80]!r} here, {source.weights[:80]!r} there"

    def register(self, request: str, transfer: TransferId, attempt: Attempt, *, identity: bytes, tokens: int, handed: int,
                 lease: Lease, ends: Lease = FOREVER, withdrawn: bool = False) -> list[Instruction]:
        """A decode leg has arrived. A second one of the same or an older attempt is an ordinary request (law 4).

        ``withdrawn``: it may stand for a leg that never came so far, with another prompt, and ends at once.
        """
        tomb = self._tombs.get(transfer)
        if transfer in self._by_transfer or request in self._legs or (tomb and attempt <= tomb[0]):
            return []
        leg = DecodeLeg(request, transfer, attempt, identity, tokens, handed, lease, ends=ends)
        self._legs[request] = self._active[request] = self._by_transfer[transfer] = leg
        early = self._unclaimed.pop(transfer, None)
        if early is None:
            return []
        if withdrawn and early.source.identity != identity:
            return [DropPeer(early.peer, early.source.key, Outcome.ABORTED, "decode's leg was taken back")]
        return self._offer(leg, early.peer, early.source, early.refused)

    def announce(self, peer: bytes, source: Announce, now: float, *, ranks: int,
                 refused: tuple[Outcome, str] | None = None) -> list[Instruction]:
        """A try is announced by a peer of ``ranks`` ranks; ``refused``: one that this engine cannot take KV from."""
        if refused is None and len(source.data) != ranks:
            refused = Outcome.INCOMPATIBLE, f"data: {len(source.data)} addresses for {ranks} ranks"
        leg = self._by_transfer.get(source.transfer)
        if leg is not None:
            return self._offer(leg, peer, source, refused)
        tomb = self._tombs.get(source.transfer)
        if tomb and source.attempt <= tomb[0]:
            return [DropPeer(peer, source.key, tomb[1] if tomb[1] is not Outcome.OK else Outcome.UNUSED, tomb[2])]
        out: list[Instruction] = []
        old = self._unclaimed.get(source.transfer)
        if old and old.source.key.order >= source.key.order:
            return [] if old.source.key == source.key else [_stale(peer, source.key)]
        if old:
            out.append(_stale(old.peer, old.source.key))
        self._unclaimed.pop(source.transfer, None)
        self._unclaimed[source.transfer] = UnclaimedOffer(peer, source, refused, Lease.start(now, self._unclaimed_s))
        if len(self._unclaimed) > UNCLAIMED_MAX:
            _, oldest = self._unclaimed.popitem(last=False)
            out.append(self._unwanted(oldest, Outcome.OVERFLOW, "too many unclaimed announcements"))
        return out

    def _offer(self, leg: DecodeLeg, peer: bytes, source: Announce,
               refused: tuple[Outcome, str] | None) -> list[Instruction]:
        if leg.state is DecodeLegState.DONE:
            return [DropPeer(peer, source.key, Outcome.UNUSED, "decode no longer waits")]
        if leg.barred is not None and source.key.order <= leg.barred.order:
            return [DropPeer(peer, source.key, Outcome.STALE, "it began before caches were reset")]
        if source.attempt < leg.attempt or (leg.source and source.key.order < leg.source.key.order):
            # One that is announced again while workers may have it in hand is told when the load is over (law 3).
            return [] if any(key == source.key for _, key in leg.left) else [_stale(peer, source.key)]
        if leg.source and source.key == leg.source.key:
            return []
        if refused is None and (source.identity != leg.identity or source.tokens != leg.tokens):
            refused = Outcome.IDENTITY, f"not the same prompt ({leg.tokens} tokens here, {source.tokens} there)"
        if refused is None and source.handed != leg.handed:
            refused = Outcome.INCOMPATIBLE, f"handed: {leg.handed} of {leg.tokens} tokens here, {source.handed} there"
        refused = refused or self._other_weights(source)
        out: list[Instruction] = []
        if refused is not None:
            if leg.state is DecodeLegState.PARKED and leg.source is None:
                leg.failed = refused
            return [DropPeer(peer, source.key, *refused)]
        if leg.source and leg.state is DecodeLegState.PARKED:
            out.append(_stale(leg.peer, leg.source.key))
        elif leg.source:
            leg.left.append((leg.peer, leg.source.key))
        leg.source, leg.peer, leg.failed = source, peer, None
        leg.tokens_done = leg.steps_waited = 0
        return out

    def on_progress(self, peer: bytes, work: Sequence[WorkDone]) -> list[Instruction]:
        """A peer says what it has done for tries that it announced."""
        out: list[Instruction] = []
        for one in work:
            leg = self._by_transfer.get(one.transfer)
            if leg is None or leg.source is None or leg.peer != peer or leg.source.key != one.key:
                continue
            if one.tokens > leg.tokens_done or one.steps > leg.steps_waited:
                leg.tokens_done = max(leg.tokens_done, one.tokens)
                leg.steps_waited = max(leg.steps_waited, one.steps)
                if leg.state is DecodeLegState.LOADING:
                    out.append(LoadProgress(one.key))
        return out

    def on_gone(self, message: TryGone) -> list[Instruction]:
        """Prefill's scheduler side withdraws a try. While LOADING its worker says so itself, in order with the data."""
        leg = self._by_transfer.get(message.transfer)
        early = self._unclaimed.get(message.transfer)
        if early and early.source.key == message.key:
            if message.retry:
                del self._unclaimed[message.transfer]
            else:
                self._unclaimed[message.transfer] = early._replace(refused=(message.outcome, message.reason))
        if leg and leg.state is DecodeLegState.PARKED and leg.source and leg.source.key == message.key:
            leg.source = None
            leg.failed = None if message.retry else (message.outcome, message.reason)
        return []

    def reset(self, reason: str) -> list[Instruction]:
        """What prefill has computed so far is not to be loaded, but for what is LOADING."""
        failed = Outcome.STALE, reason
        for transfer, early in self._unclaimed.items():
            self._unclaimed[transfer] = early._replace(refused=failed)
        out: list[Instruction] = []
        for leg in self._active.values():
            if leg.state is DecodeLegState.PARKED and leg.source is not None:
                out.append(DropPeer(leg.peer, leg.source.key, *failed))
                leg.barred, leg.source, leg.failed = leg.source.key, None, failed
        return out

    def refuse(self, transfer: TransferId, attempt: Attempt, outcome: Outcome, reason: str) -> list[Instruction]:
        """A try that cannot even be read (another wire version): its leg fails now instead of at its deadline."""
        leg = self._by_transfer.get(transfer)
        if leg and leg.state is DecodeLegState.PARKED and leg.source is None and attempt >= leg.attempt:
            leg.failed = outcome, reason
        return []

    def ask(self, request: str, now: float) -> LoadVerdict:
        """What the scheduler is to do with a request. Asking again is harmless."""
        leg = self._legs.get(request)
        if leg is None or leg.state is not DecodeLegState.PARKED:
            return LoadVerdict.COMPUTE
        if leg.source is None and leg.failed is None and leg.lease.is_over(now):
            leg.failed = Outcome.DEADLINE, "prefill did not announce in time"
        if leg.source is not None:
            leg.asked = LoadVerdict.LOAD
        elif leg.failed is None:
            leg.asked = LoadVerdict.WAIT
        else:
            leg.asked, leg.why = LoadVerdict.COMPUTE if self._recompute else LoadVerdict.FAIL, leg.failed
        return leg.asked

    def on_allocated(self, request: str, external: int) -> list[Instruction]:
        """The scheduler has allocated blocks, ``external`` tokens of them to be loaded."""
        leg = self._legs.get(request)
        if leg is None or leg.state is not DecodeLegState.PARKED:
            return []
        if external == 0:
            outcome, reason = leg.failed or (Outcome.UNUSED, "decode computes the prompt itself")
            return self._done(leg, outcome, reason)
        leg.state = DecodeLegState.LOADING
        if leg.asked is LoadVerdict.LOAD and leg.source is not None:
            leg.loading = leg.source.key
            return [StartLoad(request, leg.source)]
        leg.failed = leg.failed or leg.why
        return [FailLoad(request)]

    def unplaceable(self, request: str, reason: str) -> None:
        """What was asked for has no place in the blocks that are about to be ``allocated``: its load fails."""
        leg = self._legs.get(request)
        if leg is not None and leg.state is DecodeLegState.PARKED:
            leg.asked, leg.failed = LoadVerdict.FAIL, (Outcome.PROTOCOL, reason)

    def newer(self) -> list[Instruction]:
        """Loads whose source has been replaced since they were ordered."""
        out: list[Instruction] = []
        for leg in self._active.values():
            if leg.state is DecodeLegState.LOADING and leg.loading and leg.source and leg.source.key != leg.loading:
                leg.loading = leg.source.key
                out.append(StartLoad(leg.request, leg.source))
        return out

    def without_blocks(self) -> list[tuple[bytes, Announce]]:
        """Peers and sources of requests that have no blocks yet: what they have may have to be kept elsewhere."""
        return [(leg.peer, leg.source) for leg in self._active.values()
                if leg.state is DecodeLegState.PARKED and leg.source is not None]

    def on_load_finished(self, request: str, outcome: Outcome, reason: str,
                         tries: Collection[Key] = ()) -> list[Instruction]:
        """All workers have reported the request's load; ``tries``: those that they have reported."""
        leg = self._legs.get(request)
        if leg is None and (waiting := self._unreported.pop(request, None)) is not None:
            ended, failed = waiting
            return [ended if outcome is Outcome.OK else DecodeLegEnded(request, ended.key, *(failed or (outcome, reason)))]
        if leg is None or leg.state is not DecodeLegState.LOADING:
            return []
        if leg.failed is not None and outcome is not Outcome.OK:
            outcome, reason = leg.failed
        # A worker tells its source over the data link. Where that broke, or not every worker has taken the load from that
        # source (it was done before, or was not told), control does.
        whole = next(iter(tries)) if outcome is Outcome.OK and len(set(tries)) == 1 else None
        return self._done(leg, outcome, reason, whole=whole)

    def end(self, request: str) -> list[Instruction]:
        """The request has ended, however and in whatever state."""
        leg = self._legs.pop(request, None)
        if leg is None:
            return []
        out: list[Instruction] = []
        if leg.state is not DecodeLegState.DONE:
            loading = leg.state is DecodeLegState.LOADING
            ended, *told = self._done(leg, Outcome.ABORTED, "decode's leg ended")
            assert isinstance(ended, DecodeLegEnded)
            if loading and not self._recompute:
                self._unreported[request] = ended, leg.failed
                out += [Abandon(request), *told]
            else:
                out += [*([Abandon(request)] if loading else []), ended, *told]
        del self._by_transfer[leg.transfer]
        return out

    def tick(self, now: float) -> list[Instruction]:
        """Time passes: unclaimed announcements run out."""
        out: list[Instruction] = []
        while self._unclaimed:
            transfer, oldest = next(iter(self._unclaimed.items()))
            if not oldest.lease.is_over(now):
                break
            del self._unclaimed[transfer]
            out.append(self._unwanted(oldest, Outcome.DEADLINE, "no decode leg claimed it"))
        return out

    def _unwanted(self, item: UnclaimedOffer, outcome: Outcome, reason: str) -> DropPeer:
        source = item.source
        self._tombs.put(source.transfer, (source.attempt, outcome, reason))  # a leg that comes late must not wait for it
        return DropPeer(item.peer, source.key, outcome, reason)

    def _done(self, leg: DecodeLeg, outcome: Outcome, reason: str, *, whole: Key | None = None) -> list[Instruction]:
        """A leg is over: every sender is told but that of the try which every worker has loaded, and has confirmed."""
        leg.state = DecodeLegState.DONE
        self._active.pop(leg.request, None)
        key = leg.key()
        self._tombs.put(leg.transfer, (max(leg.attempt, key.attempt), outcome, reason))
        out: list[Instruction] = [DecodeLegEnded(leg.request, whole or key, outcome, reason)]
        out += [_stale(peer, old) for peer, old in leg.left if old != whole]
        leg.left.clear()
        if leg.source is not None and leg.source.key != whole:
            out.append(DropPeer(leg.peer, key, outcome if outcome is not Outcome.OK else Outcome.STALE, reason))
        return out


def _stale(peer: bytes, key: Key) -> DropPeer:
    return DropPeer(peer, key, Outcome.STALE, "a newer try is known")
