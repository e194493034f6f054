"""Decode's half of a step under load: a fast link is kept busy however long the steps are, and nothing waits for copies.

Loading, staging and the machine of loads as they are; a device and a link on a virtual clock, and no bytes move.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from device_steps import BLOCK, BUS, CACHE_BLOCKS, LAYERS, LINK, StepClock, StepDevice, sizes_of, untouched

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, TransferId
from xpyd_sidecar.engine.loading import Loading
from xpyd_sidecar.engine.memory_sizes import MemorySizes
from xpyd_sidecar.engine.worker_side import staging_of
from xpyd_sidecar.kv.frames import FRAME_BYTES
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.mapping import geometry, plan
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import From, Order, Receiving
from xpyd_sidecar.session.receiver_events import Arrived
from xpyd_sidecar.session.transfer_trace import Forwards
from xpyd_sidecar.threads.idle_polling import Inbox

PROMPT = 128
"""Blocks: 2,048 tokens, 288 MiB."""
LAUNCHES = 8
FRAME = FRAME_BYTES // BLOCK


class Link:
    """The receiver: frames of as many prompts as there are, one after the other, while there is a chunk to put them in."""

    def __init__(self, clock: StepClock, staging: Any, frames: Iterator[tuple[Key, int, int]]) -> None:
        self.clock, self.staging, self.frames = clock, staging, frames
        self.inbox: Inbox[Any] = Inbox()
        self.busy = False
        self.size = 0
        staging.on_free(self.go_on)

    def go_on(self) -> None:
        if self.busy or (chunk := self.staging.take()) is None:
            return
        frame = next(self.frames)
        self.busy = True
        self.clock.at(self.clock.now + FRAME_BYTES / LINK, lambda: self.arrived(chunk, *frame))

    def arrived(self, chunk: Any, key: Key, region: int, first: int) -> None:
        self.busy = False
        self.size += FRAME_BYTES
        self.inbox.append(Arrived(key, region, first, FRAME, chunk, FRAME_BYTES, "rdma", 0, self.clock.now))
        self.go_on()

    def carry_out(self, step: object) -> None:
        """What decode says to prefill has no effect here."""

    def close(self, request: str) -> None:
        """Nobody else writes into its blocks."""

    def settled(self, request: str) -> bool:
        return True


class Decode:
    """A rank that loads so many prompts at once, again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, together: int, sizes: MemorySizes) -> None:
        self.clock, self.together = StepClock(), together
        monkeypatch.setattr("xpyd_sidecar.engine.loading.time", SimpleNamespace(monotonic=lambda: self.clock.now))
        self.device = StepDevice(self.clock, sizes.slab)
        self.staging = staging_of(sizes.staging, FRAME_BYTES, untouched)
        self.link: Any = Link(self.clock, self.staging, self.frames())
        arrays = self.device.arrays(dict.fromkeys((f"layer{n}" for n in range(LAYERS)), 0))
        ranks = geometry(1, [arrays])
        ((self.source,),) = plan(ranks, ranks)
        completions: Any = SimpleNamespace(add=lambda mark, call: self.clock.at(mark.when, call))
        self.loads = Receiving(load_s=30.0, grace_s=1.0, regions=LAYERS, cover=True)
        self.loading = Loading(0, self.device, self.link, self.loads, staging=self.staging, forwards=Forwards(),
                               completions=completions)
        self.names = itertools.count(1)
        self.loaded = 0

    def frames(self) -> Iterator[tuple[Key, int, int]]:
        """Of prompts that come at the same time, by turns, as prefill makes them: chunk by chunk, layer by layer."""
        while True:
            keys = [self.load(next(self.names)) for _ in range(self.together)]
            yield from ((key, region, first) for first in range(0, PROMPT, FRAME) for region in range(LAYERS)
                        for key in keys)

    def load(self, number: int) -> Key:
        key = Key(TransferId(f"{number:032x}"), Attempt(1), 1)
        first = number * PROMPT % (CACHE_BLOCKS - PROMPT)
        table = TableSpan(0, tuple(range(first, first + PROMPT)))
        source = From(HostPort("127.0.0.1:1"), Incarnation("0" * 32), self.source.parts)
        self.loads.load(Order(f"r{number}", key, (table,), (source,)), self.clock.now)
        return key

    def step(self, seconds: float) -> None:
        before = len(self.device.enqueued)
        over, failed = self.loading.poll(calm=False)
        assert not failed
        assert len(self.device.enqueued) - before <= 1
        self.loaded += len(over)
        self.clock.advance(self.clock.now + seconds)


@pytest.mark.parametrize("sizes", [sizes_of(), sizes_of(0)], ids=["followed", "least"])
@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("step_ms", [25, 50])
def test_a_fast_link_is_kept_busy_beside_decodes_steps(monkeypatch: pytest.MonkeyPatch, step_ms: int, together: int,
                                                       sizes: MemorySizes) -> None:
    d = Decode(monkeypatch, together, sizes)
    d.link.go_on()
    for _ in range(3):
        d.step(step_ms / 1e3)
    before, began = d.link.size, d.clock.now
    for _ in range(12):
        d.step(step_ms / 1e3)
    assert (d.link.size - before) / (d.clock.now - began) >= 0.9 * LINK
    assert max(d.device.enqueued) <= LAUNCHES, "of a step, however many layers and requests it has"
    assert d.loaded


def test_chunks_come_back_when_their_copy_is_complete_and_not_with_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of(0)._replace(staging=16 * FRAME_BYTES)
    d = Decode(monkeypatch, 1, sizes)
    d.link.go_on()
    d.clock.advance(1.0)
    assert d.link.size == sizes.staging, "no more than there are chunks"
    d.loading.poll(calm=False)
    d.clock.advance(d.clock.now + 2 * sizes.staging / BUS + 17 * FRAME_BYTES / LINK)
    assert d.link.size == 2 * sizes.staging, "the next ones have come without a step of decode"
