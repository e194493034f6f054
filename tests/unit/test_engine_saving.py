"""Prefill's half of a step under load: a link that is slower than the forward slows prefill down, and nothing is lost.

Saving, store and offers as they are; a device, a link and a scheduler on a virtual clock, and no bytes move.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from device_steps import (
    BLOCK,
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
from xpyd_sidecar.engine.memory_sizes import ROUNDS, MemorySizes
from xpyd_sidecar.engine.saving import Saving
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.offers import Offers, Push
from xpyd_sidecar.kv.reach import CacheGroup, Reach
from xpyd_sidecar.memory.store import CopyStore

LAUNCHES = 8
STEP_BLOCKS = STEP_TOKENS // TOKENS
FOLLOWED, LEAST = sizes_of(), sizes_of(0)
"""Sizes of the model's steps, and those of a rank that knows nothing of them."""


class Link:
    """The sender: copies leave one after the other, while their decode instance takes them."""

    def __init__(self, clock: StepClock, store: CopyStore) -> None:
        self.clock, self.store = clock, store
        self.queues: dict[str, deque[Any]] = {}
        self.stopped: set[str] = set()
        self.busy = False
        self.sent = 0
        self.released: list[tuple[Key, Outcome]] = []

    def push(self, key: Key, made: Iterable[Copy[Any]], hold: int = 0) -> None:
        for copy in made:
            self.queues.setdefault(copy.data.lease.holder, deque()).append(copy)
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
        self.clock.at(self.clock.now + len(copy.data.view) / LINK, lambda: self.left(copy))

    def left(self, copy: Copy[Any]) -> None:
        self.busy = False
        self.sent += len(copy.data.view)
        self.store.give(copy.data.lease)
        self.go_on()


class Prefill:
    """An engine whose scheduler always has prompts of one step each, in turn for each decode instance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decodes: int, sizes: MemorySizes = LEAST) -> None:
        self.clock = StepClock()
        monkeypatch.setattr("xpyd_sidecar.engine.saving.time", SimpleNamespace(monotonic=lambda: self.clock.now))
        self.device = StepDevice(self.clock, sizes.slab)
        self.store = CopyStore(untouched, sizes.keep)
        self.link = Link(self.clock, self.store)
        completions: Any = SimpleNamespace(add=lambda mark, call: self.clock.at(mark.when, call))
        link: Any = self.link
        self.saving = Saving(self.device, self.store, link, completions, wait_s=30.0, put=None)
        self.offers = Offers(groups=(CacheGroup(Reach("all", 16), 16),), ranks=1, blocks=CACHE_BLOCKS)
        self.peers = [Peer(InstanceName(f"d{n}"), Incarnation(str(n) * 32), HostPort("127.0.0.1:1"))
                      for n in range(decodes)]
        self.free = CACHE_BLOCKS
        self.begun: dict[str, int] = dict.fromkeys((peer.instance for peer in self.peers), 0)
        self._names = itertools.count()
        self._next = [self._register(peer) for peer in self.peers]

    def _register(self, peer: Peer) -> tuple[str, Peer]:
        name = f"r{next(self._names)}"
        self.offers.register(name, Key(TransferId(f"{int(name[1:]):032x}"), Attempt(1), 1), peer, b"",
                             (16 * STEP_BLOCKS + 1, 16 * STEP_BLOCKS))
        return name, peer

    def step(self, seconds: float) -> None:
        """The host enqueues a forward of one prompt, if one may begin; the next step comes after it."""
        pushes = []
        for at, (name, peer) in enumerate(self._next):
            if self.free >= STEP_BLOCKS and self.offers.may_begin(name):
                del self._next[at]
                self._next.append(self._register(peer))  # the others are first next time
                self.begun[peer.instance] += 1
                self.free -= STEP_BLOCKS
                self.offers.allocated(name, 0)
                pushes += self.offers.step(name, [range(1, 1 + STEP_BLOCKS)], computed=16 * STEP_BLOCKS)
                break
        self.saving.begin([push for push in pushes if isinstance(push, Push)])
        before = len(self.device.enqueued)
        self.saving.finish()
        assert len(self.device.enqueued) - before <= 1
        self.clock.advance(self.clock.now + seconds)
        while self.saving.copied:
            self.offers.copied(0, *self.saving.copied.popleft())
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
    assert max(p.device.rounds) <= ROUNDS
    assert max(p.device.enqueued) <= LAUNCHES, "of a step, however many layers and requests it has"
    assert p.saving.waiting <= CACHE_BLOCKS
    assert max(p.begun.values()) - min(p.begun.values()) <= 2, "decode instances take turns"


def test_a_step_fills_the_memory_on_the_device_so_many_times_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prefill(monkeypatch, 1, LEAST._replace(keep=4 << 30))
    p.step(0.03)
    assert max(p.device.rounds) == ROUNDS
    assert p.saving.waiting == STEP_BLOCKS - ROUNDS * (LEAST.slab // (LAYERS * BLOCK))


def test_many_small_prompts_of_one_step_leave_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prefill(monkeypatch, 1, FOLLOWED)
    for _ in range(3):
        p.saving.begin([Push(Key(TransferId(f"{n:032x}"), Attempt(1), 1), 0, tuple(range(16 * n, 16 * n + 16)))
                        for n in range(STEP_BLOCKS // 16)])
        p.saving.finish()
        p.clock.advance(p.clock.now + 0.03)
    assert len(p.device.enqueued) == 3
    assert max(p.device.enqueued) <= LAUNCHES


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
    assert (p.saving.waiting, p.store.used, p.free) == (0, 0, CACHE_BLOCKS)
    assert p.link.sent == sum(p.begun.values()) * STEP_BLOCKS * LAYERS * BLOCK
