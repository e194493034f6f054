"""A decode rank and prefill ranks whose steps happen in an order that a seed draws; what must be true in every order.

    Orders(seed, patch).explore()      raises AssertionError with the seed and the order

One prompt is one ``Prompt``: its tries, of which each is made by a prefill rank, piece by piece, and what its request at
decode does: wait, be pushed ahead, begin a load with a prefix of its own, take a newer try, be abandoned.

What must be true
1. No side calls the other's words wrong, and no callback fails.
2. A load ends, and ends well unless something was done to it (``Prompt.excuses``). Its blocks are the prompt's, and
   nothing writes into them after it was reported.
3. Nobody waits for a deadline: all ends within ``SETTLE_S`` of a time in which everything is delivered.
4. In the end nothing is held: copies, offers, chunks, places of the buffer, gates, what a connection owes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from held_ranks import HeldDecode, HeldPrefill, drawn_ways
from held_session import Held, Wire
from kv_ranks import BLOCK, P_LIFE, REGIONS, TCP, content, key, whole

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import From, Order

SETTLE_S = 4.0
TIMEOUT_S = 1.0
STEP_S = 0.1
CLAIM_S = 100.0
LETTERS = "abcdef0123456789"


@cache
def _kind(name: str) -> str:
    """The name of something that may happen, without its numbers: the prompts differ."""
    return "".join(one for one in name.split("(", maxsplit=1)[0] if not one.isdigit())


@dataclass
class Try:
    """What a prefill rank makes for a key."""

    key: Key
    p: int
    left: list[tuple[int, int, int]]
    """Pieces that are not copied: region, first, count."""
    expected: bool = False
    released: bool = False


@dataclass
class Prompt:
    """One request."""

    letter: str
    blocks: int
    base: int
    """The first of its blocks' numbers at decode."""
    tries: list[Try] = field(default_factory=list)
    first: int = -1
    """Where its load begins; below 0: it has not begun."""
    asked: int = -1
    """The newest try that was ordered."""
    finished: bool = False
    dropped: bool = False
    """Its request ended before its load began."""
    settled: bool = False
    excuses: set[str] = field(default_factory=set)
    late: bool = False
    """Prefill begins to compute it when all others are done."""

    @property
    def request(self) -> str:
        return f"r{self.letter}"


