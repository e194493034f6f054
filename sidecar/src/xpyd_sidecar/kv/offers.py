"""Prefill's scheduler side: which of its requests are legs of a transfer, and how far each has been pushed.

Laws
1. A leg is announced when its blocks are first allocated, and again where that may be lost; its transfer is open until
   every rank has ended it.
2. Blocks of each group are pushed once, in order, when they are final, from where the group's table has them then. Pushes
   are copies, so a preempted leg goes on from where it was; a rank that had no room for one by then lets go of its part.
   A leg that lacks a block in the step that makes it final is withdrawn: nothing is sent in its place.
3. A leg that ends before all its blocks were pushed is withdrawn, and every rank lets go. So is one whose blocks turn out
   not to be what they were taken for, in whatever state (``engine.scheduler.multi_connector``).
   One that was pushed whole holds its blocks after its end until every rank has copied them out, or let go, whatever
   becomes of its transfer: else a rank that hears late that nothing is to be sent would send another request's KV in its
   name. Of one that was not, decode lacks a block, and takes nothing.
4. A transfer that decode does not want is pushed no further; its leg just finishes.
5. Decode is told of work for a transfer that is not yet pushed whole: once for each growth, and only of steps that have
   ended. A step that hangs is the last one that anything is told in.
6. Blocks that ranks have not copied out keep new legs from beginning, where a decode instance has more than its share
   (``kv.fair_share``) of a quarter of the cache. One that takes nothing stops its own legs, and nobody else's.

    register ──▶ QUEUED ──allocated──▶ OPEN ──step…──▶ PUSHED ──every rank ended──▶ (forgotten)
                    └─ end ─▶ (forgotten)  └─ end, drop, peer_lost ─▶ CLOSING ─┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.contract.legs import Peer
from xpyd_sidecar.kv.fair_share import is_fair
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.messages import WORK_MAX, WorkDone
from xpyd_sidecar.kv.reach import CacheGroup


class PrefillLegState(StrEnum):
    """Where one prefill leg stands."""

    QUEUED = "queued"
    OPEN = "open"
    PUSHED = "pushed"
    CLOSING = "closing"


class Push(NamedTuple):
    """Have the workers copy out and send final blocks of a group: ``first`` is the index of ``ids[0]`` in the prompt."""

    key: Key
    first: int
    ids: tuple[int, ...]
    holder: InstanceName = InstanceName("")
    """The decode instance that they are for."""
    group: int = 0


class Release(NamedTuple):
    """Have the workers let go of a transfer."""

    key: Key
    outcome: Outcome
    reason: str
    with_step: bool = False
    """Before anything that the next step lets leave: it must not come later."""


class SendAnnounce(NamedTuple):
    """Announce a transfer to its decode engine."""

    peer: Peer
    key: Key
    identity: bytes
    prompt: int
    tokens: int
    """That are handed over."""
    cached: int
    weights: str = ""


class SendWork(NamedTuple):
    """Tell a decode engine what has been done for its transfers since it was told last."""

    peer: Peer
    work: tuple[WorkDone, ...]


class SendGone(NamedTuple):
    """Tell decode that a transfer will not come."""

    peer: Peer
    key: Key
    outcome: Outcome
    reason: str
    retry: bool


class PrefillLegEnded(NamedTuple):
    """A transfer is over on this side."""

    peer: Peer
    key: Key
    outcome: Outcome
    reason: str
    tokens: int
    bytes: int


Instruction = Push | Release | SendAnnounce | SendGone | SendWork | PrefillLegEnded


class Effort(NamedTuple):
    """Work for a transfer: tokens computed, and steps with work for others in which it waited."""

    tokens: int
    steps: int


NO_EFFORT: Final = Effort(0, 0)


@dataclass
class PrefillLeg:
    """One request on prefill, and what of it is announced and copied."""

    request: str
    key: Key
    peer: Peer
    identity: bytes
    prompt: int
    tokens: int
    """That are handed over."""
    sent: list[int]
    """By group: up to which index blocks are pushed."""
    state: PrefillLegState = PrefillLegState.QUEUED
    pushed: int = 0
    """Blocks, of all groups."""
    whole: bool = False
    """All of them are pushed."""
    open_ranks: set[int] = field(default_factory=set)
    copied: dict[int, int] = field(default_factory=dict)
    """By rank: how many blocks it has copied out."""
    failed: tuple[Outcome, str] | None = None
    bytes: int = 0
    cached: int = 0
    """Tokens of the prompt that need not be computed."""
    weights: str = ""
    """What the engine's weights were called when it was announced."""
    done: Effort = NO_EFFORT
    """In steps that have ended."""
    under_way: Effort = NO_EFFORT
    """In the step that runs."""
    told: Effort = NO_EFFORT


