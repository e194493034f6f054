"""The loads of one rank: asked for, placed as blocks arrive, reported once nothing can be written into them any more.

Belongs here: what the engine's thread does for them. Does not belong here: decisions (``kv.receiving``), sockets
(``receiver``). All methods are called by the engine's own thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.engine.kv_cache import KvCache, Move
from xpyd_sidecar.engine.reports import LoadReport, Orders, StepReport
from xpyd_sidecar.engine.stats import LINK
from xpyd_sidecar.kv import receiving
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.messages import ListeningRank
from xpyd_sidecar.kv.receiving import Finished, From, Instruction, Order, Receiving
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.session.lookup_buffer import Expecting
from xpyd_sidecar.session.receiver import Receiver
from xpyd_sidecar.session.receiver_events import Arrived
from xpyd_sidecar.session.transfer_trace import Forwards, TransferTrace, packed
from xpyd_sidecar.threads.idle_polling import NAP_S


class Loading:
    """Of one rank."""

    def __init__(self, rank: int, memory: KvCache, receiver: Receiver, loads: Receiving, *, staging: Staging,
                 forwards: Forwards, completions: Completions) -> None:
        self.report = StepReport()
        """What has ended and come; the owner takes it away."""
        self._rank = rank
        self._memory = memory
        self._staging = staging
        self._receiver = receiver
        self._loads = loads
        self._forwards = forwards
        self._noting = TransferTrace()
        self._completions = completions
        self._moves: list[tuple[str, Chunk, Move]] = []
        """Of this poll: the request, what its blocks are in, and where they go."""
        self._marks: dict[str, CopyMark] = {}
        self._done: list[Finished] = []

    def start(self, orders: Orders) -> None:
        """Begin the loads of a step, and end those that are to be ended."""
        now = time.monotonic()
        for order in orders.loads:
            self._noting.mark(order.source.key, "asked")
            sources = tuple(From(*_place(order.source.data[one.rank]), one.parts, one.takers, one.whole)
                            for one in order.plan[self._rank])
            self._carry_out(self._loads.load(Order(order.request, order.source.key, order.tables, sources,
                                                   order.source.identity, order.limit_s), now))
        for key in orders.progress:
            self._loads.progressed(key)
        for expect in orders.expects:
            source = expect.source
            place = source.data[self._rank]
            slots = sum(expect.blocks[group] for group in self._memory.groups)
            self._receiver.carry_out(Expecting(*_place(place), source.key, source.identity, slots))
        for fail in orders.fails:
            self._carry_out(self._loads.fail(fail.request, fail.key, fail.outcome, fail.reason))
        for request in orders.abandons:
            self._carry_out(self._loads.abandon(request))

    def poll(self, *, calm: bool) -> tuple[set[str], set[str]]:
        """Place what has arrived; a calm engine's worker waits a little for the end of a load.

        Requests whose load is over, and those of them that failed.
        """
        now = time.monotonic()
        end = now + NAP_S if calm else now
        self._take_in(now)
        while now < end and not (self._done or self._marks):
            self._receiver.inbox.nap(end - now)
            now = time.monotonic()
            self._take_in(now)
        return self._take_done()

    def _take_in(self, now: float) -> None:
        for _ in range(len(self._receiver.inbox)):
            event = self._receiver.inbox.popleft()
            if isinstance(event, Arrived):
                self._place(event)
            else:
                self._carry_out(self._loads.broken(event.key, event.source, (event.outcome, event.reason), now,
                                                   final=event.final))
        self._carry_out(self._loads.tick(now))
        self._scatter()

    def _scatter(self) -> None:
        """Copy all that has arrived into its blocks, together; chunks go back when that is complete."""
        if not self._moves:
            return
        moves, self._moves = self._moves, []
        mark = self._memory.scatter([move for *_, move in moves])
        for request, *_ in moves:
            self._marks[request] = mark
        self._completions.add(mark, partial(self._give_back, [chunk for _, chunk, _ in moves]))

    def _give_back(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._staging.give(chunk)

    def _place(self, event: Arrived) -> None:
        place = self._loads.arrived(event.key, event.source, event.region, (event.first, event.blocks), event.size)
        if place is None:
            if event.chunk is not None:
                self._staging.give(event.chunk)
            return
        self.report.count(LINK + event.way, event.size)
        self._noting.piece(event.key, event.at, event.at, event.size, event.way)
        if event.chunk is None:  # it is in its blocks
            self._carry_out(self._loads.placed(event.key))
            return
        whole = event.chunk.tensor  # one that is nearly full goes as it is, with its neighbours
        packed = whole if 2 * event.size > len(whole) else whole[:event.size]
        self._moves.append((place.request, event.chunk, Move(place.region, np.array(place.ids, np.int64), packed,
                                                             head=place.head, heads=place.heads)))
        self._carry_out(self._loads.placed(event.key))

    def _take_done(self) -> tuple[set[str], set[str]]:
        over: set[str] = set()
        failed: set[str] = set()
        waiting: list[Finished] = []
        for one in self._done:
            mark = self._marks.get(one.request)
            if (mark is not None and not mark.done()) or not self._receiver.settled(one.request):
                waiting.append(one)  # copies into its blocks are still on their way
                continue
            self._marks.pop(one.request, None)
            over.add(one.request)
            if one.outcome is not Outcome.OK:
                failed.add(one.request)
            self.report.loads.append(LoadReport(self._rank, one.request, one.key, one.outcome, one.reason, one.size))
            self._loaded(one)
        self._done = waiting
        return over, failed

    def _loaded(self, one: Finished) -> None:
        if one.outcome is Outcome.OK:
            self._noting.mark(one.key, "committed")
        if (noted := self._noting.end(one.key)) is not None:
            others = self._forwards.since(noted.marks.get("asked", math.inf))
            self.report.load_notes.append((one.key, packed(self._rank, noted, others)))

    def _carry_out(self, steps: Sequence[Instruction]) -> None:
        for step in steps:
            if isinstance(step, receiving.Finished):
                self._receiver.close(step.request)
                self._done.append(step)
            else:
                self._receiver.carry_out(step)


def _place(rank: ListeningRank) -> tuple[HostPort, Incarnation]:
    return rank.address, rank.incarnation
