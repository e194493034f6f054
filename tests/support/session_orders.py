"""Decode ranks and prefill ranks whose steps happen in an order that a seed draws; what must be true in every order.

    Orders(seed, patch).explore()      raises AssertionError with the seed and the order

One prompt is one ``Prompt``: its tries, of which each is made by a prefill rank, piece by piece, and what its request at
decode does: wait, be pushed ahead, begin a load with a prefix of its own, take a newer try, be abandoned. Where decode has
two ranks, each takes half of every block from the same prefill rank. Schedulers are what this file says: their words come
to decode's ranks (``words``) and to prefill (``control``) in order, and late.

What must be true
1. No side calls the other's words wrong, and no callback fails.
2. A load ends, and ends well unless something was done to it (``Prompt.excuses``). Its blocks are the prompt's, and
   nothing writes into them after it was reported.
3. Nobody waits for a deadline: all ends within ``SETTLE_S`` of a time in which everything is delivered.
4. In the end nothing is held: copies, offers, chunks, places of the buffer, gates, what a connection owes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from held_ranks import HeldDecode, HeldPrefill, drawn_ways
from held_session import Held, Wire
from kv_ranks import BLOCK, REGIONS, TCP, content
from order_prompts import Prompt, Try

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.mapping import ArrayKind
from xpyd_sidecar.kv.receiving import Finished

SETTLE_S = 4.0
TIMEOUT_S = 1.0
STEP_S = 0.1
CLAIM_S = 100.0
NEVER = {Outcome.CHECKSUM, Outcome.INCOMPATIBLE, Outcome.PROTOCOL, Outcome.AUTH}
"""What is a mistake of one side, whatever is done to a load."""
LETTERS = "abcdef0123456789"


@cache
def _kind(name: str) -> str:
    """The name of something that may happen, without its numbers: the prompts differ."""
    return "".join(one for one in name.split("(", maxsplit=1)[0] if not one.isdigit())


def _hear(told: deque[Callable[[], object]]) -> None:
    told.popleft()()


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
        self.ranks = rnd.choice((1, 1, 1, 2))
        """Of decode."""
        size = BLOCK // self.ranks
        kinds = [ArrayKind("uint8", self.ranks, (size,), size, self.ranks)] * REGIONS
        self.p: list[HeldPrefill] = []
        for number in range(rnd.choice((1, 1, 2))):
            self.p.append(self.held.prefill(f"p{number}", keep_bytes=BLOCK * 1000, keep_s=1e6, send_s=1e6,
                                            timeout_s=TIMEOUT_S, ways=ways, kinds=kinds))
            self.p[-1].store.bound = BLOCK * rnd.choice((6, 6, 10, 24))
        pages = rnd.choice((0, 1, 4, 16, 16))
        self.direct = rnd.random() < 0.4
        given = {"chunks": rnd.choice((1, 2, 2, 8)), "direct": self.direct, "buffer_bytes": 4096 * pages,
                 "pool_bytes": 4096 * rnd.choice((0, 0, 1, 4)), "claim_s": CLAIM_S, "window": rnd.choice((0, 0, 1, 2)),
                 "load_s": 1e6, "grace_s": 0.5, "timeout_s": TIMEOUT_S, "ways": ways, "block": size}
        self.d: list[HeldDecode] = [self.held.decode(f"d{rank}", **given) for rank in range(self.ranks)]
        self.words: list[deque[Callable[[], object]]] = [deque() for _ in self.d]
        """By decode rank: what its engine is told, with steps to come."""
        self.control: deque[Callable[[], object]] = deque()
        """What prefill's scheduler is told."""
        self.few = self.faults and rnd.random() < 0.3
        """Whether so few are expected at once that they evict each other."""
        if self.few:
            for d in self.d:
                d.receiver.ahead._buffer._most = 2
        self.may_be_alone = rnd.random() < 0.3
        self.prompts: list[Prompt] = []
        for number in range(rnd.choice((1, 2, 2, 3, 4))):
            one = Prompt(LETTERS[number], rnd.choice((1, 2, 3, 5, 6)), 16 * number, self.ranks)
            one.late = rnd.random() < 0.15
            one.begin(rnd, len(self.p))
            self.prompts.append(one)
        self.idle = rnd.random() < 0.3
        """Whether prefill computes nothing for a while, when decode has already asked for it."""
        self.patient = rnd.choice((0, steps // 2, steps // 2))
        """For how many steps decode has hardly any blocks for loads."""
        self.weights: dict[str, float] = {}
        """By kind of what may happen: orders differ most where each has its own."""

    # --- what may happen ---

    def choices(self) -> list[tuple[float, str, Callable[[], object]]]:
        """What may happen now: a weight, a name, and how."""
        out: list[tuple[float, str, Callable[[], object]]] = []
        now = self.held.now
        for name, loop in self.held.loops.items():
            if loop.posted:
                out.append((3, f"{name} post", loop.run_post))
            for at, sock in enumerate(loop.ready()):
                alone = self.may_be_alone and self.random.random() < 0.5
                out.append((3, f"{name} socket {at}{' alone' * alone}",
                            lambda loop=loop, sock=sock, alone=alone: loop.run_socket(sock, alone=alone)))
            out.append((0.15, f"{name} tick", lambda loop=loop: loop.tick(now)))
        for rank, (d, words) in enumerate(zip(self.d, self.words, strict=True)):
            if words:
                out.append((3, f"d{rank} step", partial(_hear, words)))
            if d.receiver.inbox:
                out.append((3, f"d{rank} engine", lambda d=d: d.take_one(now)))
            out.append((0.15, f"d{rank} engine tick", lambda d=d: d.carry_out(d.machine.tick(now))))
            if d.due:
                out.append((1, f"d{rank} give", d.give))
        if self.control:
            out.append((1, "control", partial(_hear, self.control)))
        if self.faults:
            out.append((0.01, "reset", self._reset))
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
                weight = 2 if any(one.half for one in self.prompts) else 0.05
                out.append((weight, f"cut {wire.number}", lambda wire=wire: self._cut(wire)))
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
                how = self.random.choice((Outcome.ABORTED, Outcome.ABORTED, Outcome.STALE))
                out.append((0.02, f"{name} release {how}", partial(self._release, one, each, "released", how)))
        if one.waits:
            if not last.expected:
                out.append((4, f"{one.letter} expect", lambda: self._expect(one, last)))
            out.append((0.02 if len(self.log) < self.patient else 0.3, f"{one.letter} load",
                        lambda: self._load(one, self.random.randrange(one.blocks))))
            if self.faults:
                out.append((0.02, f"{one.letter} drop", lambda: self._drop(one)))
                if last.expected:
                    out.append((0.02, f"{one.letter} unclaimed", lambda: self._expire(one, last)))
        elif one.loading:
            if one.asked < len(one.tries) - 1:
                out.append((1, f"{one.letter} newer", lambda: self._load(one, one.first)))
            if self.faults:
                out.append((0.02, f"{one.letter} abandon", lambda: self._abandon(one)))
        if not one.finished and not one.dropped and len(one.tries) < 3 and (self.faults or self.random.random() < 0.3):
            out.append((3 if one.half else 0.03, f"{one.letter} another try", lambda: one.begin(self.random, len(self.p))))
        return out

    def _copy(self, one: Prompt, each: Try) -> None:
        region, first, count = each.left.pop(0)
        self.p[each.p].copy(each.key, region, first, [self._content(one, region, first + n) for n in range(count)])

    def _content(self, one: Prompt, region: int, block: int) -> bytes:
        return content(region, one.base + block)

    def _release(self, one: Prompt, each: Try, why: str, how: Outcome = Outcome.ABORTED) -> None:
        """Prefill's scheduler lets go of a try."""
        if each.released:
            return
        each.released = True
        if why:
            one.excuses.add(why)
        self.p[each.p].sender.release(each.key, how, why or "unused")

    def _let_go(self, one: Prompt, why: str, but: Key | None = None) -> None:
        """Decode's scheduler wants no try any more; prefill's hears of it."""
        for each in one.tries:
            if each.key != but:
                self.control.append(partial(self._release, one, each, why))

    def _expect(self, one: Prompt, each: Try) -> None:
        each.expected = True
        for old in one.tries[:-1]:
            self._release(one, old, "")
        if self.ranks == 1:  # else its blocks are cut, and nothing is pushed ahead
            self.d[0].expect(each.key, self.p[each.p], blocks=one.blocks, identity=one.letter.encode() * 32)

    def _load(self, one: Prompt, first: int) -> None:
        """It has blocks, or takes a newer try: each rank is told with its next step."""
        one.first, one.asked = first, len(one.tries) - 1
        each = one.tries[-1]
        for rank, (d, words) in enumerate(zip(self.d, self.words, strict=True)):
            order = one.order(rank, self.p[each.p].address)
            words.append(lambda d=d, order=order: d.carry_out(d.machine.load(order, self.held.now)))

    def _drop(self, one: Prompt) -> None:
        """Its request ends before it has blocks: control says so to prefill, and each rank that expects it is told so."""
        one.dropped = True
        self._let_go(one, "dropped")
        self.words[0].append(partial(self.d[0].receiver.ahead.unwanted, one.tries[-1].key))

    def _reset(self) -> None:
        """Decode's caches are reset: who waits computes its prompt itself, and nothing that has come ahead is wanted."""
        for one in self.prompts:
            if one.waits:
                self._drop(one)
        for d, words in zip(self.d, self.words, strict=True):
            words.append(d.receiver.ahead.reset)

    def _expire(self, one: Prompt, each: Try) -> None:
        """What has come for it was not claimed in time."""
        entry = self.d[0].receiver.ahead._buffer._entries.get(each.key)
        if entry is not None:
            entry.lease = Lease(self.held.now)
            one.excuses.add("unclaimed")

    def _abandon(self, one: Prompt) -> None:
        one.excuses.add("abandoned")
        for d, words in zip(self.d, self.words, strict=True):
            words.append(lambda d=d: d.abandon(one.request))

    def _cut(self, wire: Wire) -> None:
        for one in self.prompts:
            one.excuses.add("cut")
        wire.cut(at_once=self.beside)

    @property
    def buffered(self) -> bool:
        """Whether anything has come before it was asked for."""
        return any(d.receiver.ahead.counted[metrics.BUFFERED_BYTES] for d in self.d)

    @property
    def outcomes(self) -> list[Outcome]:
        """How loads have ended, of all decode ranks."""
        return [done.outcome for d in self.d for done in d.finished]

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
        if self.few:
            for one in self.prompts:
                one.excuses.add("evicted")
        for rank, d in enumerate(self.d):
            for done in d.finished:
                one = next(one for one in self.prompts if one.request == done.request)
                if rank not in one.ended:
                    self._ended(one, rank, done)
                if rank not in one.settled and d.receiver.settled(one.request):
                    one.settled.add(rank)
                    self._whole(one, rank)

    def _ended(self, one: Prompt, rank: int, done: Finished) -> None:
        """A rank reports a load, and the scheduler draws its conclusions (``engine.scheduler_side``)."""
        one.ended[rank] = done.key, done.outcome
        self.log.append(f"{one.letter} finished by d{rank}: {done.outcome} {done.reason}")
        assert done.outcome is Outcome.OK or one.excuses, f"{one.letter} failed: {done.outcome} {done.reason}"
        assert done.outcome not in NEVER, f"{one.letter} failed: {done.outcome} {done.reason}"
        if one.finished:
            self._let_go(one, "" if one.whole else "ended", one.whole)
        elif done.outcome is not Outcome.OK:  # no other rank need wait for what may never come
            for d, words in zip(self.d, self.words, strict=True):
                words.append(lambda d=d: d.carry_out(d.machine.fail(one.request, done.key, done.outcome, done.reason)))

    def _whole(self, one: Prompt, rank: int) -> None:
        """Blocks of a load that has ended well are the prompt's."""
        if one.ended[rank][1] is not Outcome.OK:
            return
        size = BLOCK // self.ranks
        for region in range(REGIONS):
            for n in range(one.first, one.blocks):
                wanted = self._content(one, region, n)[rank * size:(rank + 1) * size]
                got = self.d[rank].cache.get((region, one.base + n))
                assert got == wanted, f"{one.letter}: block {n} of array {region} is wrong"

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
                if one.loading and one.tries[one.asked].released:
                    self._abandon(one)  # the router has aborted prefill: it sends another try, or aborts decode, too
                if one.waits and self.random.random() < 0.03:
                    self.log.append(f"{one.letter} load")
                    self._load(one, self.random.randrange(one.blocks))
            self.rest(1)
        for one in self.prompts:
            if one.waits:
                self._load(one, 0)
        self.rest(10)

    def rest(self, steps: int) -> None:
        """Time passes, and all that is due happens at once."""
        for _ in range(steps):
            self.held.now += STEP_S
            self.held.flow(self.round)
            for loop in self.held.loops.values():
                loop.tick(self.held.now)
            for d in self.d:
                d.carry_out(d.machine.tick(self.held.now))
            self.look()

    def round(self) -> bool:
        """Everything that is due once; whether anything was."""
        did = False
        for one in self.prompts:
            for each in () if self.idle and one.late else one.tries:
                while each.left and not each.released and self.p[each.p].room(each.left[0][2] * BLOCK):
                    self._copy(one, each)
                    did = True
            if one.loading and one.asked < len(one.tries) - 1:
                self._load(one, one.first)
        for told in (*self.words, self.control):
            did |= bool(told)
            while told:
                _hear(told)
        did |= self.held.round()
        self.look()
        return did

    def over(self) -> None:
        """All requests have ended: nothing is left."""
        for one in self.prompts:
            assert one.finished or one.dropped, f"{one.letter} never ended"
            assert len(one.settled) == self.ranks or one.dropped, f"{one.letter}: its gates are not closed"
            for each in one.tries:
                self._release(one, each, "the end", Outcome.UNUSED)
        self.rest(5)
        cut = any("cut" in one.excuses for one in self.prompts)
        if cut:  # what is whole survives its prefill, until nobody has claimed it
            entries = [one for d in self.d for one in d.receiver.ahead._buffer._entries.values()]
            assert all(one.filled == one.slots for one in entries), "decode keeps what can never be whole"
            self.held.now += CLAIM_S
            self.rest(2)
        for number, p in enumerate(self.p):
            assert not any(p.left().values()), f"p{number} has left {p.left()}"
        for rank, d in enumerate(self.d):
            assert not any(d.left().values()), f"d{rank} has left {d.left()}"
        for one in self.prompts:
            for rank in one.ended:
                self._whole(one, rank)
