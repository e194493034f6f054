"""Engines of prefill and decode whose steps happen in an order that a seed draws; what must be true in every order.

    Orders(seed, patch).explore()      raises AssertionError with the seed and the order

A world (``order_prompts``) has one or two engines of prefill and one of decode, each of one or two ranks, equal or not;
arrays of full attention, of windows and states; memory of a host, or of a device whose kernels and reads come late; a link;
a mode. One prompt is one ``Prompt``: its tries, of which each is made by an engine of prefill, part by part, and what its
request at decode does: wait, be fetched ahead, begin a load with a prefix of its own, take a newer try, be abandoned.
Schedulers are what this file says: their words come to decode's ranks (``words``) and to prefill (``control``) in order,
and late.

What must be true, beside the laws that ranks keep at every step (``held_ranks``)
1. No side calls the other's words wrong, and no callback fails.
2. A load ends, and ends well unless something was done to it (``Prompt.excuses``). Its blocks are the prompt's, and
   nothing writes into them after it was reported.
3. Nobody waits for a deadline: all ends within ``SETTLE_S`` of a time in which everything is delivered.
4. In the end nothing is held: copies, tries, ranges of the ring, places of the buffer, gates. Each try has ended once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from held_links import LateServeLink
from held_ranks import AUTO, FREE, LATE, SHM, TCP, HeldDecode, HeldPrefill, LinkKind
from held_session import Held, Way, Wire
from order_prompts import Prompt, Try, content, drawn_shape

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.errors import ChecksumError, PeerGone
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import LoadFinished, LoadSource, Order, WantTry
from xpyd_sidecar.transport.shm.mailbox import Mailbox

SETTLE_S = 4.0
TIMEOUT_S = 1.0
STEP_S = 0.1
CLAIM_S = 100.0
SLOTS = 14
"""Blocks of decode, of each group."""
NEVER = {Outcome.INCOMPATIBLE, Outcome.PROTOCOL, Outcome.AUTH, Outcome.INCARNATION}
"""What is a mistake of one side, whatever is done to a load."""
CUT_WORDS = "mailbox: Connection refused", "did not greet", "names no session"
"""What a rank may say of a peer whose connection was cut."""
LETTERS = "abcdef0123456789"
Choice = tuple[float, str, Callable[[], object]]


@cache
def _kind(name: str) -> str:
    """The name of something that may happen, without its numbers: the prompts differ."""
    return "".join(one for one in name.split("(", maxsplit=1)[0] if not one.isdigit())


def _hear(told: deque[Callable[[], object]]) -> None:
    told.popleft()()


class Orders:
    """One order of events."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, *, steps: int = 300) -> None:
        self.seed, self.steps = seed, steps
        self.random = rnd = random.Random(seed)
        self.log: list[str] = []
        self.held = Held(patch)
        self.of_device = rnd.random() < 0.5
        self.shape = drawn_shape(rnd, runs=self.of_device)
        self.link: LinkKind = rnd.choice((TCP, TCP, SHM, AUTO, *((LATE, LATE) if self.of_device else ())))
        if self.link is AUTO:
            _lose_letters(rnd, patch)
        self.mode = rnd.choice(("put_async", "put_async", "get", "put"))
        self.faults = rnd.random() < 0.6
        """Whether connections break, prefill gives up, and decode abandons or does not claim what has come."""
        self.cover = rnd.random() < 0.8
        self.plan = self.shape.plan()
        late: dict[str, LateServeLink] = {}
        self.p = [[self._prefill(f"p{number}.{rank}", late) for rank in range(self.shape.tensors[0])]
                  for number in range(rnd.choice((1, 1, 2)))]
        """By engine, by rank."""
        self.d = self._decode(late)
        self.words: list[deque[Callable[[], object]]] = [deque() for _ in self.d]
        """By decode rank: what its engine is told, with steps to come."""
        self.control: deque[Callable[[], object]] = deque()
        """What prefill's scheduler is told."""
        self.free = [set(range(SLOTS)) for _ in self.shape.reaches]
        """By group: blocks of decode that nobody has."""
        self.holds = rnd.random() < 0.3
        """Prefill has another connector, so what it copies is held until its step is proved."""
        self.step = 1
        self.late_puts: set[Key] = set()
        """Tries for which no step waits any more."""
        self.prompts: list[Prompt] = []
        for number in range(rnd.choice((1, 2, 2, 3, 4))):
            one = Prompt(LETTERS[number], rnd.randrange(1, 20), self.shape)
            one.late = rnd.random() < 0.15
            one.begin(rnd, len(self.p), self.shape.tensors[0])
            self.prompts.append(one)
        self.idle = rnd.random() < 0.3
        """Whether prefill computes nothing for a while, when decode has already asked for it."""
        self.patient = rnd.choice((0, steps // 2, steps // 2))
        """For how many steps decode has hardly any blocks for loads."""
        self.weights: dict[str, float] = {}
        """By kind of what may happen: orders differ most where each has its own."""
        self.happened: Counter[str] = Counter()

    def _prefill(self, name: str, late: dict[str, LateServeLink]) -> HeldPrefill:
        layouts = [kind.layout for kind in self.shape.kinds(0)]
        one = self.held.add(name, HeldPrefill, layouts=layouts, link=self.link, late=late, timeout_s=TIMEOUT_S,
                            cover=self.random.random() < 0.7)
        one.store.bound = self.random.choice((8 << 10, 8 << 10, 16 << 10, 64 << 10))
        return one

    def _decode(self, late: dict[str, LateServeLink]) -> list[HeldDecode]:
        rnd = self.random
        given: dict[str, Any] = {
            "groups": self.shape.groups, "slots": SLOTS, "link": self.link, "late": late, "cover": self.cover,
            "ring": rnd.choice((2 << 10, 8 << 10, 32 << 10)) if self.of_device else 0,
            "tiers": (1024 * rnd.choice((0, 1, 4, 16, 16)), 1024 * rnd.choice((0, 0, 1, 4))),
            "most": 2 if self.faults and rnd.random() < 0.2 else 4096, "piece": rnd.choice((64, 512, 512, 4096)),
            "window": rnd.choice((512, 4096)), "grace_s": 0.5, "ttl_s": CLAIM_S, "timeout_s": TIMEOUT_S}
        self.few = given["most"] == 2
        """So few are expected at once that they evict each other."""
        return [self.held.add(f"d{rank}", HeldDecode, kinds=self.shape.kinds(1), rank=rank, **given)
                for rank in range(self.shape.tensors[1])]

    # --- what may happen ---

    def choices(self) -> list[Choice]:
        """What may happen now: a weight, a name, and how."""
        out: list[Choice] = []
        now = self.held.now
        for name, loop in self.held.loops.items():
            if loop.posted:
                out.append((3, f"{name} post", loop.run_post))
            for at, sock in enumerate(loop.ready()):
                out.append((3, f"{name} socket {at}", partial(loop.run_socket, sock)))
            out.append((0.15, f"{name} tick", partial(loop.tick, now)))
            out += [(1, f"{name} {what}", call) for what, call in self.held.ranks[name].due()]
        for rank, (d, words) in enumerate(zip(self.d, self.words, strict=True)):
            if words:
                out.append((3, f"d{rank} step", partial(_hear, words)))
            if d.receiver.inbox:
                out.append((3, f"d{rank} engine", partial(d.take_one, now)))
            out.append((0.15, f"d{rank} engine tick", lambda d=d: d.carry_out(d.machine.tick(now))))
        if self.control:
            out.append((1, "control", partial(_hear, self.control)))
        if self.holds:
            out.append((0.5, "proved", self._prove))
        if self.faults:
            out += [(0.01, "reset", self._reset), (0.01, "spare", self._spare), (0.02, "ruin", self._ruin)]
        for wire in self.held.wires:
            for name, way in (("to p", wire.to_p), ("to d", wire.to_d)):
                if way.can():
                    out.append((3, f"wire {wire.number} {name}", partial(self._move, way)))
                elif way.lost and not way.over:
                    out.append((0.5, f"wire {wire.number} {name} ends", way.end))
            if self.faults and not wire.to_p.over and not wire.to_d.over:
                weight = 2 if any(one.half for one in self.prompts) else 0.05
                out.append((weight, f"cut {wire.number}", partial(self._cut, wire)))
        for one in self.prompts:
            out += self._of(one)
        return out

    def _move(self, way: Way) -> str:
        return f"{way.move(self.random.choice((1 << 20, 1 << 20, self.random.randrange(1, 600))))} bytes"

    def _of(self, one: Prompt) -> list[Choice]:
        out: list[Choice] = []
        last = one.tries[-1]
        for number, each in enumerate(one.tries):
            name = f"{one.letter}.{number + 1}"
            out += [(1, f"{name} copy {rank}", partial(self._copy, one, each, rank))
                    for rank in range(len(each.left)) if not one.late and self._may_copy(each, rank)]
            if self.mode == "put" and each.key not in self.late_puts and any(p.unfreed[each.key] for p in self.p[each.p]):
                out.append((0.1, f"{name} was late", partial(self.late_puts.add, each.key)))
            if self.faults and not each.released and one.have >= 0:
                how = self.random.choice((Outcome.ABORTED, Outcome.ABORTED, Outcome.STALE))
                out.append((0.02, f"{name} release {how}", partial(self._release, one, each, "released", how)))
        if one.waits:
            if not last.expected:
                out.append((4, f"{one.letter} expect", partial(self._expect, one, last)))
            have = self.random.randrange(one.tokens)
            if self._has_blocks(one, have):
                weight = 0.02 if len(self.log) < self.patient else 0.3
                out.append((weight, f"{one.letter} load", partial(self._load, one, have)))
            if self.faults:
                out.append((0.02, f"{one.letter} drop", partial(self._drop, one)))
                if last.expected:
                    out.append((0.02, f"{one.letter} unclaimed", partial(self._expire, one, last)))
        elif one.loading:
            if one.asked < len(one.tries) - 1:
                out.append((1, f"{one.letter} newer", partial(self._load, one, one.have)))
            if self.faults:
                out.append((0.02, f"{one.letter} abandon", partial(self._abandon, one)))
        if not one.finished and not one.dropped and len(one.tries) < 3 and (self.faults or self.random.random() < 0.3):
            out.append((3 if one.half else 0.03, f"{one.letter} another try",
                        partial(one.begin, self.random, len(self.p), self.shape.tensors[0])))
        return out

    # --- prefill ---

    def _may_copy(self, each: Try, rank: int) -> bool:
        """Whether an engine has something to copy out on a rank, and room; in mode put it may wait for what it has."""
        p = self.p[each.p][rank]
        if not each.left[rank] or each.released or not p.room(each.left[rank][0].regions, each.left[rank][0].count):
            return False
        waits = self.mode == "put" and any(count and key not in self.late_puts for key, count in p.unfreed.items())
        return not waits

    def _copy(self, one: Prompt, each: Try, rank: int) -> str:
        part = each.left[rank].popleft()

        def made(region: int, block: int, head: int) -> np.ndarray:
            return content(one.letter, region, block, self.shape.share(0, rank, region).first + head)

        hold = self.step if self.holds and self.random.random() < 0.7 else 0
        self.p[each.p][rank].copy(each.key, part.regions, part.first, made, part.count, hold=hold)
        return f"{part} {f'held for {hold}' if hold else ''}"

    def _prove(self) -> str:
        step, self.step = self.step, self.step + 1
        for p in self._prefills():
            p.prove(step)
        return str(step)

    def _prefills(self) -> list[HeldPrefill]:
        return [p for ranks in self.p for p in ranks]

    def _release(self, one: Prompt, each: Try, why: str, how: Outcome = Outcome.ABORTED) -> None:
        """Prefill's scheduler lets go of a try."""
        if each.released:
            return
        each.released = True
        if why:
            one.excuses.add(why)
        for p in self.p[each.p]:
            p.publisher.release(each.key, how, why or "unused")

    def _ruin(self) -> str:
        """A byte of a copy changes after its sum was made."""
        copies = [copy for p in self._prefills() for copy in p.summed()] if self.cover else []
        if not copies:
            return "nothing"
        copy = self.random.choice(copies)
        for one in self.prompts:
            one.excuses.add("ruined")  # the session ends for all that it has
        copy.view[self.random.randrange(len(copy.view))] ^= 1 << self.random.randrange(8)
        return f"{copy.key} {copy.number}"

    # --- decode ---

    def _let_go(self, one: Prompt, why: str, but: Key | None = None) -> None:
        """Decode's scheduler wants no try any more; prefill's hears of it."""
        for each in one.tries:
            if each.key != but:
                self.control.append(partial(self._release, one, each, why))

    def _tell(self, what: Callable[[HeldDecode], object]) -> None:
        """Decode's ranks, each with a step of its own."""
        for d, words in zip(self.d, self.words, strict=True):
            words.append(partial(what, d))

    def _expect(self, one: Prompt, each: Try) -> None:
        """It has no blocks yet: its sources are asked what they have."""
        each.expected = True
        for old in one.tries[:-1]:
            self._release(one, old, "")
        counts = [len(wanted) for wanted in one.wanted(0)]

        def expect(d: HeldDecode) -> None:
            for at, source in enumerate(self.plan[d.me.rank]):
                slots = sum(counts[d.groups[part.into]] for _, part in source.parts)
                plan = d.plan(source, one.identity)._replace(slots=slots, ahead=self.mode != "get")
                d.want(WantTry("", each.key, at, *self.p[each.p][source.rank].place, plan))

        self._tell(expect)

    def _has_blocks(self, one: Prompt, have: int) -> bool:
        return all(len(free) >= len(wanted) for free, wanted in zip(self.free, one.wanted(have), strict=True))

    def _load(self, one: Prompt, have: int) -> None:
        """It has blocks, or takes a newer try: each rank is told with its next step."""
        if one.have < 0:
            one.have = have
            one.tables = tuple(TableSpan(wanted.start, tuple(self._take(free, len(wanted))))
                               for free, wanted in zip(self.free, one.wanted(have), strict=True))
            self._look_at_free([one])
        one.asked = len(one.tries) - 1
        each = one.tries[-1]

        def load(d: HeldDecode) -> None:
            sources = tuple(LoadSource(*self.p[each.p][source.rank].place, d.plan(source, one.identity))
                            for source in self.plan[d.me.rank])
            d.load(Order(one.request, each.key, one.tables, sources), self.held.now)

        self._tell(load)

    def _take(self, free: set[int], count: int) -> list[int]:
        ids = self.random.sample(sorted(free), count)
        free.difference_update(ids)
        return ids

    def _drop(self, one: Prompt) -> None:
        """Its request ends before it has blocks: control says so to prefill, and each rank that expects it is told so."""
        one.dropped = True
        self._let_go(one, "dropped")
        for each in one.tries:
            self._tell(lambda d, each=each: d.receiver.drop_try(each.key, Outcome.ABORTED, "over"))

    def _reset(self) -> None:
        """Decode's caches are reset: who waits computes its prompt itself, and nothing that has come ahead is wanted."""
        for one in self.prompts:
            if one.waits:
                self._drop(one)
        self._tell(lambda d: d.receiver.reset())

    def _spare(self) -> None:
        """Decode's engine has another role for a while: its buffer is not needed."""
        spare = self.random.random() < 0.5
        self._tell(lambda d: d.receiver.spare(spare=spare))

    def _expire(self, one: Prompt, each: Try) -> None:
        """What has come for it was not claimed in time."""
        for d in self.d:
            for ident, entry in d.fetching.buffer._entries.items():
                if ident[0] == each.key:
                    entry.lease = Lease(self.held.now)
                    one.excuses.add("unclaimed")

    def _abandon(self, one: Prompt) -> None:
        one.excuses.add("abandoned")
        self._tell(lambda d: d.carry_out(d.machine.abandon(one.request)))

    def _cut(self, wire: Wire) -> None:
        for one in self.prompts:
            one.excuses.add("cut")
        wire.cut(at_once=self.random.random() < 0.3)

    @property
    def buffered(self) -> bool:
        """Whether anything has come before there were blocks for it."""
        return any(d.receiver.counted[metrics.BUFFERED_BYTES] for d in self.d)

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
                    self.held.flow(self._words_and_round)
                for _ in range(self.steps):
                    self.held.now += self.random.random() * 0.002
                    choices = self.choices()
                    _, name, how = self.random.choices(choices, [self.weight(*one) for one in choices])[0]
                    self.log.append(name)
                    self.happened[_kind(name)] += 1
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
        ruined, cut = (any(what in one.excuses for one in self.prompts) for what in ("ruined", "cut"))
        for whose, error in self.held.closed:
            well = isinstance(error, PeerGone) or (ruined and isinstance(error, ChecksumError))
            gone = cut and any(words in str(error) for words in CUT_WORDS)
            assert well or gone, f"{whose}: {error}"
            assert "silent" not in str(error), f"{whose} ended a connection: {error}"
        if self.few:
            for one in self.prompts:
                one.excuses.add("evicted")
        for rank, d in enumerate(self.d):
            assert ruined or not d.wrong, f"d{rank}: wrong sums of {d.wrong}"
            for done in d.finished:
                one = next(one for one in self.prompts if one.request == done.request)
                if rank not in one.ended:
                    self._ended(one, rank, done)
                if rank not in one.settled and d.receiver.is_settled(one.request):
                    one.settled.add(rank)
                    self._whole(one, rank)
        for one in self.prompts:
            if one.finished and len(one.settled) == len(self.d) and not one.freed:
                self._free(one)
        for p in self._prefills():
            p.hear()

    def _ended(self, one: Prompt, rank: int, done: LoadFinished) -> None:
        """A rank reports a load, and the scheduler draws its conclusions (``engine.scheduler.scheduler_side``)."""
        one.ended[rank] = done.key, done.outcome
        self.log.append(f"{one.letter} finished by d{rank}: {done.outcome} {done.reason}")
        assert done.outcome is Outcome.OK or one.excuses, f"{one.letter} failed: {done.outcome} {done.reason}"
        assert done.outcome not in NEVER, f"{one.letter} failed: {done.outcome} {done.reason}"
        assert done.outcome is not Outcome.CHECKSUM or "ruined" in one.excuses, f"{one.letter}: {done.reason}"
        if one.finished:
            self._let_go(one, "" if one.whole else "ended", one.whole)
            if not one.whole:
                for each in one.tries:
                    self._tell(lambda d, each=each: d.receiver.drop_try(each.key, Outcome.ABORTED, "over"))
        elif done.outcome is not Outcome.OK:  # no other rank need wait for what may never come
            self._tell(lambda d: d.carry_out(d.machine.fail(one.request, done.key, done.outcome, done.reason)))

    def _whole(self, one: Prompt, rank: int) -> None:
        """Blocks of a load that has ended well are the prompt's."""
        if one.ended[rank][1] is not Outcome.OK or one.freed:
            return
        for array, group in enumerate(self.shape.groups):
            heads, first_head = self.shape.share(1, rank, array)
            first, ids = one.tables[group]
            for nth, block in enumerate(ids):
                for head in range(heads):
                    wanted = content(one.letter, array, first + nth, first_head + head)
                    got = self.d[rank].caches[array][block, head]
                    assert (got == wanted).all(), f"{one.letter} at d{rank}: block {first + nth} of array {array} is wrong"

    def _free(self, one: Prompt) -> None:
        """Its blocks are given back."""
        for rank in one.ended:
            self._whole(one, rank)
        one.freed = True
        for array, group in enumerate(self.shape.groups):
            for d in self.d:
                d.caches[array][list(one.tables[group].ids)] = FREE
        for free, table in zip(self.free, one.tables, strict=True):
            free.update(table.ids)

    def _look_at_free(self, taken: list[Prompt]) -> None:
        """Nobody has written into blocks that nobody has, nor into those that were just taken."""
        for array, group in enumerate(self.shape.groups):
            ids = sorted(self.free[group]) + [block for one in taken for block in one.tables[group].ids]
            for rank, d in enumerate(self.d):
                assert (d.caches[array][ids] == FREE).all(), f"d{rank}: something was written into free blocks"

    # --- the end ---

    def settle(self) -> None:
        """No more faults; all is delivered, and what was begun is ended."""
        self.faults = False
        self.log.append("--- settle")
        end = self.held.now + SETTLE_S
        while self.held.now < end:
            if self.held.now > end - SETTLE_S / 2:
                self.idle = False
                for p in self._prefills():
                    p.store.bound = 64 << 10  # tries that another has taken over wait for the end of the load
            for one in self.prompts:
                if one.loading and one.tries[one.asked].released:
                    self._abandon(one)  # the router has aborted prefill: it sends another try, or aborts decode, too
                if one.waits and self.random.random() < 0.03:
                    self._load_if_room(one)
            self.rest(1)
        for _ in range(3):
            for one in self.prompts:
                if one.waits:
                    self._load_if_room(one)
            self.rest(10)

    def _load_if_room(self, one: Prompt) -> None:
        have = self.random.randrange(one.tokens)
        if self._has_blocks(one, have):
            self.log.append(f"{one.letter} load")
            self._load(one, have)

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
        """Everything that is due once, also of engines; whether anything was."""
        did = False
        for one in self.prompts:
            for each in () if self.idle and one.late else one.tries:
                for rank in range(len(each.left)):
                    while self._may_copy(each, rank):
                        self._copy(one, each, rank)
                        did = True
            if one.loading and one.asked < len(one.tries) - 1:
                self._load(one, one.have)
        if self.holds and any(p.publisher._held for p in self._prefills()):
            self._prove()
            did = True
        did |= self._words_and_round()
        if not did and (waited := {key for p in self._prefills() for key in +p.unfreed} - self.late_puts):
            self.late_puts |= waited
            did = True
        self.look()
        return did

    def _words_and_round(self) -> bool:
        did = False
        for told in (*self.words, self.control):
            did |= bool(told)
            while told:
                _hear(told)
        for d in self.d:
            did |= bool(d.receiver.inbox)
            while d.receiver.inbox:
                d.take_one(self.held.now)
        return self.held.round() or did

    def over(self) -> None:
        """All requests have ended: nothing is left."""
        for one in self.prompts:
            assert one.finished or one.dropped, f"{one.letter} never ended"
            assert len(one.settled) == len(self.d) or one.dropped, f"{one.letter}: its gates are not closed"
            for each in one.tries:
                self._release(one, each, "the end", Outcome.UNUSED)
        self.rest(5)
        entries = [one for d in self.d for one in d.fetching.buffer._entries.values()]
        if entries:  # what is whole survives its source, for another try, until nobody has claimed it
            assert all(one.filled == one.slots for one in entries), "decode keeps what can never be whole"
            self.held.now += CLAIM_S
            self.rest(2)
        for name, rank in self.held.ranks.items():
            assert isinstance(rank, HeldPrefill | HeldDecode)
            assert not any(rank.left().values()), f"{name} has left {rank.left()}"
        for one in self.prompts:
            for rank in one.ended:
                self._whole(one, rank)
        self._look_at_free([])


def _lose_letters(rnd: random.Random, patch: pytest.MonkeyPatch) -> None:
    """The descriptor of prefill's memory may not come."""
    left = rnd.randrange(3)
    take = Mailbox.take

    def taken(box: Mailbox, wanted: Callable[[bytes], bool]) -> tuple[bytes, int | None] | None:
        nonlocal left
        left -= 1
        return take(box, wanted) if left >= 0 else None

    patch.setattr(Mailbox, "take", taken)
