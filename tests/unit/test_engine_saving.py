"""Prefill's half of a step under load: a link that is slower than the forward slows prefill down, and nothing is lost.

The saver, store and offers as they are; a device, a link and a scheduler on a virtual clock, and no bytes move.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_steps import (
    BLOCK,
    BUS,
    CACHE_BLOCKS,
    LAYERS,
    LINK,
    STEP_TOKENS,
    TOKENS,
    StepClock,
    StepDevice,
    sizes_of,
    untouched,
)

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.legs import Peer
from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.engine.worker.layer_groups import GROUPS_MOST
from xpyd_sidecar.engine.worker.memory_sizes import ROUNDS, MemorySizes
from xpyd_sidecar.engine.worker.saving import SPANS_MOST, BlockSaver
from xpyd_sidecar.kv import manifests
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.offers import Offers, Push
from xpyd_sidecar.kv.reach import CacheGroup, Reach
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.session.stored_copy import StoredCopy

LAUNCHES = 5 * (GROUPS_MOST + 2 * ROUNDS) + SPANS_MOST
"""A table and a kernel for rows, the same for sums, and their copy, for each group and each fill; copies to the host."""
STEP_BLOCKS = STEP_TOKENS // TOKENS
FOLLOWED, LEAST = sizes_of(), sizes_of(0)
"""Sizes of the model's steps, and those of a rank that knows nothing of them."""


class Link:
    """The sender: copies leave one after the other, while their decode instance takes them."""

    def __init__(self, clock: StepClock, store: CopyStore) -> None:
        self.clock, self.store = clock, store
        self.queues: dict[str, deque[StoredCopy]] = {}
        self.holders: dict[Key, str] = {}
        self.stopped: set[str] = set()
        self.busy = False
        self.sent = 0
        self.manifests = 0
        self.released: list[tuple[Key, Outcome]] = []

    def push(self, key: Key, made: Iterable[StoredCopy], hold: int = 0) -> None:
        for copy in made:
            self.queues.setdefault(self.holders.get(key, ""), deque()).append(copy)
            self.manifests += 1
        self.go_on()

    def release(self, key: Key, outcome: Outcome, reason: str) -> None:
        self.released.append((key, outcome))

    def go_on(self) -> None:
        ready = [queue for holder, queue in self.queues.items() if queue and holder not in self.stopped]
        if self.busy or not ready:
            return
        self.busy = True
        copy = ready[0].popleft()
        self.queues = dict(sorted(self.queues.items(), key=lambda item: item[1] is ready[0]))  # they take turns
        self.clock.at(self.clock.now + copy.size / LINK, lambda: self.left(copy))

    def left(self, copy: StoredCopy) -> None:
        self.busy = False
        self.sent += copy.size
        copy.free(self.store)
        self.go_on()


