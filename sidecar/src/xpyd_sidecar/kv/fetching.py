"""Decode's I/O side: which pieces are fetched when and into what, and what prefill hears of it. One machine for a rank.

Laws
1. TAKEN is said once for each manifest in a session: when every piece of it that was wanted is in this engine's own memory,
   and their sums are, where sums are wanted; or when nothing of it is wanted (any more). What was taken and is told again,
   since its TAKEN was lost, is answered at once.
2. Bytes go into blocks only while their try is current and has blocks; into the buffer only before. A range of the ring is
   taken only for a try that has blocks. What is in the buffer when a try has blocks is placed from there, also what another
   try of the same prompt has brought whole.
3. Every fetch that was begun is answered once, by ``on_fetched`` or ``on_fetch_failed``, whatever became of its try or
   session; what it fills is free then, or, where ``Place`` was said of it, when that is answered by ``on_placed``. Not
   before.
4. Blocks are reported as arrived only when they are in their places and their sums are right, where sums are wanted. A
   wrong one is told as ``WrongSum``.
5. What was said TAKEN to and leaves the buffer before its try has blocks does not come again: ``LeftBuffer`` is said, and
   instead of ASK where such a try, or one that was given up, is begun once more: its source may not have heard of that yet,
   and what comes from it may mean bytes that are freed.
6. What a session has in flight is bounded: by its share of the ring, or by ``window`` where blocks are written directly.
   Sessions take turns.

    told ──nothing wanted──▶ taken             told, no blocks ──room──▶ buffered ──▶ taken ──allot──▶ placing ──▶ arrived
      └─ blocks ─▶ queued ──room──▶ fetching ──▶ taken, placing ──▶ arrived        └─no room: held (BUSY, if pressed)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.kv.buffer import Buffer, BufferPlace, TryId
from xpyd_sidecar.kv.fetch_flights import Flights
from xpyd_sidecar.kv.fetch_state import BufferedPiece, FetchTry, Flight, ManifestState, QueuedFetch, batch_sums, cut_of
from xpyd_sidecar.kv.fetch_steps import (
    BlocksArrived,
    Fetch,
    FetchPlan,
    LeftBuffer,
    Place,
    SayFrame,
    Step,
    TryError,
    WrongSum,
)
from xpyd_sidecar.kv.keys import Key, Recent
from xpyd_sidecar.kv.manifests import Ask, Busy, Manifest, ManifestTaken, Sums
from xpyd_sidecar.kv.packing import NO_SUMS, WORD
from xpyd_sidecar.kv.reach import ArraySpan, TableSpan
from xpyd_sidecar.kv.ring import Ring
from xpyd_sidecar.kv.selection import Piece, batches, narrow_pieces, pieces, places, sums_in, wanted_of

MANIFESTS_MAX: Final = 1 << 16
"""Of one try in one session: chunks of a prompt times groups of layers."""


class Fetching:
    """The machine. Numbers of sessions (``link``) are not used twice."""

    def __init__(self, ring: Ring, buffer: Buffer[BufferedPiece], *, piece: int, window: int, cover: bool) -> None:
        """Begin with nothing.

        Args:
            ring: what is fetched for blocks goes through it; of no bytes: into the blocks directly.
            buffer: where what is fetched before there are blocks goes.
            piece: bytes of one piece, in so far as a run has no more.
            window: bytes in flight beside the ring, by session.
            cover: sums are wanted.
        """
        self.ring = ring
        self.buffer = buffer
        self._piece = piece
        self._cover = cover
        self._tries: dict[TryId, FetchTry] = {}
        self._queues: OrderedDict[int, deque[QueuedFetch]] = OrderedDict()
        """By session: what is to be fetched, in order."""
        self._flights = Flights(ring, buffer, window)
        self._spent: Recent[TryId, None] = Recent()
        """Tries that are over and cannot be begun again."""
        self.at_hand: set[int] = set()
        """Sessions over whose link what is fetched late costs no more: nothing is fetched ahead unless it is pressed."""

    def __contains__(self, ident: object) -> bool:
        """Whether a try is being taken."""
        return ident in self._tries

    def busy(self, link: int) -> bool:
        """Whether anything is expected of a session."""
        return any(one.link == link for one in self._tries.values())

    def waits(self, link: int) -> bool:
        """Whether a session has something in flight, or to be fetched."""
        return bool(self._queues.get(link)) or any(one.link == link for one in self._flights.values())

    # --- tries ---

    def begin(self, ident: TryId, link: int, plan: FetchPlan, now: float) -> list[Step]:
        """Take a try from a source, over this session; again, with another one, where the one before has ended."""
        known = self._tries.get(ident)
        if known is None and ident in self._spent:
            return [LeftBuffer(*ident)]
        out: list[Step] = [SayFrame(link, ident[0], Ask(plan.takers, not plan.parts))]
        if known is None:
            self._tries[ident] = FetchTry(plan, link)
            if plan.parts and plan.slots:
                out += self._left_buffer(self.buffer.expect(ident, plan.content, plan.slots, now))
        else:
            self._leave_session(ident, known)
            known.link = link
        return out

    def allot(self, ident: TryId, tables: tuple[TableSpan, ...]) -> list[Step]:
        """A try has blocks."""
        one = self._tries.get(ident)
        if one is None or one.tables is not None:
            return []
        one.tables = tables
        out = [*self._queue_for_blocks(ident, one, tables), *self._place_buffered(ident, one, tables)]
        for state in list(one.told.values()):
            if not state.taken and not state.queued:
                out += self._queue(ident, one, state)
        return [*out, *self._pump()]

    def _queue_for_blocks(self, ident: TryId, one: FetchTry, tables: tuple[TableSpan, ...]) -> list[Step]:
        """What was to be fetched ahead and has not begun is fetched into the blocks, as far as there are some for it."""
        queue, out = self._queues.get(one.link, deque[QueuedFetch]()), list[Step]()
        for _ in range(len(queue)):
            entry = queue.popleft()
            if entry.owner == ident:
                state = one.told[entry.manifest]
                batch = tuple(narrow_pieces(state.manifest, one.plan.arrays, one.plan.parts, tables, entry.batch,
                                            self._piece))
                if not batch:
                    state.missing -= 1
                    out += self._taken_if_here(one, ident[0], state)
                    continue
                entry = entry._replace(batch=batch, ahead=False)
            queue.append(entry)
        return out

    def _place_buffered(self, ident: TryId, one: FetchTry, tables: tuple[TableSpan, ...]) -> list[Step]:
        """What is in the buffer of a try, or whole of another one with the same prompt, goes into the blocks."""
        entry = ident if self.buffer.has_some(ident) else self.buffer.find_content(ident, one.plan.content)
        spans = [ArraySpan(region, 1, tables[part.table].first, len(tables[part.table].ids))
                 for region, part in one.plan.parts.items() if part.table]
        items = self.buffer.drop_select(entry, tables[0].first, len(tables[0].ids), spans) if entry is not None else []
        self.buffer.forget(ident)
        out: list[Step] = []
        for cut, place, kept in items:
            if kept.owner != ident and self._cover and kept.sums is None:
                self.buffer.free(place)
                continue
            number = self._flights.add(
                Flight(ident, one.link, kept.manifest, (kept.piece,), cut.size, place, True, kept.sums))
            out.append(self._place(number, ident, one, place))
        return out

    def cancel(self, ident: TryId, *, forget: bool = True, given_up: bool = False) -> list[Step]:
        """A try is over. What is in flight for it still has to be answered.

        Args:
            ident: the try, and which of its sources.
            forget: what is in the buffer of it is of no use to another try either.
            given_up: its source is told that it is over: what it has told before may still be on its way.
        """
        one = self._tries.pop(ident, None)
        if one is None:
            return []
        self._leave_session(ident, one)
        if forget:
            self.buffer.forget(ident)
        else:
            self.buffer.drop_unfinished(ident)
        lacks = one.tables is None and one.taken & one.buffered.keys() and ident not in self.buffer
        if given_up or lacks:
            self._spent.put(ident, None)
        return self._pump()

    def on_session_lost(self, link: int) -> list[TryId]:
        """A session has ended: the tries that were taken over it. ``begin`` goes on with them, or ``cancel`` ends them."""
        out = []
        for ident, one in self._tries.items():
            if one.link == link:
                self._leave_session(ident, one)
                out.append(ident)
        self._queues.pop(link, None)
        self.at_hand.discard(link)
        self.ring.on_session_ended(link)
        return out

    def tick(self, now: float) -> list[TryId]:
        """Time passes: tries of which something was fetched ahead that no request has claimed in time."""
        return self.buffer.tick(now)

    def reset(self) -> list[Step]:
        """Nothing that was fetched ahead so far is of any use."""
        return self._left_buffer(self.buffer.clear())

    def on_request_ended(self, key: Key) -> None:
        """The request of a try has ended: what was fetched ahead of it is of no use, also where its source is lost."""
        for ident in self.buffer.entries(key):
            self.buffer.forget(ident)

    def _left_buffer(self, idents: Iterable[TryId]) -> list[Step]:
        """What was fetched ahead of these has left the buffer. What was not all here waits for blocks."""
        out: list[Step] = []
        for ident in idents:
            one = self._tries.get(ident)
            if one is None or one.tables is not None:
                continue
            for number, state in one.told.items():
                if state.queued and not state.taken:
                    out += self._unqueue(one.link, ident, number)
            if one.taken & one.buffered.keys():
                self._spent.put(ident, None)
                out.append(LeftBuffer(*ident))
            one.buffered.clear()
        return out

    def _leave_session(self, ident: TryId, one: FetchTry) -> None:
        """What was told in a session is told again in the next, but for what was taken."""
        for flight in self._flights.values():
            if flight.owner == ident and not flight.here:
                flight.owner = None
                self._withdraw(ident, flight.batch)
        queue = self._queues.get(one.link)
        if queue:
            for entry in queue:
                if entry.owner == ident:
                    self._withdraw(ident, entry.batch)
            self._queues[one.link] = deque(entry for entry in queue if entry.owner != ident)
        one.told.clear()

    def _withdraw(self, ident: TryId, batch: tuple[Piece, ...]) -> None:
        for piece in batch:
            self.buffer.withdraw(ident, cut_of(piece))

    # --- what prefill says ---

    def on_manifest(self, link: int, ident: TryId, manifest: Manifest) -> list[Step]:
        """There is a manifest.

        Raises:
            TryError: it was told before in this session, or names what there cannot be.
        """
        one = self._tries.get(ident)
        if one is None or one.link != link:
            return [SayFrame(link, ident[0], ManifestTaken(manifest.number))]
        if manifest.number in one.told or len(one.told) >= MANIFESTS_MAX:
            raise TryError(f"told of manifest {manifest.number} twice, or of more than {MANIFESTS_MAX}")
        state = one.told[manifest.number] = ManifestState(manifest, 0)
        found = self._wanted(one, manifest)
        if not found or manifest.number in one.taken:
            return self._taken(one, ident[0], state)
        if one.tables is not None:
            return [*self._queue(ident, one, state), *self._pump()]
        if one.plan.ahead and link not in self.at_hand and self._queue_ahead(ident, one, state, found):
            return [*self._taken_if_here(one, ident[0], state), *self._pump()]
        return []

    def on_press(self, link: int, ident: TryId, number: int, retry_s: float) -> list[Step]:
        """Prefill's store is short: a manifest goes into the buffer, if it has room, or is asked for again later."""
        one = self._tries.get(ident)
        if one is None or one.link != link or (state := one.told.get(number)) is None or state.taken or state.queued:
            return []
        if self._queue_ahead(ident, one, state, self._wanted(one, state.manifest)):
            state.pressed_s = retry_s
            return [*self._taken_if_here(one, ident[0], state), *self._pump()]
        return [SayFrame(link, ident[0], Busy(number, retry_s))]

    def on_sums(self, link: int, ident: TryId, sums: Sums) -> list[Step]:
        """The sums of a manifest.

        Raises:
            TryError: of none that was told, or not as many as it has.
        """
        one = self._tries.get(ident)
        if one is None or one.link != link:
            return []
        state = one.told.get(sums.number)
        if state is None or len(sums.sums) != WORD * sums_in(state.manifest, one.plan.arrays):
            raise TryError(f"{len(sums.sums)} bytes of sums of manifest {sums.number}")
        one.sums[sums.number] = every = np.frombuffer(sums.sums, "<u8")
        for kept in one.buffered.get(sums.number, []):
            kept.sums = kept.piece.sums_in(every)
        out = self._taken_if_here(one, ident[0], state)
        for batch, made in one.unproved.pop(sums.number, []):
            out += self._proved(ident, one, batch, made, batch_sums(batch, every))
        return out

    # --- what links and copies say ---

    def on_fetched(self, number: int, sums: NDArray[np.uint64] = NO_SUMS) -> list[Step]:
        """All bytes of a fetch are in this engine's memory, and prefill still vouched for them afterwards.

        ``sums``: as of ``on_placed``, where it went into its blocks directly.
        """
        flight = self._flights[number]
        assert not flight.here
        flight.here = True
        self._flights.land(flight)
        owner = flight.owner
        one = self._tries.get(owner) if owner is not None else None
        if one is None or owner is None:
            self._flights.drop(number)
            return self._pump()
        state = one.told[flight.manifest]
        state.missing -= 1
        out = self._taken_if_here(one, owner[0], state)
        if isinstance(flight.at, BufferPlace):
            return [*out, *self._insert(number, flight, owner, one), *self._pump()]
        if flight.at is not None:
            return [self._place(number, owner, one, flight.at), *out, *self._pump()]
        one.note_here(flight.manifest, flight.batch)
        return [*out, *self.on_placed(number, sums)]

    def _place(self, number: int, owner: TryId, one: FetchTry, at: int | BufferPlace) -> Place:
        """What has come is about to be in its blocks."""
        flight = self._flights[number]
        one.note_here(flight.manifest, flight.batch)
        return Place(number, *owner, flight.batch, at)

    def _insert(self, number: int, flight: Flight, owner: TryId, one: FetchTry) -> list[Step]:
        """What was fetched ahead is in the buffer; a try that has blocks by now has it placed, if any is for it."""
        (piece,), at = flight.batch, flight.at
        assert isinstance(at, BufferPlace)
        if one.tables is not None and wanted_of(piece, one.plan.parts, one.tables)[1]:
            return [self._place(number, owner, one, at)]
        if one.tables is not None:
            self._flights.drop(number)
            return []
        del self._flights[number]
        every = one.sums.get(flight.manifest)
        kept = BufferedPiece(piece, owner, flight.manifest, piece.sums_in(every) if every is not None else None)
        if self.buffer.insert(owner, cut_of(piece), at, kept):
            one.buffered.setdefault(flight.manifest, []).append(kept)
        return []

    def on_fetch_failed(self, number: int) -> list[Step]:
        """Nothing of a fetch will come any more, and nothing writes into what it was to fill."""
        flight = self._flights[number]
        assert not flight.here
        self._flights.land(flight)
        if flight.owner is not None:
            self._withdraw(flight.owner, flight.batch)
        self._flights.drop(number)
        return self._pump()

    def on_placed(self, number: int, sums: NDArray[np.uint64]) -> list[Step]:
        """A fetch is in its blocks. ``sums``: as they were made there, piece by piece; what is not wanted may be empty."""
        flight = self._flights[number]
        assert flight.here
        self._flights.drop(number)
        owner = flight.owner
        one = self._tries.get(owner) if owner is not None else None
        if one is None or owner is None:
            return self._pump()
        out: list[Step] = []
        if not self._cover:
            out.append(self._arrived(owner, flight.batch))
        elif flight.sums is not None:
            out += self._proved(owner, one, flight.batch, sums, flight.sums)
        elif (every := one.sums.get(flight.manifest)) is not None:
            out += self._proved(owner, one, flight.batch, sums, batch_sums(flight.batch, every))
        else:
            one.unproved.setdefault(flight.manifest, []).append((flight.batch, sums))
        return [*out, *self._pump()]

    def on_not_placed(self, number: int) -> list[Step]:
        """A fetch is not placed, since its load is over."""
        self._flights.drop(number)
        return self._pump()

    def _proved(self, owner: TryId, one: FetchTry, batch: tuple[Piece, ...], made: NDArray[np.uint64],
                expected: NDArray[np.uint64]) -> list[Step]:
        if np.array_equal(expected, made):
            return [self._arrived(owner, batch)]
        return [WrongSum(one.link, owner[0])]

    @staticmethod
    def _arrived(owner: TryId, batch: tuple[Piece, ...]) -> BlocksArrived:
        return BlocksArrived(*owner, tuple((piece.region, piece.packed.first, piece.packed.blocks) for piece in batch),
                       sum(piece.size for piece in batch))

    # --- room ---

    def _wanted(self, one: FetchTry, manifest: Manifest) -> list[Piece]:
        try:
            return pieces(manifest, one.plan.arrays, one.plan.parts, one.tables, self._piece)
        except ValueError as error:
            raise TryError(str(error)) from None

    def _taken_if_here(self, one: FetchTry, key: Key, state: ManifestState) -> list[Step]:
        here = state.queued and not state.missing and (not self._cover or state.manifest.number in one.sums)
        return self._taken(one, key, state) if here and not state.taken else []

    def _taken(self, one: FetchTry, key: Key, state: ManifestState) -> list[Step]:
        state.taken = True
        one.taken.add(state.manifest.number)
        return [SayFrame(one.link, key, ManifestTaken(state.manifest.number))]

    def _queue(self, ident: TryId, one: FetchTry, state: ManifestState) -> list[Step]:
        """All that is wanted of a manifest, and not here, is to be fetched."""
        found = self._wanted(one, state.manifest)
        if not found:
            return self._taken(one, ident[0], state)
        made = [*batches((piece for piece in found if (state.manifest.number, cut_of(piece)) not in one.here), self._most)]
        state.queued, state.missing = True, len(made)
        if not made:
            return self._taken_if_here(one, ident[0], state)
        self._queues.setdefault(one.link, deque()).extend(
            QueuedFetch(ident, state.manifest.number, batch) for batch in made)
        return []

    def _queue_ahead(self, ident: TryId, one: FetchTry, state: ManifestState, found: list[Piece]) -> bool:
        """A manifest is to be fetched into the buffer, if there is room for all of it that is not there.

        Raises:
            TryError: it has blocks that were fetched ahead before, or more than the prompt has.
        """
        found = [piece for piece in found if not self.buffer.has(ident, cut_of(piece))]
        try:
            room = self.buffer.offer(ident, [cut_of(piece) for piece in found])
        except ValueError as error:
            raise TryError(str(error)) from None
        if room:
            state.queued, state.missing = True, len(found)
            self._queues.setdefault(one.link, deque()).extend(
                QueuedFetch(ident, state.manifest.number, (piece,), ahead=True) for piece in found)
        return room

    @property
    def _most(self) -> int:
        """Bytes of one fetch."""
        return min(self._piece, self.ring.session_bytes_max) if self.ring.size else self._piece

    def _pump(self) -> list[Step]:
        """Begin what there is room for; sessions take turns."""
        out: list[Step] = []
        going = True
        while going:
            going = False
            for link in list(self._queues):
                before = len(self._queues[link])
                if before and (begun := self._begin(link)):
                    out += begun
                    self._queues.move_to_end(link)
                going = going or len(self._queues[link]) < before
        for link in [link for link, queue in self._queues.items() if not queue]:
            del self._queues[link]
        return out

    def _begin(self, link: int) -> list[Step]:
        """Begin the next fetch of a session, if there is room."""
        owner, manifest, batch, ahead = self._queues[link][0]
        size = places(batch)[-1]
        at: int | BufferPlace | None = None
        if self.ring.size and not ahead:
            at = self.ring.take(link, size)
            if at is None:
                return []
        else:
            if not self._flights.fits(link, size):
                return []
            if ahead and (at := self.buffer.take(owner, cut_of(batch[0]))) is None:
                return self._unqueue(link, owner, manifest)
        self._queues[link].popleft()
        number = self._flights.add(Flight(owner, link, manifest, batch, size, at))
        return [Fetch(number, link, *owner, manifest, batch, at)]

    def _unqueue(self, link: int, owner: TryId, manifest: int) -> list[Step]:
        """Places of a manifest have left the buffer: what was fetched of it stands for nothing, and it waits for blocks."""
        state = self._tries[owner].told[manifest]
        state.queued = False
        if link in self._queues:
            self._queues[link] = deque(
                entry for entry in self._queues[link] if (entry.owner, entry.manifest) != (owner, manifest))
        for flight in self._flights.values():
            if (flight.owner, flight.manifest) == (owner, manifest) and not flight.here:
                flight.owner = None
        retry_s, state.pressed_s = state.pressed_s, 0.0
        return [SayFrame(link, owner[0], Busy(manifest, retry_s))] if retry_s else []

    def goes_on(self) -> set[tuple[int, Key]]:
        """Sessions and tries of which something is being fetched over them, or that wait for blocks."""
        waiting = {(one.link, key) for (key, _), one in self._tries.items() if one.tables is None and one.plan.parts}
        return waiting | {(one.link, one.owner[0]) for one in self._flights.values()
                          if one.owner is not None and not one.here}

    def flights(self) -> Iterator[int]:
        """Fetches that are not over."""
        return iter(self._flights)
