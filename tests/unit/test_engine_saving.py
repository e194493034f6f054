"""Prefill's half of a step under load: a link that is slower than the forward slows prefill down, and nothing is lost.

Saving, store and offers as they are; a device, a link and a scheduler on a virtual clock, and no bytes move.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.legs import Peer
from xpyd_sidecar.engine.saving import ROUNDS, Saving
from xpyd_sidecar.engine.worker_side import DEVICE_KEEP_BYTES, SLAB_BYTES
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.offers import Offers, Push
from xpyd_sidecar.kv.reach import CacheGroup, Reach
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.memory.store import CopyStore

LAYERS, BLOCK = 36, 64 << 10
"""Of an 8B model: 16 tokens, keys and values of 8 heads of 128 in 16 bits."""
STEP_BLOCKS, CACHE_BLOCKS = 1024, 16384
LINK, BUS = 8e9, 50e9
"""Bytes a second."""


class Clock:
    """Calls at times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), call))

    def advance(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = end


class Device:
    """Gathers in order, at the speed of the bus."""

    at_once = False
    most_bytes = SLAB_BYTES
    block_bytes = (BLOCK,) * LAYERS
    groups = (0,) * LAYERS

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_at, self.gathers, self.rounds = clock, 0.0, 0, 0

    def of_group(self, group: int) -> range:
        return range(LAYERS)

    def gather(self, moves: Sequence[Any]) -> float:
        size = sum(len(move.ids) for move in moves) * LAYERS * BLOCK
        self.gathers += 1
        self.rounds = max(self.rounds, -(-size // SLAB_BYTES))
        self.free_at = max(self.free_at, self.clock.now) + size / BUS
        return self.free_at


class Link:
    """The sender: copies leave one after the other, while their decode instance takes them."""

    def __init__(self, clock: Clock, store: CopyStore) -> None:
        self.clock, self.store = clock, store
        self.queues: dict[str, deque[Any]] = {}
        self.stopped: set[str] = set()
        self.busy = False
        self.sent = 0
        self.released: list[tuple[Key, Outcome]] = []

    def push(self, key: Key, made: Iterable[Copy[Any]]) -> None:
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decodes: int, keep: int = DEVICE_KEEP_BYTES) -> None:
        self.clock = Clock()
        monkeypatch.setattr("xpyd_sidecar.engine.saving.time", SimpleNamespace(monotonic=lambda: self.clock.now))
        self.device = Device(self.clock)
        self.store = CopyStore(lambda size: Chunk(None, memoryview(mmap.mmap(-1, size))), keep)
        self.link = Link(self.clock, self.store)
        completions: Any = SimpleNamespace(add=self.clock.at)
        device: Any = self.device
        link: Any = self.link
        self.saving = Saving(device, self.store, link, completions, wait_s=30.0, put=None)
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
        before = self.device.gathers
        self.saving.finish()
        assert self.device.gathers - before <= 1
        self.clock.advance(self.clock.now + seconds)
        while self.saving.copied:
            self.offers.copied(0, *self.saving.copied.popleft())
        if pushes:
            self.offers.end(name)
            if not self.offers.holds(name):
                self.free += STEP_BLOCKS
        self.free += STEP_BLOCKS * len(self.offers.take_copied())


@pytest.mark.parametrize("decodes", [1, 3])
@pytest.mark.parametrize("step_ms", [10, 30])
def test_a_link_slower_than_the_forward_is_full_and_nothing_overflows(monkeypatch: pytest.MonkeyPatch, decodes: int,
                                                                      step_ms: int) -> None:
    p = Prefill(monkeypatch, decodes)
    for _ in range(20):
        p.step(step_ms / 1e3)
    before, began = p.link.sent, p.clock.now
    for _ in range(200):
        p.step(step_ms / 1e3)
    assert (p.link.sent - before) / (p.clock.now - began) > 0.9 * LINK
    assert p.link.released == []
    assert p.device.rounds <= ROUNDS
    assert p.saving.waiting <= CACHE_BLOCKS
    assert max(p.begun.values()) - min(p.begun.values()) <= 2, "decode instances take turns"


def test_a_step_fills_the_memory_on_the_device_so_many_times_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Prefill(monkeypatch, 1, keep=4 << 30)
    p.step(0.03)
    assert p.device.rounds == ROUNDS
    assert p.saving.waiting == STEP_BLOCKS - ROUNDS * (SLAB_BYTES // (LAYERS * BLOCK))


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
