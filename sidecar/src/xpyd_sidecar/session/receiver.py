"""Decode's I/O thread of one rank: connects to prefill ranks, asks for transfers, receives into staging and checks.

Where a try has a target (``transport.gates``), bytes are written right into its blocks; else into a chunk of staging
memory. What is intact is put into ``inbox`` for the engine's thread, which counts it (``kv.receiving``), places what is in
a chunk and gives the chunk back. When all chunks are in use the connections that need one are not read.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from xpyd_sidecar import resources
from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.receiving import Ask, Cancel, Confirm, Pull
from xpyd_sidecar.kv.stores import Fetch
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.session.decode_endpoint import DecodeEndpoint
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.session.lookup_buffer import Expecting, LookupBuffer
from xpyd_sidecar.session.receiver_events import Arrived, Broken, ReceiverContext
from xpyd_sidecar.threads.idle_polling import Inbox
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.threads.watched import Watched
from xpyd_sidecar.transport.gates import CacheArray, Gate, LoadTarget

ADDRESSES_MAX: Final = 4096


class Receiver:
    """The thread."""

    def __init__(self, me: LocalRank, staging: Staging, *, block_bytes: Sequence[int], cover: bool,
                 make: Callable[[int], Chunk], caches: Sequence[CacheArray | None] = (), buffer_bytes: int = 0,
                 pool_bytes: int = 0, claim_s: float = 0.0) -> None:
        """``block_bytes``: bytes of a block, by array of the cache; ``caches``: those that may be written directly.

        ``make``, ``buffer_bytes``, ``pool_bytes``, ``claim_s``: of the buffer for what comes before it is asked for.
        """
        self.inbox: Inbox[Arrived | Broken] = Inbox()
        self.staging = staging
        self._caches = tuple(caches)
        self._gates: dict[str, dict[Key, Gate]] = {}
        """By request and try; of the engine's thread alone."""
        self._me = me
        self._sources: dict[tuple[HostPort, Incarnation], DecodeEndpoint] = {}
        self._of_key: dict[tuple[Key, int], DecodeEndpoint] = {}
        """By try and place among its sources."""
        self._loop = Loop("xpyd-receiver", self._tick)
        self.thread: Watched = self._loop.thread
        self._loop.at_end(self._close_all)
        self.ahead = LookupBuffer(make, buffer_bytes=buffer_bytes, pool_bytes=pool_bytes, block_bytes=tuple(block_bytes),
                                  cover=cover, ttl_s=claim_s, post=self._loop.post)
        self._shared = ReceiverContext(me, staging, self.inbox, cover, self.ahead, self._broken)
        staging.on_free(lambda: self._loop.post(self._resume))
        if me.grouping is not None:
            me.grouping.staging.on_free(lambda: self._loop.post(self._resume))
        self._loop.start()

    # --- from the engine's thread ---

    def carry_out(self, step: Ask | Pull | Confirm | Cancel | Expecting) -> None:
        """Do what the machine says."""
        target = None
        if isinstance(step, Ask) and step.units and any(self._caches):
            gates = self._gates.setdefault(step.request, {})
            for key, gate in gates.items():
                if key != step.key:
                    gate.close()
            tables = [(one.first, array("q", one.ids)) for one in step.tables]
            target = LoadTarget(gates.setdefault(step.key, Gate()), tables, step.groups, self._caches, step.units)
            if all(self._caches):
                step = step._replace(ready=replace(step.ready, frame=frames.DIRECT_BYTES))
        self._loop.post(partial(self._do, step, target))

    def close(self, request: str) -> None:
        """Nothing more is to be written for a request; ``settled`` says when nothing is."""
        for gate in self._gates.get(request, {}).values():
            gate.close()

    def settled(self, request: str) -> bool:
        """Whether nothing is written into the blocks of a request that was closed."""
        if not all(gate.done() for gate in self._gates.get(request, {}).values()):
            return False
        self._gates.pop(request, None)
        return True

    def stop(self) -> None:
        """End the thread and close every connection."""
        self.staging.on_free(None)
        if self._me.grouping is not None:
            self._me.grouping.staging.on_free(None)
        self._loop.stop()

    # --- on the loop's thread ---

    def _do(self, step: Ask | Pull | Confirm | Cancel | Expecting, target: LoadTarget | None) -> None:
        if isinstance(step, Ask):
            self._ask(step, target)
            return
        if isinstance(step, Expecting):
            self._expect(step)
            return
        if isinstance(step, Pull):
            if (owes := self._of_key.get((step.key, step.source))) is not None:
                owes.tell(FrameKind.FETCH, step.key, Fetch(step.until))
            return
        source = self._of_key.pop((step.key, step.source), None)
        if source is None:
            return
        source.asked.pop(step.key, None)
        if isinstance(step, Confirm):
            source.tell(FrameKind.DONE, step.key)
        else:
            source.tell(FrameKind.CANCEL, step.key, bodies.Reason(step.outcome, step.reason))

    def _ask(self, step: Ask, target: LoadTarget | None) -> None:
        source = self._source(step.address, step.incarnation)
        if isinstance(source, DecodeEndpoint):
            self._of_key[step.key, step.source] = source
            source.ask(step, target)
        else:
            self.inbox.append(Broken(step.key, *source, step.source))
        if not step.plain:
            return
        for one, chunk in self.ahead.claim(step.key, step.identity, step.ready):
            self._shared.arrived(step, one.region, one.first, one.blocks, chunk, one.size, "buffer")

    def _source(self, address: HostPort, incarnation: Incarnation) -> DecodeEndpoint | tuple[Outcome, str, bool]:
        """The connection to a prefill rank, or why there is none (and whether that is final)."""
        source = self._sources.get((address, incarnation))
        if source is None:
            if len(self._sources) >= ADDRESSES_MAX:
                return Outcome.OVERFLOW, f"{ADDRESSES_MAX} data links are open", True
            try:
                source = DecodeEndpoint(self._shared, self._loop, address, incarnation, ended=self._lost)
            except (OSError, ValueError) as error:
                if resources.ours(error):
                    return Outcome.OVERFLOW, f"decode cannot connect: {resources.words(error)}", True
                return Outcome.PEER_LOST, f"{address}: {error}", False
            self._sources[address, incarnation] = source
        return source

    def _expect(self, step: Expecting) -> None:
        source = self._source(step.address, step.incarnation)
        if not isinstance(source, DecodeEndpoint):
            return  # the load will find that out
        body, gone = self.ahead.expect(step, time.monotonic())
        self._unclaimed(gone, "too many others are waited for")
        if body is not None:
            source.expect(step.key)
            source.tell(FrameKind.EXPECT, step.key, body)

    def _unclaimed(self, keys: Sequence[Key], reason: str) -> None:
        for key in keys:
            for source in self._sources.values():
                if key in source.expected:
                    source.expected.discard(key)
                    source.tell(FrameKind.CANCEL, key, bodies.Reason(Outcome.DEADLINE, reason))

    def _broken(self, step: Ask, outcome: Outcome, reason: str, final: bool) -> None:
        """What was asked for will not come."""
        self._of_key.pop((step.key, step.source), None)
        self.inbox.append(Broken(step.key, outcome, reason, final, step.source))

    def _lost(self, source: DecodeEndpoint) -> None:
        """A connection has ended."""
        self._sources.pop(source.place, None)

    def _resume(self) -> None:
        for source in list(self._sources.values()):
            source.resume()

    def _tick(self, now: float) -> None:
        self._unclaimed(self.ahead.tick(now), "no request has claimed it in decode's buffer")
        for source in list(self._sources.values()):
            source.tick(now, self._me.peer_timeout_s)

    def _close_all(self) -> None:
        for source in list(self._sources.values()):
            source.link.close(PeerGone(source.link.peer, "this engine stops"))