class Prefill:
    """An engine whose scheduler always has prompts of one step each, in turn for each decode instance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decodes: int, sizes: MemorySizes = LEAST) -> None:
        self.clock = StepClock()
        monkeypatch.setattr("xpyd_sidecar.engine.worker.saving.time", SimpleNamespace(monotonic=lambda: self.clock.now))
        self.device = StepDevice(self.clock, sizes.slab)
        self.store = CopyStore(untouched, sizes.keep)
        self.link = Link(self.clock, self.store)
        completions: Any = SimpleNamespace(add=lambda mark, call: self.clock.at(mark.when, call))
        link: Any = self.link
        self.saving = BlockSaver(self.device, self.device.layouts({}), self.store, link, completions=completions,
                                 wait_s=30.0,
                             put=None, layers=self.device.of_layer)
        self.offers = Offers(groups=(CacheGroup(Reach("all", 16), 16),), ranks=1, blocks=CACHE_BLOCKS)
        self.peers = [Peer(InstanceName(f"d{n}"), Incarnation(str(n) * 32), HostPort("127.0.0.1:1"))
                      for n in range(decodes)]
        self.launches: list[int] = []
        """Of each step."""
        self.free = CACHE_BLOCKS
        self.begun: dict[str, int] = dict.fromkeys((peer.instance for peer in self.peers), 0)
        self._names = itertools.count()
        self._next = [self._register(peer) for peer in self.peers]

    def _register(self, peer: Peer) -> tuple[str, Peer]:
        name = f"r{next(self._names)}"
        key = Key(TransferId(f"{int(name[1:]):032x}"), Attempt(1), 1)
        self.offers.register(name, key, peer, b"", (16 * STEP_BLOCKS + 1, 16 * STEP_BLOCKS))
        self.link.holders[key] = peer.instance
        return name, peer

    def forward(self, pushes: Sequence[Push], seconds: float) -> None:
        """The host enqueues a forward, layer by layer, and says so by hooks."""
        steps = self.device.steps
        began, launches = self.clock.now, steps.launches
        self.saving.begin(pushes)
        for nth, name in enumerate(self.device.of_layer):
            steps.computed_at = began + seconds * (nth + 1) / LAYERS
            self.saving.layer(name)
        self.saving.finish()
        self.launches.append(steps.launches - launches)

    def step(self, seconds: float) -> None:
        """The host enqueues a forward of one prompt, if one may begin; the next step comes after it."""
        pushes = []
        for at, (name, peer) in enumerate(self._next):
            if self.free >= STEP_BLOCKS and self.offers.may_begin(name):
                del self._next[at]
                self._next.append(self._register(peer))  # the others are first next time
                self.begun[peer.instance] += 1
                self.free -= STEP_BLOCKS
                self.offers.on_allocated(name, 0)
                pushes += self.offers.step(name, [range(1, 1 + STEP_BLOCKS)], computed=16 * STEP_BLOCKS)
                break
        self.forward([push for push in pushes if isinstance(push, Push)], seconds)
        self.clock.advance(self.clock.now + seconds)
        while self.saving.copied:
            self.offers.on_copied(0, *self.saving.copied.popleft())
        if pushes:
            self.offers.end(name)
            if not self.offers.holds(name):
                self.free += STEP_BLOCKS
        self.free += STEP_BLOCKS * len(self.offers.take_copied())


@pytest.mark.parametrize("sizes", [FOLLOWED, LEAST], ids=["followed", "least"])
@pytest.mark.parametrize("decodes", [1, 3])
@pytest.mark.parametrize("step_ms", [10, 30])
def test_a_link_slower_than_the_forward_is_full_and_nothing_overflows(monkeypatch: pytest.MonkeyPatch, decodes: int,
                                                                      step_ms: int, sizes: MemorySizes) -> None:
    p = Prefill(monkeypatch, decodes, sizes)
    for _ in range(20):
        p.step(step_ms / 1e3)
    before, began = p.link.sent, p.clock.now
    for _ in range(100):
        p.step(step_ms / 1e3)
    assert (p.link.sent - before) / (p.clock.now - began) > 0.9 * LINK
    assert p.link.released == []
    assert max(p.launches) <= LAUNCHES, "of a step, however many layers and requests it has"
    assert p.saving.waiting <= CACHE_BLOCKS
    assert max(p.begun.values()) - min(p.begun.values()) <= 2, "decode instances take turns"


def test_all_of_a_step_leaves_with_it_however_small_the_memory_on_the_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prefill(monkeypatch, 1, LEAST._replace(keep=4 << 30))
    p.step(0.03)
    size = STEP_BLOCKS * LAYERS * BLOCK
    assert sum(p.device.steps.gathered) == size
    assert max(p.device.steps.gathered) <= LEAST.slab
    assert len(p.device.steps.gathered) <= GROUPS_MOST + 2 * size // LEAST.slab
    assert p.saving.waiting == 0


def test_many_small_prompts_of_one_step_leave_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prefill(monkeypatch, 1, FOLLOWED)
    for _ in range(3):
        p.forward([Push(Key(TransferId(f"{n:032x}"), Attempt(1), 1), 0, tuple(range(16 * n, 16 * n + 16)))
                   for n in range(STEP_BLOCKS // 16)], 0.03)
        p.clock.advance(p.clock.now + 0.03)
    assert len(p.device.steps.gathered) <= 3 * (ROUNDS + 1)
    assert max(p.launches) <= 5 * (ROUNDS + 1) + STEP_BLOCKS // 16 + 1, "a copy to the host for each prompt"


def test_a_step_has_left_soon_after_its_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prefill(monkeypatch, 1, FOLLOWED)
    p.step(0.3)
    size = STEP_BLOCKS * LAYERS * BLOCK - p.saving.waiting * LAYERS * BLOCK
    assert p.device.steps.free_at - 0.3 <= 1.1 * size / GROUPS_MOST / BUS
    told = p.link.manifests
    p.clock.advance(1.0)
    assert told == p.link.manifests * (GROUPS_MOST - 1) // GROUPS_MOST > 0, "by the end of the forward, all but the last"


def test_with_sizes_that_follow_the_model_nearly_all_of_a_step_leaves_the_cache_with_it(
        monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = {}
    for name, sizes in (("followed", FOLLOWED), ("least", LEAST)):
        p = Prefill(monkeypatch, 1, sizes)
        p.step(0.03)
        waiting[name] = p.saving.waiting / STEP_BLOCKS
    assert waiting["followed"] < 0.15
    assert waiting["least"] > 0.75


def test_a_decode_that_takes_nothing_holds_up_nobody_else_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prefill(monkeypatch, 2)
    p.link.stopped.add("d0")
    for _ in range(100):
        p.step(0.03)
    before, began = p.link.sent, p.clock.now
    for _ in range(100):
        p.step(0.03)
    assert (p.link.sent - before) / (p.clock.now - began) > 0.2 * LINK, "what its share leaves of the store"
    assert p.begun["d0"] * STEP_BLOCKS < CACHE_BLOCKS // 2
    assert p.link.released == []
    while p.clock.now < 40.0:
        p.step(0.03)
    assert {outcome for _, outcome in p.link.released} == {Outcome.OVERFLOW}
    assert len(p.link.released) < p.begun["d0"] + 1


def test_all_that_waits_leaves_when_prompts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prefill(monkeypatch, 2)
    for _ in range(50):
        p.step(0.03)
    assert p.saving.waiting
    p._next.clear()
    for _ in range(200):
        p.step(0.03)
    assert (p.saving.waiting, p.store.used_bytes, p.free) == (0, 0, CACHE_BLOCKS)
    assert p.link.sent == sum(p.begun.values()) * STEP_BLOCKS * LAYERS * BLOCK


def test_a_step_of_a_host_leaves_in_copies_whose_sums_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks of many heads, of which each has a sum."""
    monkeypatch.setattr(manifests, "SUMS_MOST", 100)
    heads = dict.fromkeys("abc", 8)
    memory = KvCache({name: torch.zeros(64, 8, 4, 2) for name in heads}, 64)
    whole = torch.empty(1 << 20, dtype=torch.uint8)
    store = CopyStore(lambda size: Chunk(whole, memoryview(whole.numpy())), len(whole))
    copies: list[StoredCopy] = []
    publisher: Any = SimpleNamespace(push=lambda key, made, hold: copies.extend(made))
    saving = BlockSaver(memory, memory.layouts(heads), store, publisher, completions=Completions(), wait_s=60.0, put=None,
                    layers={})
    saving.begin([Push(Key(TransferId("a" * 32), Attempt(1), 1), 0, tuple(range(10)))])
    saving.finish()
    told = [copy.manifest(0) for copy in copies]
    assert [(one.region, one.arrays, one.first, one.count) for one in told] == [(0, 3, at, 2) for at in range(0, 10, 2)]