class Offers:
    """The machine. Every method returns instructions in the order in which they must be carried out."""

    def __init__(self, *, groups: Sequence[CacheGroup], ranks: int, blocks: int = 0) -> None:
        """``blocks`` of the cache; 0: unknown, and legs begin whatever is not copied."""
        self._groups = tuple(groups)
        self._most_uncopied = blocks // 4
        self._ranks = ranks
        self._weights = ""
        self._legs: dict[str, PrefillLeg] = {}
        self._open: dict[Key, PrefillLeg] = {}
        self._seen: Recent[Key, None] = Recent()
        self._waits: Counter[str] | None = None
        """By decode instance: blocks that are not copied out. None: to be counted again, once for all legs that ask."""
        self._holding: dict[Key, str] = {}
        """Requests that have ended, whose blocks are not copied out yet."""
        self._copied: set[str] = set()
        """Of those, requests whose blocks are."""

    @property
    def open(self) -> int:
        """Transfers whose KV this engine still holds or sends."""
        return len(self._open)

    def peers(self) -> set[Peer]:
        """Decode engines with open transfers."""
        return {leg.peer for leg in self._open.values()}

    def weights_are(self, version: str) -> list[Instruction]:
        """What the weights of this engine are called now: prompts are withdrawn that are computed by two of them."""
        if version == self._weights:
            return []
        before, self._weights = self._weights, version
        reason = f"weights changed from version {before[:80]!r} to {version[:80]!r} while the prompt was computed"
        return [one for leg in list(self._open.values()) if leg.state is PrefillLegState.OPEN
                for one in self._withdraw(leg, Outcome.STALE, reason)]

    def register(self, request: str, key: Key, peer: Peer, identity: bytes, tokens: tuple[int, int]) -> bool:
        """A prefill leg has arrived; ``tokens``: of its prompt, and of those the ones that are handed over.

        False: it is none. A repeated key is an ordinary request: vLLM repeats aborted ones.
        """
        if key in self._seen or request in self._legs:
            return False
        self._seen.put(key, None)
        sent = [one.reach.wanted_blocks(tokens[1]).start for one in self._groups]
        self._legs[request] = PrefillLeg(request, key, peer, identity, *tokens, sent)
        return True

    def on_allocated(self, request: str, cached: int) -> list[Instruction]:
        """The scheduler has allocated blocks for a request, perhaps again; ``cached``: tokens that need not be computed."""
        leg = self._legs.get(request)
        if leg is None or leg.state is not PrefillLegState.QUEUED:
            return []
        leg.state, leg.cached, leg.weights = PrefillLegState.OPEN, cached, self._weights
        leg.open_ranks = set(range(self._ranks))
        self._open[leg.key] = leg
        return [_announcement(leg)]

    def announce_again(self, peer: Peer) -> list[Instruction]:
        """Say again what a decode engine may have lost; it answers what it does not want with DROP, as at first."""
        return [_announcement(leg) for leg in self._open.values()
                if leg.peer == peer and leg.state is not PrefillLegState.CLOSING]

    def tracks(self, request: str) -> Key | None:
        """The transfer of this request, if ``step`` wants to hear of it."""
        leg = self._legs.get(request)
        return leg.key if leg is not None and leg.state is PrefillLegState.OPEN else None

    def step(self, request: str, tables: Sequence[Sequence[int]], *, computed: int) -> list[Instruction]:
        """The request runs in this step: its blocks by group, and the tokens that are computed when it is over."""
        leg = self._legs.get(request)
        if leg is None or leg.state is not PrefillLegState.OPEN:
            return []
        pushes: list[Instruction] = []
        for at, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            indices = range(leg.sent[at], group.reach.final_blocks(computed, leg.tokens))
            if not indices:
                continue
            ids = group.ids(table, indices, leg.tokens)
            if ids is None:
                return self._lacks(leg, at, indices)
            pushes.append(Push(leg.key, indices.start, ids, leg.peer.instance, at))
            leg.sent[at] = indices.stop
            leg.pushed += len(ids)
        if pushes:
            self._waits = None
        if computed >= leg.tokens:
            leg.state, leg.whole = PrefillLegState.PUSHED, True
        return pushes

    def _lacks(self, leg: PrefillLeg, group: int, indices: range) -> list[Instruction]:
        reason = f"prefill has no block for one of {indices.start} to {indices[-1]} of group {group} when it is computed"
        gone = SendGone(leg.peer, leg.key, Outcome.PROTOCOL, reason, retry=False)
        return [gone, *self._close(leg, Outcome.PROTOCOL, reason)]

    def on_step(self, tokens: Mapping[str, int]) -> None:
        """A step begins, with so many tokens by request: what the one before it had under way is done."""
        busy = any(tokens.values())
        for leg in self._open.values():
            if leg.state is PrefillLegState.OPEN:
                leg.done = Effort(leg.done.tokens + leg.under_way.tokens, leg.done.steps + leg.under_way.steps)
                mine = tokens.get(leg.request, 0)
                leg.under_way = Effort(mine, int(busy and not mine))

    def take_progress(self) -> list[SendWork]:
        """What has been done since the last call, by decode engine."""
        by_peer: dict[Peer, list[WorkDone]] = {}
        for key, leg in self._open.items():
            if leg.state is PrefillLegState.OPEN and leg.done != leg.told:
                leg.told = leg.done
                by_peer.setdefault(leg.peer, []).append(WorkDone(*key, *leg.done))
        return [SendWork(peer, tuple(work[at:at + WORK_MAX]))
                for peer, work in by_peer.items() for at in range(0, len(work), WORK_MAX)]

    def end(self, request: str) -> list[Instruction]:
        """The request has ended, however and in whatever state."""
        leg = self._legs.pop(request, None)
        if leg is not None and leg.whole and leg.key in self._open and self._uncopied(leg):
            self._holding[leg.key] = request
        if leg is None or leg.state is not PrefillLegState.OPEN:
            return []
        reason = "prefill's leg ended before its prompt was computed"
        gone = SendGone(leg.peer, leg.key, Outcome.ABORTED, reason, retry=True)
        return [gone, *self._close(leg, Outcome.ABORTED, reason)]

    def may_begin(self, request: str) -> bool:
        """Whether a leg may have blocks now; if not, it waits for decode to take what is there."""
        leg = self._legs.get(request)
        if not self._most_uncopied or leg is None or leg.state is not PrefillLegState.QUEUED:
            return True
        if self._waits is None:
            self._waits = Counter()
            for one in self._open.values():
                if one.state is not PrefillLegState.CLOSING:
                    self._waits[one.peer.instance] += self._uncopied(one)
        mine = self._waits[leg.peer.instance]
        return not mine or is_fair(mine, self._most_uncopied - self._waits.total())

    def holds(self, request: str) -> bool:
        """Whether the blocks of a request that has ended are still needed; ``take_copied`` says when they are not."""
        return request in self._holding.values()

    def uncopied_transfer(self, request: str) -> Key | None:
        """The transfer of a request that has blocks which not all ranks have copied out."""
        leg = self._legs.get(request)
        return leg.key if leg is not None and leg.key in self._open and self._uncopied(leg) else None

    def on_copied(self, rank: int, key: Key, blocks: int) -> None:
        """A rank has copied out so many blocks more of a transfer."""
        leg = self._open.get(key)
        if leg is not None:
            leg.copied[rank] = leg.copied.get(rank, 0) + blocks
            self._waits = None
            self._let_go(leg)

    def take_copied(self) -> set[str]:
        """Requests that have ended and whose blocks are not needed any more, since the last call."""
        out, self._copied = self._copied, set()
        return out

    def _uncopied(self, leg: PrefillLeg) -> int:
        """Blocks that a rank has not copied out."""
        return max((leg.pushed - leg.copied.get(rank, 0) for rank in leg.open_ranks), default=0)

    def _let_go(self, leg: PrefillLeg) -> None:
        if leg.key in self._holding and not self._uncopied(leg):
            self._copied.add(self._holding.pop(leg.key))

    def on_spoiled(self, key: Key, reason: str) -> list[Instruction]:
        """What was pushed of a transfer is not the KV of its prompt. Another try comes only if its request has failed."""
        leg = self._open.get(key)
        if leg is None or leg.state is PrefillLegState.CLOSING:
            return []
        return self._withdraw(leg, Outcome.PROTOCOL if leg.request in self._legs else Outcome.ABORTED, reason)

    def reset(self, reason: str) -> list[Instruction]:
        """Nothing that was computed so far may be handed over any more."""
        return [one for leg in list(self._open.values()) if leg.pushed and leg.state is not PrefillLegState.CLOSING
                for one in self._withdraw(leg, Outcome.STALE, reason)]

    def _withdraw(self, leg: PrefillLeg, outcome: Outcome, reason: str) -> list[Instruction]:
        self._close(leg, outcome, reason)
        return [SendGone(leg.peer, leg.key, outcome, reason, retry=outcome is Outcome.ABORTED),
                Release(leg.key, outcome, reason, with_step=True)]

    def drop(self, key: Key, outcome: Outcome, reason: str) -> list[Instruction]:
        """Decode does not want this transfer."""
        leg = self._open.get(key)
        return self._close(leg, outcome, reason) if leg else []

    def peer_lost(self, peer: Peer, outcome: Outcome, reason: str) -> list[Instruction]:
        """A decode engine refuses this engine, or is gone."""
        return [one for leg in list(self._open.values()) if leg.peer == peer for one in self._close(leg, outcome, reason)]

    def rank_ended(self, rank: int, key: Key, outcome: Outcome, reason: str, size: int) -> list[Instruction]:
        """A rank has let go of a transfer; ``size``: payload bytes that its peer confirmed."""
        leg = self._open.get(key)
        if leg is None or rank not in leg.open_ranks:
            return []
        leg.open_ranks.discard(rank)
        self._waits = None
        leg.bytes += size
        self._let_go(leg)
        out: list[Instruction] = []
        if outcome is not Outcome.OK:
            gone = leg.failed is None and outcome in {Outcome.OVERFLOW, Outcome.DEADLINE}
            if gone:
                # The copies are gone before decode asked for them: no other try will follow, so it should not wait.
                out.append(SendGone(leg.peer, key, outcome, reason, retry=False))
            leg.failed = leg.failed or (outcome, reason)
            # Decode forgets what is gone, so it would not ask the other ranks either.
            if leg.state is PrefillLegState.OPEN or gone:
                out += self._close(leg, outcome, reason)
        if not leg.open_ranks:
            del self._open[key]
            if leg.state is PrefillLegState.OPEN:
                leg.state = PrefillLegState.CLOSING
            end, why = leg.failed or (Outcome.OK, "")
            out.append(PrefillLegEnded(leg.peer, key, end, why, leg.tokens, leg.bytes))
        return out

    def _close(self, leg: PrefillLeg, outcome: Outcome, reason: str) -> list[Instruction]:
        if leg.state is PrefillLegState.CLOSING:
            return []
        leg.state = PrefillLegState.CLOSING
        leg.failed = leg.failed or (outcome, reason)
        self._waits = None
        return [Release(leg.key, outcome, reason)]


def _announcement(leg: PrefillLeg) -> SendAnnounce:
    return SendAnnounce(leg.peer, leg.key, leg.identity, leg.prompt, leg.tokens, leg.cached, leg.weights)
