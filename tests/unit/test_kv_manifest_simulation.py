"""Publishing and fetching against each other, over sessions that end, in many random orders.

Held in every order: what arrives is what was published, and every wanted block does; no copy that is vouched for is freed
under a fetch; every copy is freed once, every try ends once on either side, and no memory of decode stays in use.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from manifest_sizes import size_of
from more_cases import more

from xpyd_sidecar.contract.ids import Attempt, Incarnation, TransferId
from xpyd_sidecar.kv import fetch_steps, publishing
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer, TryId
from xpyd_sidecar.kv.fetch_steps import Fetch, FetchPlan
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.manifests import Ask, Busy, Manifest, ManifestTaken, Sums, layout
from xpyd_sidecar.kv.packing import sums_of
from xpyd_sidecar.kv.publishing import Publishing
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.ring import Ring
from xpyd_sidecar.kv.selection import places

ARRAYS = (ArrayLayout(2, 64, 1), ArrayLayout(2, 64, 2))
ME = Incarnation("d")
BLOCKS = 6
TRIES = 4


def content(key: Key, region: int, block: int, head: int, size: int) -> np.ndarray:
    seed = [key.attempt, key.generation, int(key.transfer[:2], 16), region, block, head]
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@dataclass
class Session:
    number: int
    to_p: deque[tuple[str, Key, object]] = field(default_factory=deque)
    to_d: deque[tuple[str, Key, object]] = field(default_factory=deque)


class World:
    """One rank of each side."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.losses = self.random.choice([0.0, 0.02, 0.1])
        """How likely a session ends, at each step."""
        self.slow = self.random.choice([0.05, 1.0])
        """How likely a try is allotted blocks, where it could be."""
        cover = self.random.random() < 0.8
        self.cover = cover
        self.publishing = Publishing[int](keep_s=1e9, send_s=1e9, grace_s=1e9)
        ring = Ring(self.random.choice([0, 8 << 10]))
        self.fetching = Fetching(ring, Buffer(Buddy(self.random.choice([0, 4 << 10]), 64), Buddy(0), ttl_s=1e9),
                                 piece=self.random.choice([64, 512, 1 << 20]), window=2048, cover=cover)
        self.sessions = [Session(1)]
        self.memory: dict[int, np.ndarray] = {}
        """Prefill's copies, by offset; freed ones are not there."""
        self.of: dict[tuple[Key, int], int] = {}
        self.copies: list[int] = []
        self.freed: Counter[int] = Counter()
        self.ended: Counter[Key] = Counter()
        self.keys = [Key(TransferId(f"{n:02x}" * 16), Attempt(1), 1) for n in range(TRIES)]
        self.left = {key: list(range(BLOCKS)) for key in self.keys}
        self.tables: dict[Key, tuple[TableSpan, ...]] = {}
        self.plans: dict[Key, FetchPlan] = {}
        self.flights: dict[int, Fetch] = {}
        self.placing: dict[int, tuple[fetch_steps.Place, np.ndarray]] = {}
        self.held: dict[object, np.ndarray] = {}
        """What was fetched into the ring or the buffer, by place."""
        self.arrived: dict[Key, set[tuple[int, int]]] = {key: set() for key in self.keys}
        self.over: set[Key] = set()
        """Tries that decode has given up, or has all of."""
        self.done: set[Key] = set()
        for key in self.keys:
            region = self.random.choice([(0, 1), (0,), (1,), ()])
            head = self.random.choice([(0, 2), (0, 1), (1, 1)])
            parts = {at: ArrayPart(at, *head, 0) for at in region}
            self.plans[key] = FetchPlan(ARRAYS, parts, 1, key.transfer.encode(), BLOCKS * len(parts),
                                        self.random.random() < 0.5)

    @property
    def session(self) -> Session:
        return self.sessions[-1]

    # --- prefill ---

    def publish(self, key: Key) -> None:
        count = self.random.randrange(1, len(self.left[key]) + 1)
        first, self.left[key] = self.left[key][0], self.left[key][count:]
        for region in range(2):
            at = 1024 * len(self.copies)
            self.copies.append(at)
            made = Manifest(0, region, 1, first, count, at)
            memory = np.zeros(size_of(made, ARRAYS), np.uint8)
            ((_, packed, _),) = layout(made, ARRAYS)
            for block in range(first, first + count):
                for head in range(2):
                    place = packed.place(block, head)
                    memory[place:place + 64] = content(key, region, block, head, 64)
            self.memory[at] = memory
            self.prefill(self.publishing.publish(key, partial(numbered, made), (at, len(memory)), self.now))

    def prefill(self, steps: list[publishing.Step[int]]) -> None:
        for step in steps:
            if isinstance(step, publishing.FreeCopy):
                self.freed[step.data] += 1
                del self.memory[step.data]
            elif isinstance(step, publishing.PublishEnded):
                self.ended[step.key] += 1
            else:
                session = next((one for one in self.sessions if one.number == step.link), None)
                assert session is self.session, "said over a session that has ended"
                if isinstance(step, publishing.Tell):
                    session.to_d.append(("told", step.key, step.manifest))
                    if self.cover:
                        data = self.memory[step.manifest.offset]
                        ((_, packed, _),) = layout(step.manifest, ARRAYS)
                        made = sums_of(data[:packed.size], packed)
                        session.to_d.append(("sums", step.key, Sums(step.manifest.number, made.tobytes())))
                elif isinstance(step, publishing.Press):
                    session.to_d.append(("pressed", step.key, step.number))
                else:
                    session.to_d.append(("gone", step.key, step.retry))

    def prefill_hears(self) -> None:
        session = self.session
        what, key, body = session.to_p.popleft()
        if isinstance(body, Ask):
            self.prefill(self.publishing.ask(session.number, ME, key, body, self.now))
        elif isinstance(body, ManifestTaken):
            self.prefill(self.publishing.on_taken(session.number, ME, key, body.number))
        elif isinstance(body, Busy):
            self.publishing.on_busy(session.number, ME, key, body.number, self.now + body.retry_s)
        elif what == "done":
            self.prefill(self.publishing.on_done(session.number, ME, key))
        else:
            self.prefill(self.publishing.cancel(session.number, ME, key, Outcome.ABORTED, "cancelled"))

    # --- decode ---

    def decode(self, steps: list[fetch_steps.Step]) -> None:
        for step in steps:
            if isinstance(step, fetch_steps.SayFrame):
                if step.link == self.session.number:
                    self.session.to_p.append(("", step.key, step.body))
            elif isinstance(step, Fetch):
                self.flights[step.number] = step
                assert step.at is not None or self.belongs(step), "into blocks that there are not"
            elif isinstance(step, fetch_steps.Place):
                self.placing[step.number] = step, self.held.pop((step.key, step.at))
            elif isinstance(step, fetch_steps.BlocksArrived):
                self.arrives(step)
            else:
                pytest.fail(f"a wrong sum: {step}")

    def belongs(self, step: Fetch) -> bool:
        """Whether each run of it has a block of its load."""
        (table,) = self.tables[step.key]
        blocks = range(table.first, table.first + len(table.ids))
        return all(any(block in blocks for block in range(run.first, run.first + run.blocks)) for piece in step.batch
                   for run in piece.packed.runs(piece.packed.first, piece.packed.blocks))

    def arrives(self, step: fetch_steps.BlocksArrived) -> None:
        for region, first, count in step.blocks:
            self.arrived[step.key] |= {(region, block) for block in range(first, first + count)}
        if step.key not in self.over and self.wanted(step.key) <= self.arrived[step.key]:
            self.finish(step.key)

    def finish(self, key: Key) -> None:
        self.over.add(key)
        self.done.add(key)
        self.session.to_p.append(("done", key, None))
        self.decode(self.fetching.cancel((key, 0)))

    def wanted(self, key: Key) -> set[tuple[int, int]]:
        (table,) = self.tables[key]
        return {(region, block) for region in self.plans[key].parts
                for block in range(table.first, table.first + len(table.ids))}

    def begin(self, key: Key) -> None:
        self.decode(self.fetching.begin((key, 0), self.session.number, self.plans[key], self.now))

    def allot(self, key: Key) -> None:
        first = self.random.randrange(BLOCKS)
        self.tables[key] = (TableSpan(first, tuple(range(first, BLOCKS))),)
        if not self.wanted(key):
            self.finish(key)
            return
        self.decode(self.fetching.allot((key, 0), self.tables[key]))

    def cancel(self, key: Key) -> None:
        self.over.add(key)
        self.session.to_p.append(("cancel", key, None))
        self.decode(self.fetching.cancel((key, 0)))

    def decode_hears(self) -> None:
        session = self.session
        what, key, body = session.to_d.popleft()
        ident: TryId = (key, 0)
        if what == "told":
            assert isinstance(body, Manifest)
            self.decode(self.fetching.on_manifest(session.number, ident, body))
        elif what == "sums":
            assert isinstance(body, Sums)
            self.decode(self.fetching.on_sums(session.number, ident, body))
        elif what == "pressed":
            assert isinstance(body, int)
            self.decode(self.fetching.on_press(session.number, ident, body, 0.0))
        else:
            if key not in self.over:
                self.over.add(key)
                self.decode(self.fetching.cancel(ident))
            session.to_p.append(("cancel", key, None))

    def land(self, number: int) -> None:
        """A fetch has an end."""
        fetch = self.flights.pop(number)
        if fetch.link != self.session.number:
            self.decode(self.fetching.on_fetch_failed(number))
            return
        base = self.of_manifest(fetch)
        if base is None:
            assert fetch.key in self.over, "a copy was freed under a fetch that counts"
            self.decode(self.fetching.on_fetch_failed(number))
            return
        data = [np.concatenate([self.memory[base][at - base:at - base + size] for at, size in piece.stretches])
                for piece in fetch.batch]
        for piece, some in zip(fetch.batch, data, strict=True):
            part = self.plans[fetch.key].parts[piece.region]
            for block in range(piece.packed.first, piece.packed.first + piece.packed.blocks):
                for head in range(part.heads):
                    at = piece.packed.place(block, head)
                    assert (some[at:at + 64] == content(fetch.key, piece.region, block, part.head + head, 64)).all()
        if fetch.at is None:
            made = np.concatenate([sums_of(some, piece.packed) for piece, some in zip(fetch.batch, data, strict=True)])
            self.decode(self.fetching.on_fetched(number, made))
            return
        packed = np.zeros(places(fetch.batch)[-1], np.uint8)
        for at, some in zip(places(fetch.batch), data, strict=False):
            packed[at:at + len(some)] = some
        self.held[fetch.key, fetch.at] = packed
        self.decode(self.fetching.on_fetched(number))

    def of_manifest(self, fetch: Fetch) -> int | None:
        """Where the copy lies that a fetch reads; None: it is freed."""
        (offset, _), *_ = fetch.batch[0].stretches
        return next((at for at, memory in self.memory.items() if at <= offset < at + len(memory)), None)

    def place(self, number: int) -> None:
        step, packed = self.placing.pop(number)
        made = np.concatenate([sums_of(packed[at:at + piece.size], piece.packed)
                               for piece, at in zip(step.batch, places(step.batch), strict=False)])
        self.decode(self.fetching.on_placed(number, made))

    def lose(self) -> None:
        old = self.session
        self.sessions.append(Session(old.number + 1))
        self.prefill(self.publishing.on_session_lost(old.number, self.now))
        for key, _ in self.fetching.on_session_lost(old.number):
            self.begin(key)
        for key in self.over - self.done:
            self.session.to_p.append(("", key, Ask(1)))  # what was cancelled is asked for to be cancelled
            self.session.to_p.append(("cancel", key, None))
        for key in self.done:
            self.session.to_p.append(("", key, Ask(1, nothing=True)))
            self.session.to_p.append(("done", key, None))

    # --- all of it ---

    def step(self) -> None:
        begun = [key for key in self.keys if (key, 0) in self.fetching]
        can: list[Callable[[], None]] = []
        can += [partial(self.publish, key) for key in self.keys if self.left[key]]
        can += [partial(self.begin, key) for key in self.keys if key not in begun and key not in self.over]
        can += [partial(self.allot, key) for key in begun
                if key not in self.tables and self.random.random() < self.slow]
        can += [partial(self.land, number) for number in self.flights]
        can += [partial(self.place, number) for number in self.placing]
        can += [self.prefill_hears] * 3 if self.session.to_p else []
        can += [self.decode_hears] * 3 if self.session.to_d else []
        if self.random.random() < self.losses:
            can = [self.lose]
        elif begun and self.random.random() < 0.01:
            can = [partial(self.random.choice([self.cancel, self.release]), self.random.choice(begun))]
        elif self.random.random() < 0.03:
            can = [partial(self.press, self.random.randrange(2000))]
        if can:
            self.random.choice(can)()

    def release(self, key: Key) -> None:
        """Prefill gives a try up."""
        self.prefill(self.publishing.release(key, Outcome.ABORTED, "it is given up"))

    def press(self, want: int) -> None:
        self.prefill(self.publishing.press(want, self.now))

    def idle(self) -> bool:
        return not (self.session.to_p or self.session.to_d or self.flights or self.placing or any(self.left.values())
                    or any(key not in self.over for key in self.keys))


def numbered(manifest: Manifest, number: int) -> Manifest:
    return Manifest(number, manifest.region, manifest.arrays, manifest.first, manifest.count, manifest.offset)


@pytest.mark.parametrize("seed", [*range(100), *more(range(100, 300))])
def test_in_any_order_what_is_wanted_arrives_and_everything_is_free_again(seed: int) -> None:
    world = World(seed)
    for _ in range(20_000):
        if world.idle():
            break
        world.step()
    else:
        raise AssertionError(f"not at an end: {[key.transfer[:2] for key in world.keys if key not in world.over]}")
    for key in world.done:
        assert world.wanted(key) <= world.arrived[key]
    assert dict(world.freed) == dict.fromkeys(world.copies, 1)
    assert all(world.ended[key] == 1 for key in world.keys)
    assert (world.publishing.open, world.publishing.pressed_bytes) == (0, 0)
    assert (world.fetching.ring.used_bytes, world.fetching.buffer.bytes_in_use) == (0, (0, 0))
    assert not [*world.fetching.flights()]


