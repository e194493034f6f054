"""The loads of one rank: asked for, counted as blocks arrive, reported once nothing can be written into them any more.

Belongs here: what the engine's thread does for them. Does not belong here: decisions (``kv.receiving``), sockets and bytes
(``session.receiver``, which has placed the blocks that it tells of). All methods are called by the engine's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

from xpyd_sidecar.engine.reports import LINK, ExpectOrder, LoadOrder, LoadReport, Orders, StepReport
from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.kv import receiving
from xpyd_sidecar.kv.fetch_steps import FetchPlan
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import Source
from xpyd_sidecar.kv.receiving import Instruction, LoadFinished, LoadSource, Order, Receiving, WantTry
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.session.receiver import FetchedBlocks, Receiver
from xpyd_sidecar.session.transfer_trace import Forwards, TransferTrace, pack_note
from xpyd_sidecar.threads.idle_polling import NAP_S

UNHEARD_STEPS: Final = 2
"""Steps that may be under way when a load is over: the scheduler hears of a step when it has planned another one."""


class BlockLoader:
    """Loads KV blocks of one rank: has them fetched, and says when they are in their places."""

    def __init__(self, rank: int, memory: KvCache, receiver: Receiver, loads: Receiving, *, ahead: bool,
                 forwards: Forwards) -> None:
        """``ahead``: blocks are fetched before there is a place for them, as far as the lookup buffer has room."""
        self.report = StepReport()
        """What has ended and come; the owner takes it away."""
        self._rank = rank
        self._memory = memory
        self._receiver = receiver
        self._loads = loads
        self._ahead = ahead
        self._forwards = forwards
        self._noting = TransferTrace()
        self._done: list[LoadFinished] = []
        self._unheard = 0
        """Steps in which the scheduler may not have heard yet of loads that are over: none of them naps."""
        self._moment: CopyMark | None = None
        """Of the step whose loads begin."""

    def start(self, orders: Orders, moment: CopyMark | None = None) -> None:
        """Begin the loads of a step, and end those that are to be ended.

        ``moment``: on a device, when their blocks were allotted, in the order of its compute stream.
        """
        now = time.monotonic()
        self._moment = moment
        for expect in orders.expects:
            self._expect(expect)
        for order in orders.loads:
            self._noting.mark(order.source.key, "asked")
            self._carry_out(self._loads.load(self._order(order), now))
        for key in orders.progress:
            self._loads.on_progress(key)
        for fail in orders.fails:
            self._carry_out(self._loads.fail(fail.request, fail.key, fail.outcome, fail.reason))
        for request in orders.abandons:
            self._carry_out(self._loads.abandon(request))
        self._moment = None

    def _order(self, order: LoadOrder) -> Order:
        sources = []
        for one in order.plan[self._rank]:
            place = order.source.data[one.rank]
            sources.append(LoadSource(place.address, place.incarnation, self._plan(one, order.source.content)))
        return Order(order.request, order.source.key, order.tables, tuple(sources), order.limit_s)

    def _expect(self, expect: ExpectOrder) -> None:
        """A request that has no blocks yet: its sources tell what they have."""
        source = expect.source
        self._noting.mark(source.key, "asked")
        for at, one in enumerate(expect.plan[self._rank]):
            place = source.data[one.rank]
            slots = sum(expect.blocks[self._memory.groups[part.into]] for _, part in one.parts)
            plan = self._plan(one, source.content)._replace(slots=slots, ahead=self._ahead)
            self._receiver.carry_out(WantTry("", source.key, at, place.address, place.incarnation, plan))

    def _plan(self, one: Source, identity: bytes) -> FetchPlan:
        """What is taken of a source, with the tables of this rank's groups."""
        parts = {region: part._replace(table=self._memory.groups[part.into]) for region, part in one.parts}
        return FetchPlan(one.arrays, parts, one.takers, identity)

    def poll(self, *, calm: bool) -> tuple[set[str], set[str]]:
        """Take in what has arrived; a calm engine's worker that loads something waits a little for the end of a load.

        Requests whose load is over, and those of them that failed.
        """
        now = time.monotonic()
        naps = calm and not self._unheard and bool(self._loads.open or self._done)
        end = now + NAP_S if naps else now
        self._unheard = max(0, self._unheard - 1)
        self._take_in(now)
        while now < end and not self._done:
            self._receiver.inbox.nap(end - now)
            now = time.monotonic()
            self._take_in(now)
        return self._take_done()

    def _take_in(self, now: float) -> None:
        for _ in range(len(self._receiver.inbox)):
            event = self._receiver.inbox.popleft()
            if isinstance(event, FetchedBlocks):
                self.report.count(LINK + event.link, event.size)
                self._noting.piece(event.key, event.at, event.at, event.size, event.link)
                self._carry_out(self._loads.on_arrived(event.key, event.source, event.blocks, event.size))
            else:
                self._carry_out(self._loads.on_source_lost(event.key, event.source, (event.outcome, event.reason), now,
                                                   final=event.final))
        self._carry_out(self._loads.tick(now))

    def _take_done(self) -> tuple[set[str], set[str]]:
        over: set[str] = set()
        failed: set[str] = set()
        waiting: list[LoadFinished] = []
        for one in self._done:
            if not self._receiver.is_settled(one.request):
                waiting.append(one)  # something is still being written into its blocks
                continue
            over.add(one.request)
            if one.outcome is not Outcome.OK:
                failed.add(one.request)
            self.report.loads.append(LoadReport(self._rank, one.request, one.key, one.outcome, one.reason, one.size))
            self._loaded(one)
        self._done = waiting
        if over:
            self._unheard = UNHEARD_STEPS
        return over, failed

    def _loaded(self, one: LoadFinished) -> None:
        if one.outcome is Outcome.OK:
            self._noting.mark(one.key, "committed")
        if (noted := self._noting.end(one.key)) is not None:
            others = self._forwards.spans_since(noted.marks.get("asked", math.inf))
            self.report.load_notes.append((one.key, pack_note(self._rank, noted, others)))

    def _carry_out(self, steps: Sequence[Instruction]) -> None:
        for step in steps:
            if isinstance(step, receiving.LoadFinished):
                self._receiver.close(step.request)
                self._done.append(step)
            else:
                self._receiver.carry_out(step, self._moment)
