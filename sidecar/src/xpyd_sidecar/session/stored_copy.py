"""A copy of KV in prefill's store that decode fetches: its memory, its manifest and its checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import Manifest, layout
from xpyd_sidecar.kv.packing import sums_of
from xpyd_sidecar.kv.wire import NO_TRY
from xpyd_sidecar.memory.store import CopyStore, StoreLease
from xpyd_sidecar.transport import moves


class StoredCopy:
    """One range of blocks of several neighbouring arrays, packed into one lease of prefill's store. Used by one thread at a
    time.
    """

    def __init__(self, lease: StoreLease, arrays: Sequence[ArrayLayout], regions: range, blocks: tuple[int, int], *,
                 sums: bytes = b"", gone: Callable[[], None] | None = None) -> None:
        """Own a lease that holds packed KV.

        Args:
            lease: the memory in the store.
            arrays: layouts of all arrays of this rank.
            regions: indices of the arrays in the copy.
            blocks: index of the first block, and number of blocks.
            sums: checksums as in ``manifests.Sums``; empty: not made yet.
            gone: called once, when the memory has been given back.
        """
        self.key: Key = NO_TRY
        self.number = 0
        """Of its manifest."""
        self.sums = sums
        self.told: list[int] = []
        """Sessions that were told of it and wait for its sums."""
        self.summing = False
        """Its sums are to be made, or are being made."""
        self.told_at = 0.0
        """When the last of them was, by the monotonic clock."""
        self.freed = False
        self.offset = lease.offset
        """In the store."""
        self.view = lease.chunk.view
        self._held = 0
        self._store: CopyStore | None = None
        """Where it goes back to, once nobody sends of it."""
        self._lease = lease
        self._arrays = arrays
        self._shape = regions.start, len(regions), *blocks
        self._gone = gone

    @property
    def size(self) -> int:
        """Bytes of the store that the copy fills."""
        return len(self._lease.chunk.view)

    def manifest(self, number: int) -> Manifest:
        """The manifest by which decode finds the copy; ``number``: its place among those of one transfer attempt."""
        return Manifest(number, *self._shape, self._lease.offset)

    def sum_up(self) -> None:
        """Set ``sums`` to the checksums of all bytes of the copy (``kv.packing``), made on the calling thread.

        Raises:
            ValueError: the blocks and arrays of the copy make no valid manifest (``manifests.layout``).
        """
        view, made = self._lease.chunk.view, bytearray()
        for _, packed, offset in layout(self.manifest(0), self._arrays):
            some = view[offset - self._lease.offset:offset - self._lease.offset + packed.size]
            made += moves.sums(some, packed.head_bytes) if packed.run == 1 else sums_of(some, packed).tobytes()
        self.sums = bytes(made)

    def hold(self) -> None:
        """Keep the memory of the copy while its bytes are being sent, until ``let_go`` is called as often."""
        self._held += 1

    def let_go(self) -> None:
        """Undo one ``hold``. After the last one the memory is given back, if ``free`` was called before."""
        self._held -= 1
        if self._store is not None and not self._held:
            self._give(self._store)

    def free(self, store: CopyStore) -> None:
        """Give the memory of the copy back to ``store``: now, or when the last ``hold`` is undone."""
        self.freed = True
        if self._held:
            self._store = store
        else:
            self._give(store)

    def _give(self, store: CopyStore) -> None:
        store.give(self._lease)
        if self._gone is not None:
            self._gone()