class Orders:
    """One order of events."""

    def __init__(self, seed: int, folder: Path, patch: pytest.MonkeyPatch, *, steps: int = 300) -> None:
        self.seed, self.steps = seed, steps
        self.random = rnd = random.Random(seed)
        self.log: list[str] = []
        self.held = Held(patch)
        ways = drawn_ways(rnd, folder, patch)
        self.beside = ways is not TCP
        self.faults = rnd.random() < 0.5
        """Whether connections break, prefill gives up, and decode abandons or does not claim what has come."""
        self.p: list[HeldPrefill] = []
        for number in range(rnd.choice((1, 1, 2))):
            self.p.append(self.held.prefill(f"p{number}", keep_bytes=BLOCK * 1000, keep_s=1e6, send_s=1e6,
                                            timeout_s=TIMEOUT_S, ways=ways))
            self.p[-1].store.bound = BLOCK * rnd.choice((6, 6, 10, 24))
        pages = rnd.choice((0, 1, 4, 16, 16))
        self.direct = rnd.random() < 0.4
        self.d: HeldDecode = self.held.decode(
            chunks=rnd.choice((1, 2, 2, 8)), direct=self.direct, buffer_bytes=4096 * pages,
            pool_bytes=4096 * rnd.choice((0, 0, 1, 4)), claim_s=CLAIM_S, window=rnd.choice((0, 0, 1, 2)), load_s=1e6,
            grace_s=0.5, timeout_s=TIMEOUT_S, ways=ways)
        if self.faults and rnd.random() < 0.3:
            self.d.receiver.ahead._buffer._most = 2
        self.may_be_alone = rnd.random() < 0.3
        self.prompts: list[Prompt] = []
        for number in range(rnd.choice((1, 2, 2, 3, 4))):
            blocks = rnd.choice((1, 2, 3, 5, 6))
            one = Prompt(LETTERS[number], blocks, 16 * number)
            one.late = rnd.random() < 0.15
            self._begin(one)
            self.prompts.append(one)
        self.idle = rnd.random() < 0.3
        """Whether prefill computes nothing for a while, when decode has already asked for it."""
        self.patient = rnd.choice((0, steps // 2, steps // 2))
        """For how many steps decode has hardly any blocks for loads."""
        self.weights: dict[str, float] = {}
        """By kind of what may happen: orders differ most where each has its own."""

    def _begin(self, one: Prompt) -> None:
        """A prefill rank begins to compute it, once more."""
        rnd = self.random
        left, at = [], 0
        while at < one.blocks:
            count = rnd.randrange(1, one.blocks - at + 1)
            left += [(region, at, count) for region in range(REGIONS)]
            at += count
        one.tries.append(Try(key(one.letter, len(one.tries) + 1), rnd.randrange(len(self.p)), left))

    # --- what may happen ---

    def choices(self) -> list[tuple[float, str, Callable[[], object]]]:
        """What may happen now: a weight, a name, and how."""
        out: list[tuple[float, str, Callable[[], object]]] = []
        d, now = self.d, self.held.now
        for name, loop in self.held.loops.items():
            if loop.posted:
                out.append((3, f"{name} post", loop.run_post))
            for at, sock in enumerate(loop.ready()):
                alone = self.may_be_alone and self.random.random() < 0.5
                out.append((3, f"{name} socket {at}{' alone' * alone}",
                            lambda loop=loop, sock=sock, alone=alone: loop.run_socket(sock, alone=alone)))
            out.append((0.15, f"{name} tick", lambda loop=loop: loop.tick(now)))
        if d.receiver.inbox:
            out.append((3, "d engine", lambda: d.take_one(now)))
        out.append((0.15, "d engine tick", lambda: d.carry_out(d.machine.tick(now))))
        if d.due:
            out.append((1, "d give", d.give))
        for number, p in enumerate(self.p):
            if p.marks_due:
                out.append((2, f"p{number} mark", p.mark))
        for wire in self.held.wires:
            for name, way in (("to p", wire.to_p), ("to d", wire.to_d)):
                if way.can():
                    out.append((3, f"wire {wire.number} {name}", lambda way=way: self._move(way)))
                elif way.lost and not way.over:
                    out.append((0.5, f"wire {wire.number} {name} ends", way.end))
            if self.faults and not wire.to_p.over and not wire.to_d.over:
                out.append((0.05, f"cut {wire.number}", lambda wire=wire: self._cut(wire)))
        for one in self.prompts:
            out += self._of(one)
        return out

    def _move(self, way: object) -> str:
        most = self.random.choice((way.frame(), way.frame(), 1 << 20, self.random.randrange(1, 2 * BLOCK)))
        return f"{way.move(most)} bytes"

    def _of(self, one: Prompt) -> list[tuple[float, str, Callable[[], object]]]:
        out: list[tuple[float, str, Callable[[], object]]] = []
        last = one.tries[-1]
        for number, each in enumerate(one.tries):
            name = f"{one.letter}.{number + 1}"
            if each.left and not one.late and not each.released and self.p[each.p].room(each.left[0][2] * BLOCK):
                out.append((1, f"{name} copy {each.left[0]}", lambda each=each: self._copy(one, each)))
            if self.faults and not each.released and one.first >= 0:
                out.append((0.02, f"{name} release", lambda each=each: self._release(one, each, "released")))
        if one.first < 0 and not one.dropped:
            if not last.expected:
                out.append((4, f"{one.letter} expect", lambda: self._expect(one, last)))
            out.append((0.02 if len(self.log) < self.patient else 0.3, f"{one.letter} load",
                        lambda: self._load(one, self.random.randrange(one.blocks))))
            if self.faults:
                out.append((0.02, f"{one.letter} drop", lambda: self._drop(one)))
                if last.expected:
                    out.append((0.02, f"{one.letter} unclaimed", lambda: self._expire(one, last)))
        elif not one.finished and not one.dropped:
            if one.asked < len(one.tries) - 1:
                out.append((1, f"{one.letter} newer", lambda: self._load(one, one.first)))
            if self.faults:
                out.append((0.02, f"{one.letter} abandon", lambda: self._abandon(one)))
        if not one.finished and not one.dropped and len(one.tries) < 3 and (self.faults or self.random.random() < 0.3):
            out.append((0.03, f"{one.letter} another try", lambda: self._begin(one)))
        return out

    def _copy(self, one: Prompt, each: Try) -> None:
        region, first, count = each.left.pop(0)
        self.p[each.p].copy(each.key, region, first, [self._content(one, region, first + n) for n in range(count)])

    def _content(self, one: Prompt, region: int, block: int) -> bytes:
        return content(region, one.base + block)

    def _release(self, one: Prompt, each: Try, why: str) -> None:
        """Prefill's scheduler lets go of a try."""
        each.released = True
        if why:
            one.excuses.add(why)
        self.p[each.p].sender.release(each.key, Outcome.ABORTED, why or "unused")

    def _expect(self, one: Prompt, each: Try) -> None:
        each.expected = True
        for old in one.tries[:-1]:
            if not old.released:
                self._release(one, old, "")
        self.d.expect(each.key, self.p[each.p], blocks=one.blocks, identity=one.letter.encode() * 32)

    def _load(self, one: Prompt, first: int) -> None:
        one.first, one.asked = first, len(one.tries) - 1
        each = one.tries[-1]
        ids = tuple(range(one.base + first, one.base + one.blocks))
        order = Order(one.request, each.key, (TableSpan(first, ids),),
                      (From(self.p[each.p].address, P_LIFE, whole(REGIONS, BLOCK)),), one.letter.encode() * 32)
        self.d.carry_out(self.d.machine.load(order, self.held.now))

    def _drop(self, one: Prompt) -> None:
        """Its request ends before it has blocks: control says so to prefill."""
        one.dropped = True
        for each in one.tries:
            if not each.released:
                self._release(one, each, "dropped")

    def _expire(self, one: Prompt, each: Try) -> None:
        """What has come for it was not claimed in time."""
        entry = self.d.receiver.ahead._buffer._entries.get(each.key)
        if entry is not None:
            entry.lease = Lease(self.held.now)
            one.excuses.add("unclaimed")

    def _abandon(self, one: Prompt) -> None:
        one.excuses.add("abandoned")
        self.d.abandon(one.request)

    def _cut(self, wire: Wire) -> None:
        for one in self.prompts:
            one.excuses.add("cut")
        wire.cut(at_once=self.beside)

    @property
    def buffered(self) -> bool:
        """Whether anything has come before it was asked for."""
        return bool(self.d.receiver.ahead.counted[metrics.BUFFERED_BYTES])

    # --- what must be true ---

    def explore(self) -> None:
        """Raises AssertionError."""
        with self.held:
            try:
                if self.random.random() < 0.7:  # what begins a session has been seen often
                    one = self.random.choice(self.prompts)
                    self._expect(one, one.tries[-1])
                    self.held.flow()
                for _ in range(self.steps):
                    self.held.now += self.random.random() * 0.002
                    choices = self.choices()
                    _, name, how = self.random.choices(choices, [self.weight(*one) for one in choices])[0]
                    self.log.append(name)
                    said = how()
                    if isinstance(said, str):
                        self.log[-1] += f": {said}"
                    self.look()
                self.settle()
                self.over()
            except BaseException as error:
                order = "\n".join(self.log)
                raise AssertionError(f"seed {self.seed}: {error!r}\n{order}") from error

    def weight(self, weight: float, name: str, _: object) -> float:
        """How likely something is, in this order."""
        kind = _kind(name)
        if kind not in self.weights:
            self.weights[kind] = self.random.choice((0.1, 0.5, 1, 1, 3, 10))
        return weight * self.weights[kind]

    def look(self) -> None:
        """What must be true at any time."""
        assert not self.held.complaints.said, self.held.complaints.said
        for whose, error in self.held.closed:
            assert isinstance(error, PeerGone), f"{whose} ended a connection: {error}"
            assert "silent" not in str(error), f"{whose} ended a connection: {error}"
        if self.d.receiver.ahead._buffer._most == 2:
            for one in self.prompts:
                one.excuses.add("evicted")
        for done in self.d.finished:
            one = next(one for one in self.prompts if one.request == done.request)
            if not one.finished:
                one.finished = True
                self.log.append(f"{one.letter} finished: {done.outcome} {done.reason}")
                assert done.outcome is Outcome.OK or one.excuses, f"{one.letter} failed: {done.outcome} {done.reason}"
                if done.outcome is not Outcome.OK:
                    for each in one.tries:  # control says so to prefill
                        if not each.released:
                            self._release(one, each, "failed")
                else:
                    for each in one.tries:
                        if each.key != done.key and not each.released:
                            self._release(one, each, "")
            if not one.settled and self.d.receiver.settled(one.request):
                one.settled = True
                self._whole(one, done.outcome)

    def _whole(self, one: Prompt, outcome: Outcome) -> None:
        if outcome is not Outcome.OK:
            return
        for region in range(REGIONS):
            for n in range(one.first, one.blocks):
                got = self.d.cache.get((region, one.base + n))
                assert got == self._content(one, region, n), f"{one.letter}: block {n} of array {region} is wrong"

    def settle(self) -> None:
        """No more faults; all is delivered, and what was begun is ended."""
        self.faults = False
        self.log.append("--- settle")
        end = self.held.now + SETTLE_S
        while self.held.now < end:
            if self.held.now > end - SETTLE_S / 2:
                self.idle = False
                for p in self.p:
                    p.store.bound = 1000 * BLOCK  # tries that another has taken over wait for the end of the load
            for one in self.prompts:
                if one.first >= 0 and not one.finished and one.tries[one.asked].released:
                    self._abandon(one)  # the router has aborted prefill: it sends another try, or aborts decode, too
                if one.first < 0 and not one.dropped and self.random.random() < 0.03:
                    self.log.append(f"{one.letter} load")
                    self._load(one, self.random.randrange(one.blocks))
            self.rest(1)
        for one in self.prompts:
            if one.first < 0 and not one.dropped:
                self._load(one, 0)
        self.rest(10)

    def rest(self, steps: int) -> None:
        """Time passes, and all that is due happens at once."""
        for _ in range(steps):
            self.held.now += STEP_S
            self.held.flow(self.round)
            for loop in self.held.loops.values():
                loop.tick(self.held.now)
            self.d.carry_out(self.d.machine.tick(self.held.now))
            self.look()

    def round(self) -> bool:
        """Everything that is due once; whether anything was."""
        did = False
        for one in self.prompts:
            for each in () if self.idle and one.late else one.tries:
                while each.left and not each.released and self.p[each.p].room(each.left[0][2] * BLOCK):
                    self._copy(one, each)
                    did = True
            if one.first >= 0 and not one.finished and one.asked < len(one.tries) - 1:
                self._load(one, one.first)
                did = True
        did |= self.held.round()
        self.look()
        return did

    def over(self) -> None:
        """All requests have ended: nothing is left."""
        for one in self.prompts:
            assert one.finished or one.dropped, f"{one.letter} never ended"
            assert one.settled or one.dropped, f"{one.letter}: its gates are not closed"
        for one in self.prompts:
            for each in one.tries:
                if not each.released:
                    each.released = True
                    self.p[each.p].sender.release(each.key, Outcome.UNUSED, "the end")
        self.rest(5)
        cut = any("cut" in one.excuses for one in self.prompts)
        if cut:  # what is whole survives its prefill, until nobody has claimed it
            entries = self.d.receiver.ahead._buffer._entries.values()
            assert all(one.filled == one.slots for one in entries), "decode keeps what can never be whole"
            self.held.now += CLAIM_S
            self.rest(2)
        for number, p in enumerate(self.p):
            assert not any(p.left().values()), f"p{number} has left {p.left()}"
        assert not any(self.d.left().values()), f"decode has left {self.d.left()}"
        for one in self.prompts:
            done = next((done for done in self.d.finished if done.request == one.request), None)
            if done is not None:
                self._whole(one, done.outcome)
